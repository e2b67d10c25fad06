"""The mixture is (1 − λ_c − λ_m) p + λ_c p_c + λ_m p_m."""

import pytest
import torch
from torch.testing import assert_close

from hebbian_softmax import MbPA, NeuralCache
from hebbian_softmax.memory import mix
from tests.memory.oracles import stream


@pytest.mark.parametrize(
    ("of_cache", "of_mbpa"), [(0.1, 0.04), (0.0, 0.0), (1.0, 0.0), (0.5, 0.5), (0.7, 0.3), (0.0, 0.2)]
)
def test_it_is_the_sum(of_cache: float, of_mbpa: float) -> None:
    p, p_c, p_m = torch.rand(3, 50, dtype=torch.float64)
    p_c[:10] = 0
    found = mix(p.log(), cache=p_c.log(), cache_weight=of_cache, mbpa=p_m.log(), mbpa_weight=of_mbpa)
    assert_close(found.exp(), (1 - of_cache - of_mbpa) * p + of_cache * p_c + of_mbpa * p_m, rtol=1e-12, atol=1e-14)


def test_no_memory_is_the_model() -> None:
    p = torch.rand(5).log()
    assert torch.equal(mix(p), p)
    nothing = torch.full((5,), torch.nan)
    assert torch.equal(mix(p, cache=nothing, cache_weight=0.4, mbpa=nothing, mbpa_weight=0.6), p)


def test_an_empty_cache_leaves_the_model_and_distributions_stay_distributions() -> None:
    h, targets = stream(30, 4, 6)
    head = torch.nn.Linear(4, 6, dtype=torch.float64)
    cache, mbpa = NeuralCache(10, 0.5), MbPA(10, 3)
    model = head(h).log_softmax(1).detach()

    def mixed() -> torch.Tensor:
        p_c, p_m = cache.probabilities(h, 6), mbpa.probabilities(h, head.weight, head.bias)
        return mix(model, cache=p_c.log(), cache_weight=0.2, mbpa=p_m.log(), mbpa_weight=0.1)

    assert_close(mixed(), model)
    cache.observe(h, targets)
    mbpa.observe(h, targets)
    assert_close(mixed().exp().sum(1), torch.ones(30, dtype=torch.float64))


def test_a_sweep_broadcasts() -> None:
    h, targets = stream(30, 4, 6)
    model = torch.rand(30, dtype=torch.float64).log()
    swept = NeuralCache(20, 0.1).sequence_log_prob(h, targets, thetas=[0.1, 0.3], sizes=[5, 10, 20])
    assert mix(model, cache=swept, cache_weight=0.2).shape == (2, 3, 30)


def test_bad_arguments() -> None:
    p = torch.zeros(3)
    both = {"cache": p, "cache_weight": 0.6, "mbpa": p, "mbpa_weight": 0.5}
    for options, error, match in (
        (both, ValueError, r"cache_weight \+ mbpa_weight must be at most 1, got 0.6 \+ 0.5"),
        ({"mbpa": p, "mbpa_weight": -0.1}, ValueError, r"mbpa_weight must be in \[0, 1\], got -0.1"),
        ({"cache_weight": 0.1}, ValueError, "cache must be given"),
        ({"cache": torch.zeros(4), "cache_weight": 0.1}, ValueError, r"goes with model's, \(3,\), got \(4,\)"),
        ({"cache": p.long(), "cache_weight": 0.1}, TypeError, "floating point"),
        ({"model": 0.5}, TypeError, "tensor"),
    ):
        with pytest.raises(error, match=match):
            mix(**({"model": p} | options))
