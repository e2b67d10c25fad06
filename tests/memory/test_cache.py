"""The cache is equation 1, however it is called."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from hebbian_softmax import NeuralCache
from tests.closeness import assert_exact
from tests.memory.oracles import cache_log_prob, on_every_device, stream

EXACT = {"rtol": 1e-9, "atol": 1e-9, "equal_nan": True}


@on_every_device
@pytest.mark.parametrize(
    ("length", "size", "features", "classes"), [(1, 1, 1, 1), (30, 1, 3, 4), (40, 7, 5, 6), (25, 100, 8, 50)]
)
@pytest.mark.parametrize("theta", [0.1, 2.0])
def test_a_sequence_is_the_double_loop(length, size, features, classes, theta, device) -> None:
    h, targets = stream(length, features, classes)
    found = NeuralCache(size, theta).sequence_log_prob(h.to(device), targets.to(device))
    assert_close(found.cpu(), cache_log_prob(h, targets, size, theta), **EXACT)


@settings(max_examples=40)
@given(st.data())
def test_streaming_blocks_and_splits_agree(data: st.DataObject) -> None:
    length, size = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 25))
    h, targets = stream(length, 4, 5, seed=data.draw(st.integers(0, 99)))
    expected = cache_log_prob(h, targets, size, 0.5)

    one_by_one = NeuralCache(size, 0.5)
    for t in range(length):
        assert_close(one_by_one.log_prob(h[t], targets[t]), expected[t], **EXACT)
        one_by_one.observe(h[t], targets[t])

    cuts = sorted({0, length, *data.draw(st.lists(st.integers(0, length), max_size=4))})
    split = NeuralCache(size, 0.5)
    parts = []
    for low, high in itertools.pairwise(cuts):
        block, workspace = data.draw(st.integers(1, 50)), data.draw(st.sampled_from([1, 500, 5_000, 2**20]))
        parts.append(split.sequence_log_prob(h[low:high], targets[low:high], block=block, workspace=workspace))
    assert_close(torch.cat(parts), expected, **EXACT)
    for name, value in split.state_dict().items():
        assert torch.equal(value, one_by_one.state_dict()[name])


@settings(max_examples=30)
@given(st.integers(1, 12), st.lists(st.integers(0, 30), min_size=1, max_size=8))
def test_what_is_kept_does_not_depend_on_how_it_came(size: int, parts: list[int]) -> None:
    h, targets = stream(sum(parts), 3, 5)
    cache = NeuralCache(size, 1.0)
    for part, labels in zip(h.split(parts), targets.split(parts), strict=True):
        cache.observe(part, labels)
    assert len(cache) == min(size, len(h))
    if len(h):
        assert torch.equal(cache.state_dict()["keys"][0], h[-size:])
        assert torch.equal(cache.state_dict()["labels"][0], targets[-size:])


def test_streams_are_independent() -> None:
    h, targets = stream(30, 4, 5, batch=3)
    cache = NeuralCache(9, 0.7)
    parts = (slice(0, 11), slice(11, 30))
    found = torch.cat([cache.sequence_log_prob(h[:, part], targets[:, part]) for part in parts], 1)
    assert_close(found, torch.stack([cache_log_prob(a, b, 9, 0.7) for a, b in zip(h, targets, strict=True)]), **EXACT)
    single = NeuralCache(9, 0.7)
    single.observe(h[1], targets[1])
    assert_close(cache.log_prob(h, targets)[1], single.log_prob(h[1], targets[1]), **EXACT)
    assert_close(cache.probabilities(h, 5)[1], single.probabilities(h[1], 5), **EXACT)


@on_every_device
def test_a_sweep_is_each_of_its_evaluations(device: str) -> None:
    h, targets = stream(60, 4, 5)
    thetas, sizes = [0.3, 0.1, 0.2], [20, 3, 50, 7, 20]  # In any order, and one of them twice.
    expected = [[cache_log_prob(h, targets, size, theta)[13:] for size in sizes] for theta in thetas]
    h, targets = h.to(device), targets.to(device)
    cache = NeuralCache(50, 1.0)
    cache.sequence_log_prob(h[:13], targets[:13])
    found = cache.sequence_log_prob(h[13:], targets[13:], thetas=thetas, sizes=sizes, block=8, workspace=3_000)
    assert_close(found.cpu(), torch.stack([torch.stack(each) for each in expected]), **EXACT)
    again = NeuralCache(50, 0.2)
    assert again.sequence_log_prob(h, targets, thetas=[0.2]).shape == (1, 60)
    again.reset()
    assert again.sequence_log_prob(h, targets, sizes=[3, 50]).shape == (2, 60)


@on_every_device
def test_distributions_sum_to_one_and_hold_the_targets(device: str) -> None:
    h, targets = (each.to(device) for each in stream(40, 4, 6))
    cache = NeuralCache(15, 0.4)
    cache.observe(h[:30], targets[:30])
    full = cache.probabilities(h[30:], 9)
    assert_close(full.sum(-1), torch.ones(10, dtype=torch.float64, device=device))
    at_target = full.gather(1, targets[30:, None])[:, 0].log()
    assert_close(cache.log_prob(h[30:], targets[30:], workspace=700), at_target, **EXACT)
    assert full[:, 6:].count_nonzero() == 0


def test_an_empty_cache_has_no_distribution() -> None:
    h, targets = stream(3, 4, 6)
    cache = NeuralCache(15, 0.4)
    assert cache.log_prob(h, targets).isnan().all()
    assert cache.probabilities(h, 6).isnan().all()
    assert cache.sequence_log_prob(h[:0], targets[:0]).shape == (0,)


def test_scores_far_apart_neither_overflow_nor_vanish() -> None:
    h = torch.tensor([[30.0], [1.0], [30.0]])  # exp(900) and exp(30), in float32.
    found = NeuralCache(10, 1.0).sequence_log_prob(h, torch.tensor([0, 1, 1]))
    assert_exact(found[2], torch.tensor(-870.0))


@on_every_device
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_sums_are_at_least_float32(dtype: torch.dtype, device: str) -> None:
    h, targets = stream(50, 8, 5)
    h = h.to(dtype)
    found = NeuralCache(20, 0.3).sequence_log_prob(h.to(device), targets.to(device))
    assert found.dtype == torch.float32
    largest = 1 + 0.3 * float(h.double().square().sum(-1).max())  # A score is rounded in proportion to its size.
    ulps = 16 if device == "cpu" else 256  # Tensor cores cut sums off instead of rounding them.
    assert_exact(found.cpu(), cache_log_prob(h.double(), targets, 20, 0.3), scale=largest, ulps=ulps)


def test_the_state_goes_on_elsewhere() -> None:
    h, targets = stream(40, 4, 5, batch=2)
    cache, other = NeuralCache(12, 0.5), NeuralCache(12, 0.5)
    other.load_state_dict(cache.state_dict())
    assert len(other) == 0
    cache.observe(h[:, :20], targets[:, :20])
    state = cache.state_dict()
    expected = cache.sequence_log_prob(h[:, 20:], targets[:, 20:])
    other.load_state_dict(state)
    assert torch.equal(other.sequence_log_prob(h[:, 20:], targets[:, 20:]), expected)
    assert torch.equal(state["keys"], h[:, 8:20])  # The state is a copy, which later calls do not change.
