"""A trained head that is given new classes on several ranks: what it learns is that of one process."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from hebbian_softmax import HebbianSoftmax
from tests.distributed.pool import Pool

FEATURES, KNOWN, NEW = 4, 6, 2


def taught(shares: list[list[int]], familiar: bool, calibrated: bool) -> dict[str, Tensor]:
    """Memorise two batches, each rank the rows of its share; return the head's state."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    generator = torch.Generator().manual_seed(5)
    torch.manual_seed(3)
    head = HebbianSoftmax.from_linear(nn.Linear(FEATURES, KNOWN).double(), gamma=0.1, limit=9)
    head.attach(torch.optim.SGD(head.parameters(), lr=0.1))
    if calibrated:
        h = torch.randn(9, FEATURES, generator=generator, dtype=torch.float64)
        head.calibrate(h[rank :: dist.get_world_size()] if dist.is_initialized() else h)
    head.add_classes(NEW)
    for _ in range(2):
        h = 2 * torch.randn(6, FEATURES, generator=generator, dtype=torch.float64) + 1
        y = torch.tensor([KNOWN, KNOWN + 1, KNOWN, KNOWN + 1, 0 if familiar else KNOWN, -100])
        mine = shares[rank] if dist.is_initialized() else list(range(6))
        head.memorize(h[mine], y[mine])
    return {name: value.clone() for name, value in head.state_dict().items()}


@pytest.mark.parametrize("calibrated", [False, True])
@pytest.mark.parametrize("familiar", [False, True])
@pytest.mark.parametrize("shares", [[[0, 1, 2], [3, 4, 5]], [[0], [1, 2, 3, 4, 5]], [[0, 1, 2, 3, 4, 5], []]], ids=str)
def test_equals_one_process(pool: Pool, shares: list[list[int]], familiar: bool, calibrated: bool) -> None:
    alone = taught([], familiar, calibrated)
    assert alone["calibration.moments"].numel() > 0
    for state in pool.run(2, taught, shares, familiar, calibrated):
        assert state.keys() == alone.keys()
        for name, value in alone.items():
            torch.testing.assert_close(
                state[name], value, rtol=1e-9, atol=1e-9, msg=lambda text, name=name: f"{name}: {text}"
            )
