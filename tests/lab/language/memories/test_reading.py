"""Perplexities with memories are those of a literal loop: a dense cache, a layer copied and adapted for each word."""

import math
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from hebbian_softmax.lab.base.errors import LabError
from hebbian_softmax.lab.data.buckets import BUCKETS
from hebbian_softmax.lab.language.evaluation import word_losses
from hebbian_softmax.lab.language.memories import reading as module
from hebbian_softmax.lab.language.memories.reading import CacheSettings, MbpaSettings, Memories, mixture, read_parts
from hebbian_softmax.lab.language.memories.rows import ALONE, score_rows
from tests.lab.language.memories.oracle import losses_of, model, parts_of, perplexity_of
from tests.lab.language.toy import corpus

CACHE = CacheSettings(size=9, theta=0.7, share=0.2)
MBPA = MbpaSettings(size=11, neighbours=4, steps=1, rate=0.6, l2=0.3, share=0.15)


@pytest.mark.parametrize("piece", [5, 4096])
@pytest.mark.parametrize("steps", [1, 2])
def test_each_word_is_that_of_the_literal_loop(piece: int, steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if steps == 1:
        monkeypatch.setitem(module.PIECES, "cpu", piece)
    else:
        monkeypatch.setattr(module, "SLOW_PIECE", piece)
    network, ids, seen = model(), corpus().splits["valid"][:35], []
    both = Memories(CACHE, MbpaSettings(**{**vars(MBPA), "steps": steps}))
    found, expected = read_parts(network, ids, both, seen=seen.append), parts_of(network, ids, both)
    assert set(found) == set(expected) == {"model", "cache", "mbpa"}
    for name, log_prob in expected.items():
        assert_close(found[name].double(), log_prob, rtol=1e-5, atol=1e-5, equal_nan=True)
    assert seen[-1] == 34
    assert seen[0] == min(piece, 34)
    for memories in (ALONE, Memories(CACHE, None), Memories(None, both.mbpa), both):
        literal = losses_of(expected, memories.cache, memories.mbpa)
        assert_close(mixture(found, memories), torch.tensor(literal, dtype=torch.float64), rtol=1e-5, atol=1e-5)
        mean = math.exp(float(mixture(found, memories).mean()))
        assert mean == pytest.approx(perplexity_of(literal), rel=1e-5)


def test_the_model_alone_is_that_of_the_plain_evaluation() -> None:
    network, ids = model(), corpus().splits["valid"]
    assert_close(-read_parts(network, ids, ALONE)["model"], word_losses(network, ids))


def test_the_cache_and_mbpa_each_change_what_is_predicted() -> None:
    """Or else the comparisons here could not fail."""
    network, ids = model(), corpus().splits["valid"][:35]
    parts = parts_of(network, ids, Memories(CACHE, MBPA))
    rows = [losses_of(parts, *each) for each in ((None, None), (CACHE, None), (CACHE, MBPA), (None, MBPA))]
    perplexities = [perplexity_of(row) for row in rows]
    for i, one in enumerate(perplexities):
        assert all(abs(one / other - 1) > 1e-3 for other in perplexities[:i])


def test_scores_are_in_all_and_by_frequency() -> None:
    network, words = model(), corpus(tokens=30_000)
    both = Memories(CACHE, MBPA)
    ids = words.splits["valid"][:60]
    parts = parts_of(network, ids, both)
    short = type(words)(**{**vars(words), "splits": {**words.splits, "valid": ids}})
    rows = score_rows(short, [ALONE, Memories(CACHE, None), both], {"valid": read_parts(network, ids, both)})
    assert [row.memories.name for row in rows] == ["alone", "+ cache", "+ cache + MbPA"]
    for row in rows:
        literal = losses_of(parts, row.memories.cache, row.memories.mbpa)
        found = row.scores["valid"]
        assert found.perplexity == pytest.approx(perplexity_of(literal), rel=1e-5)
        for low, high, bucket in ((0, 100, BUCKETS[3]), (100, 1_000, BUCKETS[2]), (1_000, 10_001, BUCKETS[1])):
            picked = [
                loss
                for loss, word in zip(literal, ids[1:].tolist(), strict=True)
                if low <= int(words.counts[word]) < high
            ]
            assert found.bucket_words[bucket] == len(picked)
            if picked:
                assert found.bucket_perplexity[bucket] == pytest.approx(perplexity_of(picked), rel=1e-5)
    assert sum(count > 0 for count in rows[0].scores["valid"].bucket_words.values()) >= 2


def test_bfloat16_is_near() -> None:
    network, ids = model(precision="bf16"), corpus().splits["valid"]
    both = Memories(CACHE, MBPA)
    rounded, exact = read_parts(network, ids, both), read_parts(model(), ids, both)
    assert rounded["mbpa"].dtype == torch.float32
    assert_close(mixture(rounded, both).mean(), mixture(exact, both).mean(), rtol=0.01, atol=0)


def test_the_workspace_reaches_the_memories_and_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    network, ids, seen = model(), corpus().splits["valid"], []
    for memory in (module.NeuralCache, module.MbPA):

        def noting(*arguments: Any, whole: Any = memory.sequence_log_prob, **options: Any) -> Any:
            seen.append(options["workspace"])
            return whole(*arguments, **options)

        monkeypatch.setattr(memory, "sequence_log_prob", noting)
    both = Memories(CACHE, MBPA)
    roomy, tight = read_parts(network, ids, both), read_parts(network, ids, Memories(CACHE, MBPA, workspace=3000))
    assert seen == [None, None, 3000, 3000]
    assert_close(mixture(roomy, both), mixture(tight, both), rtol=1e-5, atol=1e-5)


def test_what_cannot_be_mixed_is_refused() -> None:
    with pytest.raises(LabError, match=r"0\.7 and 0\.4, sum to 1\.1"):
        Memories(CacheSettings(share=0.7), MbpaSettings(share=0.4))
    with pytest.raises(LabError, match=r"1,024 neighbours in a memory of 1,000 words"):
        Memories(None, MbpaSettings(size=1000))
    Memories(CacheSettings(share=0.6), MbpaSettings(share=0.4))


@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("CUDA out of memory."), RuntimeError("DefaultCPUAllocator: can't allocate memory: 9")],
)
def test_a_device_too_small_is_one_clear_line(error: RuntimeError, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(module.NeuralCache, "sequence_log_prob", refuse)
    with pytest.raises(LabError, match=r"too small .* --workspace"):
        read_parts(model(), corpus().splits["valid"], Memories(CACHE, None))


def test_other_errors_stay_what_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(module.NeuralCache, "sequence_log_prob", fail)
    with pytest.raises(RuntimeError, match="a bug"):
        read_parts(model(), corpus().splits["valid"], Memories(CACHE, None))


def test_activations_that_are_not_finite_are_refused() -> None:
    network = model()
    with torch.no_grad():
        network.head.weight[3, 0] = math.nan
    with pytest.raises(LabError, match="cannot use the activations of this model"):
        read_parts(network, corpus().splits["valid"], Memories(CACHE, None))
