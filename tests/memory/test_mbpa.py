"""MbPA gives what a layer gives that is copied and adapted for each query, and a sweep what its points give alone."""

import sys
import types
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.testing import assert_close

from hebbian_softmax import MbPA
from tests.closeness import assert_exact
from tests.memory.oracles import mbpa_distribution, mbpa_log_prob, on_every_device, stream
from tests.operations import Watch

EXACT = {"rtol": 1e-9, "atol": 1e-9}


def largest_logit(h: torch.Tensor, head: nn.Linear, rate: float) -> float:
    """Return a bound on the logits after a step: log p is rounded in proportion to them."""
    norm, rows = h.double().square().sum(-1).max(), head.weight.detach().double().square().sum(1)
    return float(1 + (norm * rows.max()).sqrt() + rate * (norm + 1))


def head_of(features: int, classes: int, bias: bool = True) -> nn.Linear:
    torch.manual_seed(1)
    return nn.Linear(features, classes, bias=bias, dtype=torch.float64)


def layer_of(head: nn.Linear, device: str = "cpu") -> list[torch.Tensor]:
    return [each.to(device) for each in head.parameters()]


@on_every_device
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("steps", [1, 2, 3])
@pytest.mark.parametrize(
    ("length", "size", "neighbours", "features", "classes"), [(15, 6, 3, 4, 5), (12, 30, 8, 3, 17), (6, 4, 4, 1, 1)]
)
def test_a_sequence_is_copy_and_adapt(length, size, neighbours, features, classes, steps, bias, device) -> None:
    h, targets = stream(length, features, classes, scale=1.5)
    head, mbpa = head_of(features, classes, bias), MbPA(size, neighbours, steps, 0.4, 0.7, epsilon=0.01)
    expected = mbpa_log_prob(h, targets, head, mbpa)
    for options in ({}, {"block": 6, "workspace": 5_000}):
        mbpa.reset()
        found = mbpa.sequence_log_prob(h.to(device), targets.to(device), *layer_of(head, device), **options)
        assert_close(found.cpu(), expected, **EXACT)


@settings(max_examples=25)
@given(st.data())
def test_streaming_blocks_and_splits_agree(data: st.DataObject) -> None:
    length, size = data.draw(st.integers(1, 20)), data.draw(st.integers(3, 12))
    steps = data.draw(st.integers(1, 2))
    h, targets = stream(length, 3, 7, seed=data.draw(st.integers(0, 99)))
    head = head_of(3, 7)
    one_by_one, expected = MbPA(size, 3, steps), []
    for t in range(length):
        expected.append(one_by_one.log_prob(h[t], targets[t], head.weight, head.bias))
        one_by_one.observe(h[t], targets[t])
    cut = data.draw(st.integers(0, length))
    split, parts = MbPA(size, 3, steps), []
    for part, labels in ((h[:cut], targets[:cut]), (h[cut:], targets[cut:])):
        block, workspace = data.draw(st.integers(1, 25)), data.draw(st.sampled_from([1, 1_000, 20_000, 2**20]))
        parts.append(split.sequence_log_prob(part, labels, head.weight, head.bias, block=block, workspace=workspace))
    assert_close(torch.cat(parts), torch.stack(expected), **EXACT)
    for name, value in split.state_dict().items():
        assert torch.equal(value, one_by_one.state_dict()[name])


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("stored", [0, 2, 30])
@pytest.mark.parametrize("workspace", [None, 1, 3_000])
def test_whole_distributions(steps: int, stored: int, workspace: int | None) -> None:
    h, targets = stream(40, 4, 9)
    head = head_of(4, 9)
    mbpa = MbPA(20, 5, steps, 0.5, 0.3)
    mbpa.observe(h[:stored], targets[:stored])
    kept = slice(max(0, stored - 20), stored)
    expected = torch.stack([mbpa_distribution(q, h[kept], targets[kept], head, mbpa) for q in h[30:]])
    found = mbpa.probabilities(h[30:], head.weight, head.bias, workspace=workspace)
    assert_close(found, expected.exp(), **EXACT)
    at_target = mbpa.log_prob(h[30:], targets[30:], head.weight, head.bias, workspace=workspace)
    assert_close(at_target, expected.gather(1, targets[30:, None])[:, 0], **EXACT)
    if stored == 0:
        assert_close(found, head(h[30:]).softmax(1).detach(), **EXACT)


def test_the_pull_is_zero_at_the_first_step_and_not_at_the_second() -> None:
    h, targets = stream(20, 4, 9)
    head = head_of(4, 9)

    def found(steps: int, l2: float) -> torch.Tensor:
        return MbPA(20, 5, steps, 0.5, l2).sequence_log_prob(h, targets, head.weight, head.bias)

    assert torch.equal(found(1, 0.0), found(1, 2.0))
    assert not torch.allclose(found(2, 0.0), found(2, 2.0))


def test_streams_are_independent_and_the_state_goes_on_elsewhere() -> None:
    h, targets = stream(18, 4, 6, batch=2)
    head = head_of(4, 6)
    mbpa, other = MbPA(7, 3), MbPA(7, 3)
    mbpa.sequence_log_prob(h[:, :10], targets[:, :10], head.weight, head.bias)
    other.load_state_dict(mbpa.state_dict())
    found = mbpa.sequence_log_prob(h[:, 10:], targets[:, 10:], head.weight, head.bias)
    assert torch.equal(found, other.sequence_log_prob(h[:, 10:], targets[:, 10:], head.weight, head.bias))
    for i in range(2):
        assert_close(found[i], mbpa_log_prob(h[i], targets[i], head, mbpa)[10:], **EXACT)


def test_a_stored_activation_that_is_the_query_itself() -> None:
    h, targets = stream(5, 4, 6, scale=3.0)
    h, targets = torch.cat([h, h]) + 100, torch.cat([targets, targets])  # With a large common part.
    head, mbpa = head_of(4, 6), MbPA(20, 3)
    found = mbpa.sequence_log_prob(h, targets, head.weight, head.bias)
    assert_close(found, mbpa_log_prob(h, targets, head, mbpa), rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_repeated_activations_have_exact_distances_in_float32(dtype: torch.dtype) -> None:
    """By products alone, distances of 0 would be rounded to 1e-4 at these norms: a tenth of ε, and 0.1 in log p."""
    h, targets = stream(60, 64, 20, scale=2.0)
    h = h[torch.arange(60) % 3].to(dtype)
    head = nn.Linear(64, 20, bias=False, dtype=torch.float64).to(dtype)
    sequence = MbPA(60, 60).sequence_log_prob(h, targets, head.weight)
    mbpa, one_by_one = MbPA(60, 60), []
    for t in range(60):
        one_by_one.append(mbpa.log_prob(h[t], targets[t], head.weight))
        mbpa.observe(h[t], targets[t])
    expected = mbpa_log_prob(h.double(), targets, head.double(), mbpa)
    for found in (sequence, torch.stack(one_by_one)):
        assert_exact(found, expected, scale=largest_logit(h, head, 0.3))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_sums_are_at_least_float32(dtype: torch.dtype) -> None:
    h, targets = stream(12, 4, 6)
    head, mbpa = head_of(4, 6).to(dtype), MbPA(7, 3)
    found = mbpa.sequence_log_prob(h.to(dtype), targets, head.weight, head.bias)
    assert found.dtype == torch.float32
    expected = mbpa_log_prob(h.to(dtype).double(), targets, head.double(), mbpa)
    # Distances come from products, and may lose all digits but those of 128 roundings (CLOSE).
    assert_exact(found, expected, scale=largest_logit(h, head, 0.3), ulps=256)


@pytest.mark.parametrize(("queries", "most"), [(1, 5), (3, 15), (30, 100)])
def test_only_what_is_a_neighbour_goes_through_the_layer(queries: int, most: int) -> None:
    """One query of a stream must not cost the softmaxes of all stored entries; many queries share them."""
    h, targets = stream(130, 4, 6)
    head = head_of(4, 6)
    mbpa = MbPA(100, 5)
    mbpa.observe(h[:100], targets[:100])
    with Watch() as watch:
        found = mbpa.log_prob(h[100 : 100 + queries], targets[100 : 100 + queries], head.weight, head.bias)
    through_the_layer = [left[0] for left, right in watch.products if right == (4, 6)]
    assert 0 < max(through_the_layer) <= most
    for q in range(100, 100 + queries):
        expected = mbpa_distribution(h[q], h[:100], targets[:100], head, mbpa)[targets[q]]
        assert_close(found[q - 100], expected, **EXACT)


@settings(max_examples=15)
@given(st.data())
def test_a_sweep_is_each_of_its_evaluations(data: st.DataObject) -> None:
    length, bias = data.draw(st.integers(2, 16)), data.draw(st.booleans())
    h, targets = stream(length, 3, 7, seed=data.draw(st.integers(0, 99)))
    head = head_of(3, 7, bias)
    counts, rates = [5, 2, 9, 2], [0.7, 0.1]  # In any order, and one of them twice.
    mbpa, cut, parts = MbPA(9, 3), data.draw(st.integers(0, length)), []
    for part, labels in ((h[:cut], targets[:cut]), (h[cut:], targets[cut:])):
        options: dict[str, Any] = {"block": data.draw(st.integers(1, 20)), "neighbours": counts}
        options |= {"workspace": data.draw(st.sampled_from([1, 1_000, 20_000, 2**20])), "learning_rates": rates}
        parts.append(mbpa.sequence_log_prob(part, labels, head.weight, head.bias, **options))
    found = torch.cat(parts, -1)
    assert found.shape == (4, 2, length)
    for i, k in enumerate(counts):
        for j, rate in enumerate(rates):
            assert_close(found[i, j], mbpa_log_prob(h, targets, head, MbPA(9, k, 1, rate)), **EXACT)


def test_a_sweep_of_one_setting_keeps_the_other() -> None:
    h, targets = stream(12, 3, 7, batch=2)
    head = head_of(3, 7)

    def found(count: int, rate: float, **sweep: Any) -> torch.Tensor:
        return MbPA(8, count, 1, rate).sequence_log_prob(h, targets, head.weight, head.bias, **sweep)

    rates, counts = found(4, 0.6, learning_rates=[0.3, 0.1]), found(4, 0.6, neighbours=[2, 8])
    assert_close(rates, torch.stack([found(4, 0.3), found(4, 0.1)]), **EXACT)
    assert_close(counts, torch.stack([found(2, 0.6), found(8, 0.6)]), **EXACT)


@pytest.mark.parametrize(
    ("steps", "sweep", "message"),
    [
        (2, {"neighbours": [3]}, "need steps=1"),
        (2, {"learning_rates": [0.1]}, "need steps=1"),
        (1, {"neighbours": [3, 9]}, "at most the memory's size, 8, got 9"),
        (1, {"neighbours": []}, "at least one value"),
        (1, {"neighbours": [0]}, "neighbours must be"),
        (1, {"learning_rates": [0.1, 0.0]}, "learning_rates must be positive"),
    ],
)
def test_bad_grids_are_refused_and_nothing_is_stored(steps: int, sweep: dict[str, Any], message: str) -> None:
    h, targets = stream(4, 3, 7)
    head, mbpa = head_of(3, 7), MbPA(8, 3, steps)
    with pytest.raises(ValueError, match=message):
        mbpa.sequence_log_prob(h, targets, head.weight, head.bias, **sweep)
    assert len(mbpa) == 0


def test_faiss_gives_the_same_or_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    h, targets = stream(30, 4, 6)
    head = head_of(4, 6)
    exact, by_faiss = MbPA(20, 4), MbPA(20, 4, search="faiss")
    for mbpa in (exact, by_faiss):
        mbpa.observe(h[:25], targets[:25])
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(ImportError, match=r"hebbian-softmax\[faiss\]"):
        by_faiss.log_prob(h[25:], targets[25:], head.weight, head.bias)
    with pytest.raises(ValueError, match="search must be"):
        by_faiss.sequence_log_prob(h, targets, head.weight, head.bias)

    class IndexFlatL2:  # A stand-in with the methods that are used, because faiss may not be installed.
        def __init__(self, features: int) -> None:
            assert features == 4

        def add(self, keys) -> None:
            self.keys = torch.from_numpy(keys)

        def search(self, queries, k: int):
            found = torch.cdist(torch.from_numpy(queries), self.keys).square().topk(k, largest=False)
            return (found.values + 1e-4).numpy(), found.indices.numpy()  # The error of products: a tenth of ε.

    monkeypatch.setitem(sys.modules, "faiss", types.SimpleNamespace(IndexFlatL2=IndexFlatL2))
    found = by_faiss.log_prob(h[20:], targets[20:], head.weight, head.bias)  # Five of these are stored.
    expected = exact.log_prob(h[20:], targets[20:], head.weight, head.bias)
    assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_real_faiss_gives_the_same() -> None:
    pytest.importorskip("faiss", reason="faiss is not installed")
    h, targets = stream(60, 4, 6)
    head = head_of(4, 6)
    for stored, neighbours in ((3, 5), (40, 5)):  # Fewer entries than K, and more.
        exact, by_faiss = MbPA(40, neighbours), MbPA(40, neighbours, search="faiss")
        for mbpa in (exact, by_faiss):
            mbpa.observe(h[:stored], targets[:stored])
        found = by_faiss.log_prob(h[40:], targets[40:], head.weight, head.bias)
        assert_close(found, exact.log_prob(h[40:], targets[40:], head.weight, head.bias), rtol=1e-5, atol=1e-5)
