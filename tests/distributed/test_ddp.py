"""DistributedDataParallel over gloo: equal to one process on the joined batch, and bit-identical across ranks."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hebbian_softmax import ConstantRate, InclusiveRate
from tests.distributed.pool import Pool
from tests.distributed.training import (
    Setup,
    Step,
    assert_same,
    finish_step,
    joined,
    make_steps,
    snapshot,
    train_alone,
    train_on_ranks,
)

LITERAL: dict[str, Any] = {"scale": 1.0, "center": False}


def train_ddp(setup: Setup, steps: list[Step], options: dict[str, Any]) -> dict[str, Tensor]:
    with warnings.catch_warnings():
        if "broadcast_buffers" in options:  # torch 2.13 renames it to forward_sync_buffers, which 2.11 does not have
            warnings.simplefilter("ignore", FutureWarning)
        ddp = DistributedDataParallel(setup.model(), **options)
    optimizer = setup.make_optimizer(ddp.parameters())
    ddp.module.head.attach(optimizer)
    train_on_ranks(setup, steps, ddp, optimizer, ddp.no_sync)
    return snapshot(ddp.module)


def check(pool: Pool, setup: Setup, steps: list[Step], **options: Any) -> dict[str, Tensor]:
    alone = train_alone(setup, steps)
    assert_same(pool.run(len(steps[0][0]), train_ddp, setup, steps, options), alone)
    return alone


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("scale", [1.0, 0.5, "match"])
@pytest.mark.parametrize("center", [False, True])
@pytest.mark.parametrize("world_size", [2, 3])
def test_equals_one_process(pool: Pool, world_size: int, center: bool, scale: float | str, optimizer: str) -> None:
    setup = Setup(head={"scale": scale, "center": center, "bias": True}, optimizer=optimizer)
    alone = check(pool, setup, make_steps(setup, [4] * world_size))
    assert alone["head.counts"].sum() == 16 * world_size
    assert alone["head.counts"].max() > 6  # a class went past the limit


@pytest.mark.parametrize(
    "head",
    [
        {"objective": "ip"},
        {"objective": "svm"},
        {"objective": "smax"},
        {"rate": InclusiveRate(0.2, 9)},
        {"rate": ConstantRate(0.3)},
        {"limit": 0},
    ],
    ids=["ip", "svm", "smax", "inclusive", "constant", "never"],
)
def test_objectives_and_rates(pool: Pool, head: dict[str, Any]) -> None:
    setup = Setup(head=head)
    check(pool, setup, make_steps(setup, [3, 5, 4]))


@pytest.mark.parametrize("world_size", [2, 3])
def test_tied_weights(pool: Pool, world_size: int) -> None:
    setup = Setup(tied=True, optimizer="adam")
    check(pool, setup, make_steps(setup, [4] * world_size))


def test_rows_that_only_the_rule_changes(pool: Pool) -> None:
    setup = Setup(frozen=True)
    check(pool, setup, make_steps(setup, [3, 5], micro_batches=2))


@pytest.mark.parametrize("sizes", [[1, 7], [6, 1, 3], [5, 0], [0, 4, 2]], ids=str)
def test_uneven_and_empty_batches(pool: Pool, sizes: list[int]) -> None:
    setup = Setup()
    check(pool, setup, make_steps(setup, sizes))


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_rank_with_all_targets_ignored(pool: Pool, world_size: int) -> None:
    setup = Setup()
    steps = make_steps(setup, [4] * world_size, targets=lambda rank, drawn: drawn if rank != 1 else drawn * 0 - 100)
    alone = check(pool, setup, steps)
    assert alone["head.counts"].sum() == 16 * (world_size - 1)


def test_all_targets_of_all_ranks_ignored(pool: Pool) -> None:
    setup = Setup()
    steps = make_steps(setup, [4, 4], targets=lambda rank, drawn: drawn * 0 - 100)
    alone = check(pool, setup, steps)
    assert alone["head.counts"].sum() == 0
    assert alone["head.running.batches"].tolist() == [0, 0]


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_rank_with_no_active_class(pool: Pool, world_size: int) -> None:
    """Rank 1 sees only classes past the limit, which are counted and no longer written."""
    setup = Setup(counts=(0, 0, 0, 0, 0, 6, 9))
    steps = make_steps(setup, [4] * world_size, targets=lambda rank, drawn: 5 + drawn % 2 if rank == 1 else drawn % 5)
    alone = check(pool, setup, steps)
    assert alone["head.counts"][5:].sum() == 15 + 16


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("bucket_view", [True, False])
@pytest.mark.parametrize("world_size", [2, 3])
def test_accumulation_under_no_sync(pool: Pool, world_size: int, bucket_view: bool, set_to_none: bool) -> None:
    setup = Setup(set_to_none=set_to_none, optimizer="adam")
    sizes = [3, 1, 2][:world_size]
    check(pool, setup, make_steps(setup, sizes, micro_batches=3), gradient_as_bucket_view=bucket_view)


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize(
    "options",
    [
        {"gradient_as_bucket_view": True},
        {"broadcast_buffers": False},
        {"broadcast_buffers": False, "gradient_as_bucket_view": True},
        {"static_graph": True},
        {"bucket_cap_mb": 1e-5},
    ],
    ids=lambda options: "-".join(options),
)
def test_options(pool: Pool, options: dict[str, Any], clip: float | None, set_to_none: bool) -> None:
    setup = Setup(clip=clip, set_to_none=set_to_none)
    check(pool, setup, make_steps(setup, [2, 4]), **options)


def train_absent(setup: Setup, steps: list[Step]) -> dict[str, Tensor]:
    """The last rank's model does not use its head."""
    ddp = DistributedDataParallel(Absent(setup), find_unused_parameters=True)
    optimizer = setup.make_optimizer(ddp.parameters())
    ddp.module.model.head.attach(optimizer)
    train_on_ranks(setup, steps, ddp, optimizer)
    return snapshot(ddp.module.model)


class Absent(nn.Module):
    def __init__(self, setup: Setup) -> None:
        super().__init__()
        self.model = setup.model()

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        if dist.get_rank() == dist.get_world_size() - 1:
            return self.model.hidden(x).sum() * 0
        return self.model(x, targets)


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_rank_that_has_nothing_pending_takes_part(pool: Pool, world_size: int) -> None:
    setup = Setup()
    steps = make_steps(setup, [4] * (world_size - 1) + [0])
    assert_same(pool.run(world_size, train_absent, setup, steps), train_alone(setup, steps))


def skip_and_go_on(setup: Setup, steps: list[Step], ranks: bool) -> dict[str, Tensor]:
    """The first of the two micro-batches of each step is thrown away: its gradients are cleared without a step."""
    model = setup.model()
    trained = DistributedDataParallel(model) if ranks else model
    optimizer = setup.make_optimizer(trained.parameters())
    model.head.attach(optimizer)
    rank = dist.get_rank() if ranks else 0
    for step in steps:
        for micro_batch in step:
            optimizer.zero_grad(set_to_none=setup.set_to_none)
            x, targets = (each.to(setup.device) for each in micro_batch[rank])
            (trained(x, targets) / targets.numel()).backward()
        finish_step(setup, trained, optimizer)
    return snapshot(model)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_what_is_cleared_is_not_written(pool: Pool, set_to_none: bool) -> None:
    setup = Setup(set_to_none=set_to_none)
    steps = make_steps(setup, [4, 4], micro_batches=2)
    alone = skip_and_go_on(setup, joined(steps), ranks=False)
    assert alone["head.counts"].sum() == 4 * 8
    assert_same(pool.run(2, skip_and_go_on, setup, steps, ranks=True), alone)


def step_without_gradient(setup: Setup, x: Tensor, targets: Tensor) -> dict[str, Tensor]:
    """A loss of weight 0: its gradient is zero, but it came. Then a step with nothing pending at all."""
    ranks = dist.is_initialized()
    model = setup.model()
    trained = DistributedDataParallel(model) if ranks else model
    optimizer = setup.make_optimizer(trained.parameters())
    model.head.attach(optimizer)
    part = slice(dist.get_rank(), None, dist.get_world_size()) if ranks else slice(None)
    (trained(x[part], targets[part]) * 0).backward()
    optimizer.step()
    optimizer.zero_grad()
    optimizer.step()
    return snapshot(model)


def test_a_gradient_of_zero_and_no_gradient(pool: Pool) -> None:
    setup = Setup()
    [[[(x, targets)]]] = make_steps(setup, [8], steps=1)
    alone = step_without_gradient(setup, x, targets)
    assert alone["head.counts"].sum() == 8
    assert_same(pool.run(2, step_without_gradient, setup, x, targets), alone)


def train_zero(setup: Setup, steps: list[Step]) -> dict[str, Tensor]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # importing it uses torch.jit.script
        from torch.distributed.optim import ZeroRedundancyOptimizer
    ddp = DistributedDataParallel(setup.model())
    optimizer = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.Adam, lr=0.05)
    ddp.module.head.attach(optimizer)
    train_on_ranks(setup, steps, ddp, optimizer)
    return snapshot(ddp.module)


def test_an_optimizer_whose_state_is_spread_over_ranks(pool: Pool) -> None:
    setup = Setup(optimizer="adam")
    steps = make_steps(setup, [3, 4])
    assert_same(pool.run(2, train_zero, setup, steps), train_alone(setup, steps))
