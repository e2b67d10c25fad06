"""Ranks that share one GPU, over gloo: the same results as one process on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
from torch.distributed.fsdp import CPUOffloadPolicy

from tests.distributed.pool import Pool
from tests.distributed.test_training import skip_and_go_on
from tests.distributed.training import Setup, check

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_ddp(pool: Pool, optimizer: str, set_to_none: bool) -> None:
    setup = Setup(optimizer=optimizer, set_to_none=set_to_none, clip=0.1)
    check(pool, "ddp", setup, [3, 5], device="cuda", micro_batches=2)


@pytest.mark.parametrize("options", [{}, {"offload_policy": CPUOffloadPolicy()}], ids=["gpu", "offloaded"])
@pytest.mark.parametrize("how", ["root", "head"])
@pytest.mark.parametrize("world_size", [1, 3])
def test_fsdp(pool: Pool, world_size: int, how: str, options: dict[str, Any]) -> None:
    check(pool, how, Setup(classes=4, clip=0.1), [3, 4, 2][:world_size], options=options, device="cuda")


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize(("how", "classes", "world_size"), [("ddp", 7, 2), ("root", 4, 3)])
def test_what_is_cleared_is_not_written(pool: Pool, how: str, classes: int, world_size: int, set_to_none: bool) -> None:
    setup, options = Setup(classes=classes, set_to_none=set_to_none), {"foreach": True}
    check(pool, how, setup, [4] * world_size, skip_and_go_on, options, device="cuda", micro_batches=2)


@pytest.mark.parametrize("optimizer", ["adam", "one-pass", "foreach"])
def test_shared_rows(pool: Pool, optimizer: str) -> None:
    """One rank: gloo does not scatter tensors of a GPU, and NCCL wants a GPU for each rank.

    The one-pass optimizers count steps on the GPU, and there torch computes Adam's corrections of the bias in float32.
    """
    tolerance = 1e-5 if optimizer == "one-pass" else 1e-10
    setup = Setup(optimizer=optimizer, head={"bias": True}, clip=0.1)
    check(pool, "rows", setup, [5], device="cuda", tolerance=tolerance)
