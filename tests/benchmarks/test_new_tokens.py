"""The protocol of the benchmark of new tokens, against plain cross-entropy on a toy head."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from benchmarks.new_tokens import alternatives, protocol
from benchmarks.new_tokens.features import Features
from benchmarks.new_tokens.protocol import Split, drawn_tokens, log_normalisers

from hebbian_softmax import NewClasses

TOKENS, POSITIONS, STREAM = 60, 800, 560


@pytest.fixture(scope="module")
def features() -> Features:
    """Return activations near the row of the token that follows, as in a trained model."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(TOKENS, 8, generator=generator)
    targets = torch.multinomial(1 / torch.arange(1.0, TOKENS + 1), POSITIONS, replacement=True, generator=generator)
    return Features(rows[targets] + torch.randn(POSITIONS, 8, generator=generator), targets, rows)


@pytest.fixture(scope="module")
def split(features: Features) -> Split:
    new = torch.tensor([7, 20, 21, 33])
    (log_z,) = log_normalisers(features, [new])
    return Split(features, new, slice(STREAM, POSITIONS), log_z, slice(STREAM))


def test_log_normalisers_leave_out_the_rows_of_each_set(features: Features) -> None:
    sets = [torch.tensor([1, 5, 9]), torch.tensor([5, 30])]
    for found, left_out in zip(log_normalisers(features, sets), sets, strict=True):
        kept = torch.ones(TOKENS, dtype=torch.bool).index_fill(0, left_out, False)
        torch.testing.assert_close(found, (features.h @ features.rows[kept].T).logsumexp(1))


def test_trained_rows_have_the_perplexity_of_the_whole_model(features: Features, split: Split) -> None:
    judged = split.judge(split.trained_rows(), torch.zeros(4))
    h, targets = features.h[STREAM:], features.targets[STREAM:]
    loss = F.cross_entropy(h @ features.rows.T, targets, reduction="none")
    is_new = torch.isin(targets, split.new)
    assert judged["perplexity"] == pytest.approx(math.exp(loss.mean()), rel=1e-4)
    assert judged["perplexity of kept tokens"] == pytest.approx(math.exp(loss[~is_new].mean()), rel=1e-4)
    assert judged["nats of new tokens"] == pytest.approx(float(loss[is_new].mean()), rel=1e-4)


def test_adam_moves_only_rows_that_were_seen_often_enough(split: Split) -> None:
    start = split.written(NewClasses(), bias=True)
    (still,) = split.adam(*start, lr=0.1, epochs=1, gradients_from=10**6)
    assert still == pytest.approx(split.judge(*start))
    first, second = split.adam(*alternatives.mean_row(split), lr=0.01, epochs=2)
    assert second["nats of new tokens"] < first["nats of new tokens"]


@pytest.mark.parametrize("bias", [False, True])
def test_the_write_is_better_than_knowing_frequencies_alone(split: Split, bias: bool) -> None:
    prior = split.judge(*alternatives.line_and_prior(split, bias))["nats of new tokens"]
    assert split.judge(*split.written(NewClasses(), bias))["nats of new tokens"] < prior
    assert split.judge(*alternatives.learned_map(split, 0.1))["nats of new tokens"] < math.inf


def test_settings_are_chosen_on_tokens_that_no_test_has(features: Features) -> None:
    chosen, drawn = drawn_tokens(features.targets, len(features.rows), 3)
    assert len(chosen) > 0
    for each in drawn:
        assert not torch.isin(each, chosen).any()
    assert not torch.equal(drawn[0], drawn[1])


def test_words_that_others_begin_with_are_left_out() -> None:
    pytest.importorskip("transformers", reason="transformers is not installed: pip install -e '.[dev]'")
    from benchmarks.new_tokens.words import split_words

    def tokenizer(text: str, **options: Any) -> Any:
        return SimpleNamespace(input_ids=[0] if text in (" the", " a") else [0, 1])

    texts = ["see the dlr and dlrs", "the mln dlrs, a mln dlrs"]
    assert split_words(tokenizer, texts, 2) == [" dlrs", " mln"]


def test_add_tokens_gives_lost_tokens_the_rows_of_the_protocol(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed: pip install -e '.[dev]'")
    from benchmarks.new_tokens import function
    from benchmarks.new_tokens.features import LENGTH
    from transformers import LlamaConfig

    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(TOKENS, 16, generator=generator)
    pieces = torch.randint(TOKENS, (8, LENGTH), generator=generator)
    targets = pieces[:, 1:].reshape(-1)
    h = rows[targets] + torch.randn(len(targets), 16, generator=generator)
    h[:, 0], rows[:, 0] = 4.0, 0.0  # what all activations have in common stands for a bias
    features, new = Features(h, targets, rows), torch.tensor([7, 20, 21, 33])
    config = LlamaConfig(hidden_size=16, intermediate_size=16, num_attention_heads=1, vocab_size=TOKENS)
    found = function.measure(config, pieces, features, new, streamed=6, judged=2)
    end = 6 * (LENGTH - 1)
    monkeypatch.setattr(protocol, "CALIBRATED", end)  # as many as add_tokens has
    (log_z,) = log_normalisers(features, [new])
    split = Split(features, new, slice(end, len(targets)), log_z, slice(end))
    expected = split.judge(*split.written(NewClasses(), bias=False))
    for name in ("perplexity", "perplexity of kept tokens"):
        assert found[name] == pytest.approx(expected[name], rel=1e-4)
    assert expected["perplexity"] < split.judge(*alternatives.line_and_prior(split, bias=False))["perplexity"]
