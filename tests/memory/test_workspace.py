"""The promise of ``workspace``: the memory held besides inputs and results does not grow with T, n or V."""

import pytest
import torch

from hebbian_softmax import MbPA, NeuralCache
from tests.operations import Watch

WORKSPACE = 400_000
SWEEP = {"neighbours": [4, 8], "learning_rates": [0.1, 0.3, 1.0]}


@pytest.mark.parametrize(("length", "size", "streams"), [(3000, 1000, 1), (300, 5000, 1), (1000, 300, 4)])
def test_the_cache_stays_in_it(length: int, size: int, streams: int) -> None:
    h, targets = torch.randn(streams, length, 16), torch.randint(50, (streams, length))
    cache = NeuralCache(size, 0.3)
    cache.observe(h, targets)
    stored = 2 * streams * min(size, length) * (16 * 4 + 8) * 2  # The window itself, with its room to slide.
    with Watch() as watch:
        cache.sequence_log_prob(h, targets, workspace=WORKSPACE)
    assert watch.most < WORKSPACE + stored + 8 * streams * length
    assert watch.largest < max(WORKSPACE, stored)


@pytest.mark.parametrize(("steps", "sweep"), [(1, {}), (2, {}), (1, SWEEP)])
@pytest.mark.parametrize(
    ("length", "size", "classes", "different"), [(400, 200, 50, 400), (400, 200, 50, 1), (40, 100, 8_000, 40)]
)
def test_mbpa_stays_in_it(steps, sweep, length: int, size: int, classes: int, different: int) -> None:
    h, targets = torch.randn(different, 16).repeat(length // different, 1), torch.randint(50, (length,))
    weight = torch.randn(classes, 16)
    mbpa = MbPA(size, 8 if steps == 2 or different > 1 else size, steps)
    mbpa.observe(h, targets)
    vectors = 4 * size * (16 * 4 + 8) + 8 * 10 * (length + classes) + 8 * 4 * 16 * length
    vectors += 6 * 8 * length if sweep else 0
    with Watch() as watch:
        mbpa.sequence_log_prob(h, targets, weight, workspace=WORKSPACE, **sweep)
    assert watch.most < WORKSPACE + vectors
