"""Losses with memories equal those of a literal loop with a dense cache and a layer adapted for each word."""

import math
from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

from hebbian_softmax.lab.base.errors import LabError
from hebbian_softmax.lab.language.evaluation import score
from hebbian_softmax.lab.language.memories.cache import CacheSettings
from hebbian_softmax.lab.language.memories.mbpa import MbpaSettings
from hebbian_softmax.lab.language.memories.memory import ALONE, Memories, Stopped, mixture, read_parts
from hebbian_softmax.lab.language.memories.sweep import score_rows
from tests.closeness import assert_as_close
from tests.lab.language.memories.oracle import losses_of, model, parts_of, perplexity_of, tolerance
from tests.lab.language.toy import corpus, exactly

CACHE = CacheSettings(size=9, theta=0.7, share=0.2)
MBPA = MbpaSettings(size=11, neighbours=4, steps=1, rate=0.6, l2=0.3, share=0.15)
BOTH = Memories((CACHE, MBPA))


def test_reading_that_is_stopped_keeps_the_pieces_before() -> None:
    network, ids = model(), corpus().splits["valid"][:35]

    def stop(done: int) -> None:
        if done == 15:
            raise KeyboardInterrupt

    with pytest.raises(Stopped) as stopped:
        read_parts(network, ids, BOTH, seen=stop, piece=5, keep=True)
    assert isinstance(stopped.value.signal, KeyboardInterrupt)
    whole = read_parts(network, ids, BOTH, piece=5)
    for name, log_prob in stopped.value.parts.items():
        assert_close(log_prob, whole[name][:15], equal_nan=True)
    with pytest.raises(KeyboardInterrupt):
        read_parts(network, ids, BOTH, seen=stop, piece=5)
    rows = score_rows(corpus(), [ALONE, BOTH], {"valid": stopped.value.parts})
    assert [row.scores["valid"].words for row in rows] == [15, 15]


@pytest.mark.parametrize("piece", [5, 4096])
@pytest.mark.parametrize("steps", [1, 2])
def test_each_word_is_that_of_the_literal_loop(piece: int, steps: int) -> None:
    network, ids, seen = model(), corpus().splits["valid"][:35], []
    mbpa = replace(MBPA, steps=steps)
    both = Memories((CACHE, mbpa))
    found = read_parts(network, ids, both, seen=seen.append, piece=piece)
    rounded, exact = parts_of(network, ids, both), parts_of(exactly(network), ids, both)
    assert set(found) == set(exact) == {"model", "cache", "mbpa"}
    for name, log_prob in exact.items():
        assert_as_close(found[name], rounded[name], log_prob, name)
    assert seen[-1] == 34
    assert seen[0] == min(piece, 34)
    allowed = tolerance(network, ids, both)
    for memories in (ALONE, Memories((CACHE,)), Memories((mbpa,)), both):
        literal = losses_of(exact, memories)
        assert_close(mixture(found, memories), torch.tensor(literal, dtype=torch.float64), rtol=0, atol=allowed)


def test_the_cache_and_mbpa_each_change_what_is_predicted() -> None:
    """Otherwise the comparisons here could not fail."""
    network, ids = model(), corpus().splits["valid"][:35]
    parts = parts_of(network, ids, BOTH)
    rows = [losses_of(parts, Memories(each)) for each in ((), (CACHE,), (CACHE, MBPA), (MBPA,))]
    perplexities = [perplexity_of(row) for row in rows]
    for i, one in enumerate(perplexities):
        assert all(abs(one / other - 1) > 1e-3 for other in perplexities[:i])


def test_scores_are_in_all_and_by_frequency() -> None:
    network, words = model(), corpus(tokens=30_000)
    ids = words.splits["valid"][:60]
    parts, allowed = parts_of(exactly(network), ids, BOTH), tolerance(network, ids, BOTH)
    short = replace(words, splits={**words.splits, "valid": ids})
    rows = score_rows(short, [ALONE, Memories((CACHE,)), BOTH], {"valid": read_parts(network, ids, BOTH)})
    assert [row.memories.name for row in rows] == ["alone", "+ cache", "+ cache + MbPA"]
    for row in rows:
        found, literal = row.scores["valid"], losses_of(parts, row.memories)
        expected = score(torch.tensor(literal, dtype=torch.float64), ids[1:], words.counts)
        assert found.bucket_words == expected.bucket_words
        assert found.as_metrics("all") == pytest.approx(expected.as_metrics("all"), rel=allowed)
    assert sum(count > 0 for count in rows[0].scores["valid"].bucket_words.values()) >= 2


def test_bfloat16_is_near() -> None:
    network, ids = model(precision="bf16"), corpus().splits["valid"]
    rounded, exact = read_parts(network, ids, BOTH), read_parts(model(), ids, BOTH)
    assert rounded["mbpa"].dtype == torch.float32
    near, expected = mixture(rounded, BOTH).mean(), mixture(exact, BOTH).mean()
    assert_close(near, expected, rtol=torch.finfo(torch.bfloat16).eps, atol=0)


def test_the_workspace_reaches_the_memories_and_changes_nothing() -> None:
    network, ids = model(), corpus().splits["valid"][:35]
    for memory in (CACHE, MBPA):
        with pytest.raises(LabError, match="workspace must be"):
            read_parts(network, ids, Memories((memory,), workspace=0))
    tight = read_parts(network, ids, replace(BOTH, workspace=3000))
    rounded, exact = parts_of(network, ids, BOTH), parts_of(exactly(network), ids, BOTH)
    for name, log_prob in exact.items():
        assert_as_close(tight[name], rounded[name], log_prob, name)


def test_shares_may_leave_nothing_for_the_model() -> None:
    assert Memories((CacheSettings(share=0.6), MbpaSettings(share=0.4))).name == "+ cache + MbPA"


def test_other_errors_stay_what_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("a bug")

    network = model()
    monkeypatch.setattr(network, "features", fail)
    with pytest.raises(RuntimeError, match="a bug"):
        read_parts(network, corpus().splits["valid"], Memories((CACHE,)))


def test_activations_that_are_not_finite_are_refused() -> None:
    network = model()
    with torch.no_grad():
        network.head.weight[3, 0] = math.nan
    with pytest.raises(LabError, match="cannot use the activations of this model"):
        read_parts(network, corpus().splits["valid"], Memories((CACHE,)))
