"""The one-pass optimizers on ranks: the step, then the write of the joined batch."""

from __future__ import annotations

import pytest
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from hebbian_softmax import OnePassAdam
from tests.distributed.pool import Pool
from tests.distributed.sharding import mesh, shard
from tests.distributed.training import (
    Setup,
    Step,
    assert_same,
    make_steps,
    snapshot,
    train_alone,
    train_on_ranks,
)

SETUP = Setup(optimizer="adam")


def train_ddp(steps: list[Step]) -> dict[str, Tensor]:
    ddp = DistributedDataParallel(SETUP.model())
    optimizer = OnePassAdam(ddp.parameters(), lr=0.05, head=ddp.module.head)
    train_on_ranks(SETUP, steps, ddp, optimizer)
    return snapshot(ddp.module)


def test_ddp(pool: Pool) -> None:
    steps = make_steps(SETUP, [3, 5])
    assert_same(pool.run(2, train_ddp, steps), train_alone(SETUP, steps))


def train_fsdp(steps: list[Step]) -> dict[str, Tensor]:
    model = shard(SETUP.model(), "root", mesh=mesh())
    with pytest.raises(ValueError, match="sharded by FSDP2"):
        OnePassAdam(model.parameters(), head=model.head)
    optimizer = OnePassAdam(model.parameters(), lr=0.05)
    model.head.attach(optimizer)
    train_on_ranks(SETUP, steps, model, optimizer)
    return snapshot(model)


def test_fsdp_without_the_head(pool: Pool) -> None:
    steps = make_steps(SETUP, [3, 5])
    assert_same(pool.run(2, train_fsdp, steps), train_alone(SETUP, steps))
