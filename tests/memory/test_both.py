"""What both memories promise: no more memory than ``workspace`` whatever T, n and V are, in every mode of torch."""

import pytest
import torch

from hebbian_softmax import MbPA, NeuralCache
from tests.memory.oracles import stream
from tests.operations import Watch

WORKSPACE = 400_000
SWEEP = {"neighbours": [4, 8], "learning_rates": [0.1, 0.3, 1.0]}


@pytest.mark.parametrize(("length", "size", "streams"), [(3000, 1000, 1), (300, 5000, 1), (1000, 300, 4)])
def test_the_cache_stays_in_its_workspace(length: int, size: int, streams: int) -> None:
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
def test_mbpa_stays_in_its_workspace(steps, sweep, length: int, size: int, classes: int, different: int) -> None:
    h, targets = torch.randn(different, 16).repeat(length // different, 1), torch.randint(50, (length,))
    weight = torch.randn(classes, 16)
    mbpa = MbPA(size, 8 if steps == 2 or different > 1 else size, steps)
    mbpa.observe(h, targets)
    vectors = 4 * size * (16 * 4 + 8) + 8 * 10 * (length + classes) + 8 * 4 * 16 * length
    vectors += 6 * 8 * length if sweep else 0
    with Watch() as watch:
        mbpa.sequence_log_prob(h, targets, weight, workspace=WORKSPACE, **sweep)
    assert watch.most < WORKSPACE + vectors


def test_autocast_changes_nothing() -> None:
    h, targets = stream(40, 8, 6)
    h, weight = h.float(), torch.randn(6, 8)

    def found() -> list[torch.Tensor]:
        cache, mbpa = NeuralCache(20, 0.3), MbPA(20, 4)
        return [
            cache.sequence_log_prob(h, targets).nan_to_num(),
            cache.log_prob(h=h, targets=targets),
            cache.probabilities(h, 6),
            mbpa.sequence_log_prob(h, targets, weight),
            mbpa.probabilities(h, weight),
        ]

    expected = found()
    with torch.autocast("cpu", torch.bfloat16):
        for ours, plain in zip(found(), expected, strict=True):
            assert torch.equal(ours, plain)


def test_inference_mode_may_come_and_go() -> None:
    h, targets = stream(40, 8, 6)
    weight = torch.randn(6, 8, dtype=torch.float64, requires_grad=True)
    for memory, layer in ((NeuralCache(10, 0.3), ()), (MbPA(10, 4), (weight,))):
        for low in range(0, 40, 8):
            with torch.inference_mode(low % 16 == 0):
                part = h[low : low + 8] * 1  # Made in this mode.
                memory.sequence_log_prob(part, targets[low : low + 8], *layer)
                memory.observe(part[:1], targets[low : low + 1])


def test_gradients_are_not_kept() -> None:
    h, targets = stream(10, 8, 6)
    h.requires_grad_()
    cache = NeuralCache(10, 0.3)
    cache.observe(h, targets)
    assert not cache.log_prob(h, targets).requires_grad
    assert not cache.state_dict()["keys"].requires_grad
