"""Refused arguments; a refusal changes nothing."""

import pytest
import torch

from hebbian_softmax import MbPA, NeuralCache
from tests.memory.oracles import stream


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: NeuralCache(0, 0.3), ValueError, "size must be at least 1, got 0"),
        (lambda: NeuralCache(2.5, 0.3), TypeError, "size must be an integer"),
        (lambda: NeuralCache(10, 0.0), ValueError, "theta must be positive and finite in float32.*got 0.0"),
        (lambda: NeuralCache(10, float("nan")), ValueError, "theta"),
        (lambda: MbPA(10, 11), ValueError, "memory_size must be at least neighbours, 11, got 10"),
        (lambda: MbPA(10, 0), ValueError, "neighbours must be at least 1, got 0"),
        (lambda: MbPA(10, 5, 0), ValueError, "steps must be at least 1"),
        (lambda: MbPA(10, 5, learning_rate=0.0), ValueError, "learning_rate must be positive"),
        (lambda: MbPA(10, 5, l2=-1.0), ValueError, "l2 must be"),
        (lambda: MbPA(10, 5, epsilon=0.0), ValueError, "epsilon must be positive"),
        (lambda: MbPA(10, 5, search="annoy"), ValueError, "search must be"),
    ],
)
def test_settings(make, error, message) -> None:
    with pytest.raises(error, match=message):
        make()


def bad_pairs():
    h, y = stream(6, 4, 5)
    yield h.clone().fill_(torch.nan), y, ValueError, "h must be finite, got 24 values"
    yield h.clone().fill_(torch.inf), y, ValueError, "h must be finite"
    yield h * 1e200, y, ValueError, "finite inner products"
    yield h[:5], y, ValueError, r"targets must have shape \(5,\)"
    yield h[:, :3], y, ValueError, "4 features"
    yield h.float(), y, TypeError, "dtype of those stored"
    yield h.expand(2, 6, 4), y.expand(2, 6), ValueError, "h must have 1 streams"
    yield h.long(), y, TypeError, "h must be floating point"
    yield h, y.double(), TypeError, "integer dtype"
    yield h, y - 10, ValueError, "targets must be at least 0"
    yield h.expand(2, 2, 6, 4), y.expand(2, 2, 6), ValueError, r"\(streams, T, d\)"
    yield h.tolist(), y, TypeError, "h must be a tensor"
    yield h, y.tolist(), TypeError, "targets must be a tensor"


@pytest.mark.parametrize(("h", "targets", "error", "message"), list(bad_pairs()))
def test_activations_and_targets(h, targets, error, message) -> None:
    weight = torch.ones(5, 4, dtype=torch.float64)
    cache, mbpa = NeuralCache(10, 0.5), MbPA(10, 5)
    calls = [
        cache.observe,
        cache.log_prob,
        cache.sequence_log_prob,
        mbpa.observe,
        lambda a, b: mbpa.log_prob(a, b, weight),
        lambda a, b: mbpa.sequence_log_prob(a, b, weight),
    ]
    for memory in (cache, mbpa):
        memory.observe(*stream(3, 4, 5))
    for call in calls:
        with pytest.raises(error, match=message):
            call(h, targets)
    assert len(cache) == len(mbpa) == 3


def test_options_of_a_sequence() -> None:
    h, y = stream(6, 4, 5)
    cache = NeuralCache(10, 0.5)
    for options, message in [
        ({"sizes": [5, 11]}, "sizes must be at most the cache's size, 10, got 11"),
        ({"sizes": []}, "sizes must be a list of at least one"),
        ({"sizes": [0]}, "sizes must be at least 1"),
        ({"thetas": [0.1, -1.0]}, "thetas must be at least 0"),
        ({"block": 0}, "block must be at least 1"),
        ({"workspace": 0}, "workspace must be at least 1"),
    ]:
        with pytest.raises(ValueError, match=message):
            cache.sequence_log_prob(h, y, **options)
    assert len(cache) == 0


def test_layers_and_classes() -> None:
    h, y = stream(6, 4, 5)
    weight = torch.ones(5, 4, dtype=torch.float64)
    mbpa, cache = MbPA(10, 5), NeuralCache(10, 0.5)
    for layer, error, message in [
        ((weight[:, :3],), ValueError, r"weight must have shape \(classes, 4\), got \(5, 3\)"),
        ((weight.float(),), TypeError, "weight must have the dtype of h"),
        ((weight, weight[0]), ValueError, r"bias must have shape \(5,\), got \(4,\)"),
        ((weight[:2],), ValueError, r"targets must be in \[0, 1\]"),
        (("weight",), TypeError, "weight must be a tensor"),
    ]:
        with pytest.raises(error, match=message):
            mbpa.sequence_log_prob(h, y, *layer)
    mbpa.observe(h, y)
    cache.observe(h, y)
    with pytest.raises(ValueError, match="the stored targets"):
        mbpa.probabilities(h, weight[:2])
    with pytest.raises(ValueError, match="the stored targets, with num_classes"):
        cache.probabilities(h, 2)


@pytest.mark.parametrize("memory", [NeuralCache(4, 0.5), MbPA(4, 2)])
def test_states(memory) -> None:
    h, y = stream(6, 3, 5, batch=2)
    for state, message in [
        ({"keys": h}, "state must have the keys"),
        ({"keys": h, "labels": y}, "at most 4 entries a stream, got 6"),
        ({"keys": h[:, :3], "labels": y[:, :2]}, "state must hold keys"),
        ({"keys": h[:, :3].tolist(), "labels": y[:, :3]}, "state must hold keys"),
        (None, "state must have the keys"),
        ({0: h, "keys": h}, "state must have the keys"),
        ({"keys": h[:, :3] * torch.nan, "labels": y[:, :3]}, "observe would take: h must be finite, got 18 values"),
        ({"keys": h[:, :3] * 1e200, "labels": y[:, :3]}, "observe would take: h must have finite inner products"),
        ({"keys": h[:, :3].long(), "labels": y[:, :3]}, "observe would take: h must be floating point"),
        ({"keys": h[:, :3], "labels": y[:, :3] - 10}, "observe would take: targets must be at least 0"),
        ({"keys": h[:, :3], "labels": y[:, :3] + 0.5}, "observe would take: targets must be class indices"),
    ]:
        memory.reset()
        memory.observe(h[:, :1], y[:, :1])
        with pytest.raises(ValueError, match=message):
            memory.load_state_dict(state)
        assert len(memory) == 1
    memory.load_state_dict(type(memory)(4, 2).state_dict())  # The state of an empty memory.
    assert len(memory) == 0
