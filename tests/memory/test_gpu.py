"""The memories equal their definitions on a CUDA device, too."""

import pytest
import torch
from torch.testing import assert_close

from hebbian_softmax import MbPA, NeuralCache
from tests.closeness import assert_exact
from tests.memory.oracles import cache_log_prob, mbpa_log_prob, stream

pytestmark = pytest.mark.gpu


def test_the_cache_is_the_double_loop() -> None:
    h, targets = stream(60, 5, 6)
    cache = NeuralCache(20, 0.5)
    found = torch.cat(
        [cache.sequence_log_prob(h[a:b].cuda(), targets[a:b].cuda(), block=7) for a, b in ((0, 25), (25, 60))]
    )
    assert_close(found.cpu(), cache_log_prob(h, targets, 20, 0.5), rtol=1e-9, atol=1e-9, equal_nan=True)
    log_prob = cache.log_prob(h.cuda(), targets.cuda())
    full = cache.probabilities(h.cuda(), 6).gather(1, targets.cuda()[:, None])[:, 0].log()
    assert_close(log_prob, full, rtol=1e-9, atol=1e-9)


def test_a_sweep_is_each_of_its_evaluations() -> None:
    h, targets = stream(60, 5, 6)
    found = NeuralCache(50, 1.0).sequence_log_prob(h.cuda(), targets.cuda(), thetas=[0.1, 0.3], sizes=[7, 50], block=16)
    for i, theta in enumerate([0.1, 0.3]):
        for j, size in enumerate([7, 50]):
            expected = cache_log_prob(h, targets, size, theta)
            assert_close(found[i, j].cpu(), expected, rtol=1e-9, atol=1e-9, equal_nan=True)


def test_half_precision_is_summed_in_float32() -> None:
    h, targets = stream(64, 32, 6)
    h = h.bfloat16()
    found = NeuralCache(20, 0.3).sequence_log_prob(h.cuda(), targets.cuda())
    expected = cache_log_prob(h.double(), targets, 20, 0.3)
    largest = 1 + 0.3 * float(h.double().square().sum(-1).max())
    assert_exact(found.cpu(), expected, scale=largest, ulps=256)  # Tensor cores cut sums off instead of rounding them.


@pytest.mark.parametrize("steps", [1, 2])
def test_mbpa_is_copy_and_adapt(steps: int) -> None:
    h, targets = stream(20, 4, 9)
    head = torch.nn.Linear(4, 9, dtype=torch.float64)
    options = {"neighbours": 5, "steps": steps, "learning_rate": 0.4, "l2": 0.7, "epsilon": 1e-3}
    expected = mbpa_log_prob(h, targets, head, 12, **options)
    head = head.cuda()
    mbpa = MbPA(12, 5, steps, 0.4, 0.7)
    found = mbpa.sequence_log_prob(h.cuda(), targets.cuda(), head.weight, head.bias, block=6, workspace=5_000)
    assert_close(found.cpu(), expected, rtol=1e-9, atol=1e-9)
