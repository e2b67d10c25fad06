"""The made-up corpus has the form of a real one, Zipf's frequencies, and something to learn from."""

import torch

from hebbian_softmax.lab.language.zipf import zipf_corpus


def test_it_is_a_corpus() -> None:
    made = zipf_corpus(500, 20_000)
    train = made.splits["train"]
    assert train.dtype == torch.int32
    assert (len(train), len(made.splits["valid"]), len(made.splits["test"])) == (20_000, 1000, 1000)
    assert len(made.words) == 500
    assert torch.equal(made.counts, torch.bincount(train, minlength=500))
    assert (made.counts.diff() <= 0).all()
    assert max(int(ids.max()) for ids in made.splits.values()) < 500


def test_the_same_sizes_give_the_same_text() -> None:
    one, other = zipf_corpus(500, 20_000), zipf_corpus(500, 20_000)
    assert torch.equal(one.splits["train"], other.splits["train"])
    assert one.fingerprint == other.fingerprint != zipf_corpus(501, 20_000).fingerprint


def test_frequencies_fall_as_zipf_says() -> None:
    counts = zipf_corpus(1000, 200_000).counts.double()
    ranks = torch.arange(1, 1001).double()
    middle = slice(10, 500)
    logs = torch.stack([ranks[middle].log(), counts[middle].log()])
    slope = torch.corrcoef(logs)[0, 1] * logs[1].std() / logs[0].std()
    assert -1.3 < slope < -0.8


def test_half_of_the_words_follow_from_the_one_before() -> None:
    train = zipf_corpus(1000, 200_000).splits["train"].long()
    pairs = torch.bincount(train[:-1] * 1000 + train[1:], minlength=1_000_000).view(1000, 1000)
    likeliest = pairs.max(dim=1).values.sum() / pairs.sum()
    assert 0.48 < likeliest < 0.65
