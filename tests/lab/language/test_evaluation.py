"""Perplexity equals that of a literal loop: word by word, with the state of all words before."""

import math
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from hebbian_softmax.lab.data.buckets import BUCKETS
from hebbian_softmax.lab.language.evaluation import measure, perplexity, score, stream, word_losses
from hebbian_softmax.lab.language.model import LanguageModel
from tests.closeness import assert_as_close
from tests.lab.language.toy import corpus, exactly, model

IDS = corpus().splits["valid"][:30]


def literal_losses(model: LanguageModel, ids: Tensor) -> Tensor:
    state, losses = None, []
    for now, following in pairwise(ids):
        features, state = model.features(now.view(1, 1).long(), state)
        losses.append(-(features.view(-1) @ model.head.weight.T).log_softmax(0)[following])
    return torch.stack(losses).detach()


@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_one_stream_is_the_literal_loop(chunk: int) -> None:
    network = model(layers=2).eval()
    literal, exact = literal_losses(network, IDS), literal_losses(exactly(network), IDS)
    assert_as_close(word_losses(network, IDS, chunk=chunk), literal, exact)


@pytest.mark.parametrize("streams", [2, 3, 7, 29])
def test_streams_are_parts_that_each_begin_anew(streams: int) -> None:
    network = model().eval()
    length = math.ceil(29 / streams)
    parts = [IDS[first : first + length + 1] for first in range(0, 29, length)]
    expected, exact = (
        torch.cat([literal_losses(each, part) for part in parts]) for each in (network, exactly(network))
    )
    assert_as_close(word_losses(network, IDS, streams=streams, chunk=10), expected, exact)
    assert streams == 29 or not torch.allclose(expected, literal_losses(network, IDS))


def test_the_stream_gives_activations_and_targets_in_order() -> None:
    network = model()
    found = list(stream(network, IDS, chunk=8))
    assert torch.equal(torch.cat([targets for _, targets in found]).flatten(), IDS[1:].long())
    activations = torch.cat([each for each, _ in found]).flatten(0, 1)
    network.eval()
    whole, exact = (each.features(IDS[:-1].long().unsqueeze(1))[0].squeeze(1) for each in (network, exactly(network)))
    assert_as_close(activations, whole, exact)
    assert not activations.requires_grad


def test_dropout_is_off_and_the_mode_comes_back() -> None:
    network = model(input_dropout=0.9, output_dropout=0.5).train()
    first = word_losses(network, IDS)
    assert network.training
    assert network.head.training
    assert torch.equal(first, word_losses(network, IDS))
    assert int(network.head.counts.sum()) == 0


def test_bfloat16_is_near() -> None:
    ids = corpus().splits["valid"]
    exact, rounded = word_losses(model(), ids), word_losses(model(precision="bf16"), ids)
    assert rounded.dtype == torch.float32
    assert not torch.equal(exact, rounded)
    torch.testing.assert_close(rounded.mean(), exact.mean(), rtol=torch.finfo(torch.bfloat16).eps, atol=0)


def test_scores_by_training_frequency() -> None:
    counts = torch.tensor([20_000, 5_000, 500, 5])
    targets = torch.tensor([0, 0, 1, 3, 3, 0])
    losses = torch.tensor([1.0, 2.0, 4.0, 6.0, 8.0, 3.0])
    found = score(losses, targets.int(), counts)
    assert found.words == 6
    assert found.perplexity == pytest.approx(math.exp(4.0))
    assert list(found.bucket_words.values()) == [3, 1, 0, 2]
    by_bucket = [math.exp(2.0), math.exp(4.0), None, math.exp(7.0)]
    assert found.bucket_perplexity == pytest.approx(dict(zip(BUCKETS, by_bucket, strict=True)))
    logged = {f"valid_perplexity_{BUCKETS[number]}" for number in (0, 1, 3)}
    assert set(found.as_metrics("valid")) == {"valid_perplexity", *logged}
    assert perplexity(800.0) == math.inf  # a hopeless model has a perplexity, too


def test_measuring_gives_the_loss_and_the_id_of_every_word() -> None:
    words, network, seen = corpus(), model(), []
    found, arrays = measure(network, words, "test", seen=seen.append)
    assert arrays["nll"].dtype == "float32"
    assert arrays["ids"].dtype == "int32"
    assert arrays["ids"].tolist() == words.splits["test"][1:].tolist()
    assert math.log(found.perplexity) == pytest.approx(arrays["nll"].astype("float64").mean())
    assert seen[-1] == len(arrays["nll"]) == found.words


def test_the_first_words_alone() -> None:
    words, network = corpus(), model()
    (some, arrays), (_, whole) = measure(network, words, "valid", first=10), measure(network, words, "valid")
    assert some.words == 10
    literal, exact = (literal_losses(each, words.splits["valid"][:11]) for each in (network, exactly(network)))
    for found in (arrays["nll"], whole["nll"][:10]):
        assert_as_close(torch.from_numpy(found), literal, exact)
    for more in ({"first": 10_000}, {"streams": 10_000}):  # more than there are words
        found, arrays = measure(network, words, "valid", **more)
        assert found.words == len(words.splits["valid"]) - 1 == len(arrays["nll"])
