"""The infinite cache of section 3.2, and the rows that stand for it."""

import math

import pytest
import torch
from torch.testing import assert_close

from hebbian_softmax import ConstantRate, HebbianSoftmax
from hebbian_softmax.memory import GeometricCache, track
from tests.memory.oracles import stream


def literal(h: torch.Tensor, targets: torch.Tensor, query: torch.Tensor, rate: float, classes: int) -> torch.Tensor:
    """The sum over the occurrences of each class, most recent first."""
    found = torch.zeros(classes, dtype=torch.float64)
    for w in range(classes):
        occurrences = [i for i in reversed(range(len(h))) if int(targets[i]) == w]
        for j, i in enumerate(occurrences, start=1):
            found[w] += math.exp(rate * (1 - rate) ** (j - 1) * float(query @ h[i]))
    return found / found.sum()


@pytest.mark.parametrize("rate", [0.1, 0.5, 1.0])
def test_probabilities_are_the_papers_sum(rate: float) -> None:
    h, targets = stream(30, 4, 6)
    cache = GeometricCache(rate)
    cache.observe(h[:10], targets[:10])
    cache.observe(h[10], targets[10])
    cache.observe(h[11:], targets[11:])
    query = torch.randn(2, 4, dtype=torch.float64)
    expected = torch.stack([literal(h, targets, q, rate, 8) for q in query])
    assert_close(cache.probabilities(query, 8), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("rate", [0.05, 0.3, 1.0])
def test_hebbian_rows_of_a_frozen_network_are_the_geometric_average(rate: float) -> None:
    h, targets = stream(80, 5, 7)
    options = {"scale": 1.0, "center": False, "dtype": torch.float64}
    head = HebbianSoftmax(5, 9, gamma=rate, limit=10**6, rate=ConstantRate(rate), **options)
    torch.nn.init.zeros_(head.weight)
    cache = GeometricCache(rate)
    cache.observe(h, targets)
    for activation, target in zip(h, targets, strict=True):
        head.memorize(activation[None], target[None])
    assert_close(head.weight.detach(), cache.rows(9), rtol=1e-12, atol=1e-12)
    assert torch.equal(head.counts, cache.counts(9))
    for each in track(head.weight, cache):
        assert each.cosine == pytest.approx(1, abs=1e-12)
        assert each.error < 1e-12


def test_the_papers_rate_tracks_it_only_roughly() -> None:
    """Annealed, λ starts at 1 and ends at γ: a row is its first activation where the average has λ of it."""
    h, targets = stream(300, 16, 10)
    head = HebbianSoftmax(16, 10, gamma=0.1, limit=500, scale=1.0, center=False, dtype=torch.float64)
    cache = GeometricCache(0.1)
    cache.observe(h, targets)
    for activation, target in zip(h, targets, strict=True):
        head.memorize(activation[None], target[None])
    found = track(head.weight, cache)
    assert [each.count for each in found] == sorted({int(n) for n in head.counts})
    assert sum(each.classes for each in found) == 10
    assert all(0.5 < each.cosine < 1 and 0 < each.error < 1 for each in found)


def test_bad_arguments() -> None:
    cache = GeometricCache(0.5)
    with pytest.raises(ValueError, match=r"rate must be in \[0, 1\], got 2"):
        GeometricCache(2)
    with pytest.raises(RuntimeError, match="empty"):
        cache.rows(3)
    cache.observe(torch.ones(2, 3), torch.tensor([0, 4]))
    with pytest.raises(ValueError, match=r"must be in \[0, 3\], got 4"):
        cache.rows(4)
    with pytest.raises(ValueError, match="3 features"):
        cache.observe(torch.ones(2, 4), torch.tensor([0, 4]))
    with pytest.raises(ValueError, match="3 features"):
        cache.probabilities(torch.ones(4), 5)
    for call in (lambda h: cache.observe(h, torch.tensor([0, 4])), lambda h: cache.probabilities(h, 5)):
        with pytest.raises(TypeError, match=r"dtype of those stored, torch\.float32, got torch\.float64"):
            call(torch.ones(2, 3, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"\(d,\) or \(T, d\)"):
        cache.observe(torch.ones(1, 2, 3), torch.tensor([[0, 4]]))
    with pytest.raises(ValueError, match="weight must have 3 features"):
        track(torch.ones(5, 4), cache)
    with pytest.raises(ValueError, match="weight must have shape"):
        track(torch.ones(5), cache)
