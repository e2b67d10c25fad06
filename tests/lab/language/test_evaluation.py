"""Perplexity equals that of a literal loop: word by word, with the state of all words before."""

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from hebbian_softmax.lab.base.errors import LabError
from hebbian_softmax.lab.data.buckets import BUCKETS
from hebbian_softmax.lab.language.evaluation import measure, perplexity, score, stream, text_of, word_losses
from hebbian_softmax.lab.language.learner import make_model
from hebbian_softmax.lab.language.model import LanguageModel
from tests.closeness import assert_as_close
from tests.lab.language.toy import WORDS, corpus, device, exactly, prepared, settings


def model(**changes: Any) -> LanguageModel:
    return make_model(settings(**changes), WORDS, hebbian=True, device=device())


def literal_losses(model: LanguageModel, ids: Tensor) -> Tensor:
    state, losses = None, []
    for now, following in pairwise(ids):
        features, state = model.features(now.view(1, 1).long(), state)
        losses.append(-(features.view(-1) @ model.head.weight.T).log_softmax(0)[following])
    return torch.stack(losses).detach()


@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_one_stream_is_the_literal_loop(chunk: int) -> None:
    ids = corpus().splits["valid"][:30]
    network = model(layers=2).eval()
    literal, exact = literal_losses(network, ids), literal_losses(exactly(network), ids)
    assert_as_close(word_losses(network, ids, chunk=chunk), literal, exact)


@pytest.mark.parametrize("streams", [2, 3, 7, 29])
def test_streams_are_parts_that_each_begin_anew(streams: int) -> None:
    ids = corpus().splits["valid"][:30]
    network = model().eval()
    length = math.ceil(29 / streams)
    parts = [ids[first : first + length + 1] for first in range(0, 29, length)]
    expected, exact = (
        torch.cat([literal_losses(each, part) for part in parts]) for each in (network, exactly(network))
    )
    assert_as_close(word_losses(network, ids, streams=streams, chunk=10), expected, exact)
    assert streams == 29 or not torch.allclose(expected, literal_losses(network, ids))


def test_the_stream_gives_activations_and_targets_in_order() -> None:
    ids = corpus().splits["valid"][:30]
    network = model()
    found = list(stream(network, ids, chunk=8))
    assert torch.equal(torch.cat([targets for _, targets in found]).flatten(), ids[1:].long())
    activations = torch.cat([each for each, _ in found]).flatten(0, 1)
    network.eval()
    whole, exact = (each.features(ids[:-1].long().unsqueeze(1))[0].squeeze(1) for each in (network, exactly(network)))
    assert_as_close(activations, whole, exact)
    assert not activations.requires_grad


def test_dropout_is_off_and_the_mode_comes_back() -> None:
    ids = corpus().splits["valid"][:30]
    network = model(input_dropout=0.9, output_dropout=0.5).train()
    first = word_losses(network, ids)
    assert network.training
    assert network.head.training
    assert torch.equal(first, word_losses(network, ids))
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
    assert found.bucket_perplexity[BUCKETS[0]] == pytest.approx(math.exp(2.0))
    assert found.bucket_perplexity[BUCKETS[1]] == pytest.approx(math.exp(4.0))
    assert found.bucket_perplexity[BUCKETS[2]] is None
    assert found.bucket_perplexity[BUCKETS[3]] == pytest.approx(math.exp(7.0))
    assert set(found.as_metrics("valid")) == {
        "valid_perplexity",
        *(f"valid_perplexity_{BUCKETS[n]}" for n in (0, 1, 3)),
    }


def test_a_hopeless_model_has_a_perplexity_too() -> None:
    assert perplexity(800.0) == math.inf


def test_measuring_gives_the_loss_and_the_id_of_every_word() -> None:
    words = corpus()
    network, seen = model(), []
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
    assert measure(network, words, "valid", first=10_000)[0].words == len(words.splits["valid"]) - 1


def test_more_streams_than_words_are_as_many_as_words() -> None:
    words = corpus()
    found, arrays = measure(model(), words, "valid", streams=10_000)
    assert found.words == len(words.splits["valid"]) - 1 == len(arrays["nll"])


def test_a_text_of_one_word_is_one_clear_line(tmp_path: Any) -> None:
    short = prepared(tmp_path / "short", valid=torch.zeros(1, dtype=torch.int32))
    with pytest.raises(LabError, match=r"the valid text of .*short has 1 words, so nothing can be predicted"):
        text_of(short, "valid")
