"""Ranks that share one GPU, over gloo: the same results as one process on the CPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from torch.distributed.fsdp import CPUOffloadPolicy

from tests.distributed.pool import Pool
from tests.distributed.sharding import train_fsdp
from tests.distributed.test_ddp import skip_and_go_on, train_ddp
from tests.distributed.test_fsdp import skip_and_go_on as skip_and_go_on_fsdp
from tests.distributed.training import Setup, assert_same, joined, make_steps, train_alone

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_ddp(pool: Pool, optimizer: str, set_to_none: bool) -> None:
    setup = Setup(optimizer=optimizer, set_to_none=set_to_none, clip=0.1)
    steps = make_steps(setup, [3, 5], micro_batches=2)
    assert_same(pool.run(2, train_ddp, replace(setup, device="cuda"), steps, {}), train_alone(setup, steps))


@pytest.mark.parametrize("set_to_none", [True, False])
def test_what_is_cleared_is_not_written_with_ddp(pool: Pool, set_to_none: bool) -> None:
    setup = Setup(set_to_none=set_to_none)
    steps = make_steps(setup, [4, 4], micro_batches=2)
    alone = skip_and_go_on(setup, joined(steps), ranks=False)
    assert_same(pool.run(2, skip_and_go_on, replace(setup, device="cuda"), steps, ranks=True), alone)


@pytest.mark.parametrize("options", [{}, {"offload_policy": CPUOffloadPolicy()}], ids=["gpu", "offloaded"])
@pytest.mark.parametrize("how", ["root", "head"])
@pytest.mark.parametrize("world_size", [1, 3])
def test_fsdp(pool: Pool, world_size: int, how: str, options: dict[str, Any]) -> None:
    setup = Setup(classes=4, clip=0.1)
    steps = make_steps(setup, [3, 4, 2][:world_size])
    ranks = pool.run(world_size, train_fsdp, replace(setup, device="cuda"), steps, how, options)
    assert_same(ranks, train_alone(setup, steps))


@pytest.mark.parametrize("set_to_none", [True, False])
def test_what_is_cleared_is_not_written_with_fsdp(pool: Pool, set_to_none: bool) -> None:
    setup = Setup(classes=4, set_to_none=set_to_none)
    steps = make_steps(setup, [4, 4, 4], micro_batches=2)
    alone = skip_and_go_on_fsdp(setup, joined(steps), foreach=True, ranks=False)
    on_gpu = replace(setup, device="cuda")
    assert_same(pool.run(3, skip_and_go_on_fsdp, on_gpu, steps, foreach=True, ranks=True), alone)
