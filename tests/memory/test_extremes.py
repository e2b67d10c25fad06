"""Settings and activations at the ends of the range of floating point: nothing may turn into NaN, which ``mix`` takes
for an empty memory.
"""

from __future__ import annotations

import math
import re

import pytest
import torch
from torch import Tensor

from hebbian_softmax import MbPA, NeuralCache
from hebbian_softmax.memory import mix
from tests.closeness import assert_exact

THETAS = [1.2e-38, 1e-3, 1e4, 1e20, 1e38, 3.4e38]
SIZE = 5


def a_text(scale: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return activations whose inner products are whole numbers times ``scale``², and the words after them."""
    return (scale * torch.randint(-3, 4, (12, 8)).double()).to(dtype), torch.randint(4, (12,))


def exact_log_prob(h: Tensor, targets: Tensor, theta: float) -> Tensor:
    """Return log p_c of each position in Python's floats, which hold θ times any of these scores."""
    found = []
    for t, target in enumerate(targets.tolist()):
        window = range(max(0, t - SIZE), t)
        scores = {i: float(h[t].double() @ h[i].double()) for i in window}
        mine = [scores[i] for i in window if targets[i] == target]
        if not window or not mine:
            found.append(-math.inf if window else math.nan)
            continue
        top, best = max(mine), max(scores.values())
        shares = [sum(math.exp(theta * (s - m)) for s in some) for some, m in ((mine, top), (scores.values(), best))]
        found.append(theta * (top - best) + math.log(shares[0]) - math.log(shares[1]))
    return torch.tensor(found, dtype=torch.float64)


@pytest.mark.parametrize("theta", THETAS)
@pytest.mark.parametrize(
    ("scale", "dtype"),
    [
        (1.0, torch.float32),
        (2.0**-40, torch.float32),
        (2.0**50, torch.float32),
        (64.0, torch.float16),
        (1.0, torch.bfloat16),
        (2.0**400, torch.float64),
    ],
    ids=str,
)
def test_the_cache_at_any_inverse_temperature(theta, scale, dtype) -> None:
    h, targets = a_text(scale, dtype)
    lowest = torch.finfo(torch.promote_types(dtype, torch.float32)).min
    expected = exact_log_prob(h, targets, theta)
    expected = torch.where(expected == -math.inf, expected, expected.clamp(min=lowest))
    cache = NeuralCache(SIZE, theta)
    assert_close(cache.sequence_log_prob(h, targets), expected)
    several = NeuralCache(SIZE, 1.0).sequence_log_prob(h, targets, thetas=[1.0, theta], sizes=[1, SIZE], block=2)
    assert_close(several[1, 1], expected)
    step_by_step = NeuralCache(SIZE, theta)
    for t in range(len(h)):
        assert_close(step_by_step.log_prob(h[t], targets[t]), expected[t])
        p = step_by_step.probabilities(h[t], 4)
        if t:
            assert_exact(p.sum(), torch.ones((), dtype=torch.float64))
            assert_exact(p[targets[t]], expected[t].exp(), scale=1.0)
        step_by_step.observe(h[t], targets[t])


def assert_close(found: Tensor, expected: Tensor) -> None:
    """Compare each number with its own size: log-probabilities at a huge θ have all sizes."""
    same = (found == expected) | (found.isnan() & expected.isnan())
    error = (found.double() - expected).abs() / expected.abs().clamp(min=1)
    assert (same | (error < 16 * torch.finfo(found.dtype).eps)).all(), f"{found.tolist()} is not {expected.tolist()}"


@pytest.mark.gpu
@pytest.mark.parametrize("theta", THETAS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_cache_on_a_gpu(theta, dtype) -> None:
    """Where θ is too large or too small for the kernel, torch computes."""
    h, targets = a_text(1.0, dtype)
    expected = exact_log_prob(h, targets, theta)
    expected = torch.where(expected == -math.inf, expected, expected.clamp(min=torch.finfo(torch.float32).min))
    found = NeuralCache(SIZE, theta).sequence_log_prob(h.cuda(), targets.cuda())
    same = (found.cpu() == expected) | (found.cpu().isnan() & expected.isnan())
    # The kernel multiplies by θ before it subtracts the largest score, so the size of that product decides.
    error = (found.cpu().double() - expected).abs() / (expected.abs() + theta * h.double().square().sum(1).max()).clamp(
        min=1
    )
    assert (same | (error < 16 * torch.finfo(torch.float32).eps)).all()


def test_a_huge_inverse_temperature_is_not_taken_for_an_empty_cache() -> None:
    h, targets = torch.ones(3, 8), torch.tensor([1, 2, 2])
    cache = NeuralCache(SIZE, 1e38)
    mixed = mix(torch.full((3,), math.log(0.5)), cache=cache.sequence_log_prob(h, targets), cache_weight=0.2)
    torch.testing.assert_close(mixed.exp(), torch.tensor([0.5, 0.4, 0.8 * 0.5 + 0.2 * 0.5]))


@pytest.mark.parametrize("name", ["theta", "thetas", "learning_rate", "learning_rates", "epsilon"])
@pytest.mark.parametrize("value", [0.0, 1e-39, 5e-324, 3.5e38, 1e300, math.inf, math.nan, -1.0])
def test_numbers_that_float32_does_not_hold_are_refused(name, value) -> None:
    h, targets = torch.randn(4, 8), torch.tensor([0, 1, 2, 0])
    calls = {
        "theta": lambda: NeuralCache(SIZE, value),
        "thetas": lambda: NeuralCache(SIZE, 1.0).sequence_log_prob(h, targets, thetas=[1.0, value]),
        "learning_rate": lambda: MbPA(SIZE, 2, learning_rate=value),
        "learning_rates": lambda: MbPA(SIZE, 2).sequence_log_prob(h, targets, h, learning_rates=[value]),
        "epsilon": lambda: MbPA(SIZE, 2, epsilon=value),
    }
    with pytest.raises(ValueError, match=rf"{name} must be .*got {re.escape(str(value))}"):
        calls[name]()


@pytest.mark.parametrize("epsilon", [1.2e-38, 1e-30, 1e-3, 1e30, 3.4e38])
@pytest.mark.parametrize("scale", [0.0, 1e-18, 1.0, 1e15])
def test_the_weights_of_neighbours_at_any_distance(epsilon: float, scale: float) -> None:
    """Keys at the same place, close together and far apart; compared with the same in float64."""
    h, targets = (scale * torch.randn(12, 8)).double(), torch.randint(4, (12,))
    h[5:8] = h[4]
    weight = (torch.randn(4, 8) / max(scale, 1.0)).double()
    rate = 0.3 / max(scale, 1.0) ** 2
    results = []
    for dtype in (torch.float32, torch.float64):
        mbpa = MbPA(SIZE, 3, learning_rate=max(rate, 1.2e-38), epsilon=epsilon)
        results.append(mbpa.sequence_log_prob(h.float().to(dtype), targets, weight.float().to(dtype)))
    found, expected = results
    assert found.isfinite().all()
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "options",
    [{"learning_rate": 1e38}, {"l2": 1e38, "steps": 3}, {"learning_rate": 1e20, "l2": 1e20, "steps": 3}],
    ids=str,
)
def test_an_adaptation_that_overflows_is_an_error_and_stores_nothing(options) -> None:
    h, targets, weight = 10 * torch.randn(6, 8), torch.tensor([1, 2, 1, 2, 1, 1]), torch.randn(5, 8)
    mbpa = MbPA(4, 3, **options)
    with pytest.raises(ValueError, match=r"must be finite in torch.float32.*learning_rate=.*overflow"):
        mbpa.sequence_log_prob(h, targets, weight)
    assert len(mbpa) == 0
    mbpa.observe(h, targets)
    for call in (lambda: mbpa.log_prob(h, targets, weight), lambda: mbpa.probabilities(h, weight)):
        with pytest.raises(ValueError, match="overflow"):
            call()
    assert MbPA(4, 3).sequence_log_prob(h, targets, weight).isfinite().all()


def test_a_sweep_names_the_rates_that_overflow_and_stores_nothing() -> None:
    h, targets, weight = 10 * torch.randn(6, 8), torch.tensor([1, 2, 1, 2, 1, 1]), torch.randn(5, 8)
    mbpa = MbPA(4, 3)
    with pytest.raises(ValueError, match=r"learning_rates \[1e\+38, 2e\+38\] make them overflow: leave these out"):
        mbpa.sequence_log_prob(h, targets, weight, learning_rates=[0.1, 1e38, 0.3, 2e38], neighbours=[1, 3])
    assert len(mbpa) == 0
    assert mbpa.sequence_log_prob(h, targets, weight, learning_rates=[0.1, 0.3]).isfinite().all()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["weight", "bias"])
def test_a_layer_that_is_not_finite(where, value) -> None:
    """A bias of -inf masks a class; anything else leaves no distribution."""
    layer = {"weight": torch.randn(5, 8), "bias": torch.randn(5)}
    layer[where][3] = value
    h, targets = torch.randn(6, 8), torch.tensor([1, 2, 1, 2, 1, 1])
    if where == "bias" and value == -math.inf:
        assert MbPA(4, 3).sequence_log_prob(h, targets, **layer).isfinite().all()
        return
    with pytest.raises(ValueError, match="weight and bias hold NaN or inf"):
        MbPA(4, 3).sequence_log_prob(h, targets, **layer)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_mbpa_of_large_activations_in_half_precision(dtype) -> None:
    h, weight = (1000 * torch.randn(6, 8)).to(dtype), (30 * torch.randn(5, 8)).to(dtype)
    targets = torch.tensor([1, 2, 1, 2, 1, 1])
    found = MbPA(4, 3).sequence_log_prob(h, targets, weight)
    exact = MbPA(4, 3).sequence_log_prob(h.double(), targets, weight.double())
    assert_exact(found, exact, ulps=64)
