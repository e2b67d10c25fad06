"""Autocast does not coarsen the memories, and entries stored in inference mode can be used outside of it."""

import torch

from hebbian_softmax import MbPA, NeuralCache
from tests.memory.oracles import stream


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
