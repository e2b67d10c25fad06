"""FSDP2 over gloo: equal to one process on the joined batch, replicated buffers bit-identical across ranks."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from hebbian_softmax import InclusiveRate
from tests.distributed.pool import Pool
from tests.distributed.sharding import shard, sharded_model, train_fsdp, unsynced
from tests.distributed.training import (
    Setup,
    Step,
    assert_same,
    count_targets,
    finish_step,
    joined,
    make_steps,
    snapshot,
    train_alone,
    train_on_ranks,
)


def check(pool: Pool, setup: Setup, steps: list[Step], how: str, **options: Any) -> dict[str, Tensor]:
    alone = train_alone(setup, steps)
    assert_same(pool.run(len(steps[0][0]), train_fsdp, setup, steps, how, options), alone)
    return alone


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize(("scale", "center"), [(1.0, False), ("match", False), ("match", True)])
@pytest.mark.parametrize("how", ["root", "head"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_equals_one_process(
    pool: Pool, world_size: int, how: str, scale: float | str, center: bool, optimizer: str
) -> None:
    setup = Setup(head={"scale": scale, "center": center, "bias": True}, optimizer=optimizer)
    alone = check(pool, setup, make_steps(setup, [4] * world_size), how)
    assert alone["head.counts"].max() > 6  # a class went past the limit


@pytest.mark.parametrize("classes", [4, 6, 8])
@pytest.mark.parametrize("how", ["root", "head"])
def test_rows_that_do_not_divide_and_a_rank_without_rows(pool: Pool, how: str, classes: int) -> None:
    """4 classes on 3 ranks are 2, 2 and 0 rows; 8 are 3, 3 and 2. The batches are uneven too."""
    setup = Setup(classes=classes, clip=0.1)
    check(pool, setup, make_steps(setup, [3, 0, 5]), how)


@pytest.mark.parametrize("world_size", [2, 3])
def test_tied_weights_sharded_with_the_root(pool: Pool, world_size: int) -> None:
    setup = Setup(tied=True, optimizer="adam")
    check(pool, setup, make_steps(setup, [4] * world_size), "root")


@pytest.mark.parametrize("head", [{"objective": "ip"}, {"rate": InclusiveRate(0.2, 9)}], ids=["ip", "inclusive"])
def test_objectives_and_rates(pool: Pool, head: dict[str, Any]) -> None:
    setup = Setup(head=head)
    check(pool, setup, make_steps(setup, [3, 5]), "head")


@pytest.mark.parametrize("how", ["root", "head"])
def test_rows_that_only_the_rule_changes(pool: Pool, how: str) -> None:
    setup = Setup(frozen=True)
    check(pool, setup, make_steps(setup, [3, 5], micro_batches=2), how)


def train_folded(setup: Setup, steps: list[Step]) -> dict[str, Tensor]:
    model, optimizer = sharded_model(setup, "root")
    model.head.attachment.pending.fold_rows = 2
    train_on_ranks(setup, steps, model, optimizer, partial(unsynced, model))
    return snapshot(model)


def test_many_activations_are_folded(pool: Pool) -> None:
    setup = Setup(classes=4, clip=0.1)
    steps = make_steps(setup, [3, 1, 2], micro_batches=4)
    assert_same(pool.run(3, train_folded, setup, steps), train_alone(setup, steps))


def test_a_rank_with_all_targets_ignored(pool: Pool) -> None:
    setup = Setup()
    steps = make_steps(setup, [4, 4], targets=lambda rank, drawn: drawn if rank != 1 else drawn * 0 - 100)
    alone = check(pool, setup, steps, "root")
    assert alone["head.counts"].sum() == 16


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("how", ["root", "head"])
@pytest.mark.parametrize("classes", [4, 7])
def test_accumulation_without_gradient_sync(pool: Pool, classes: int, how: str, set_to_none: bool) -> None:
    setup = Setup(classes=classes, set_to_none=set_to_none)
    check(pool, setup, make_steps(setup, [3, 1, 2], micro_batches=3), how)


@pytest.mark.parametrize("reshard", [True, False])
def test_reshard_after_forward(pool: Pool, reshard: bool) -> None:
    setup = Setup()
    check(pool, setup, make_steps(setup, [3, 4]), "root", reshard_after_forward=reshard)


def train_in_the_loop(setup: Setup, steps: list[Step]) -> dict[str, Tensor]:
    """The model gives activations and the training loop calls ``head.loss``."""
    model = setup.model()
    model.forward = model.hidden  # type: ignore[method-assign]
    shard(model, "head")
    optimizer = setup.make_optimizer(model.parameters())
    model.head.attach(optimizer)
    for step in steps:
        x, targets = step[0][dist.get_rank()]
        loss = model.head.loss(model(x), targets, reduction="sum") * dist.get_world_size() / count_targets(step)
        loss.backward()
        finish_step(setup, model, optimizer)
    return snapshot(model)


def test_loss_called_outside_the_model(pool: Pool) -> None:
    setup = Setup()
    steps = make_steps(setup, [3, 4])
    assert_same(pool.run(2, train_in_the_loop, setup, steps), train_alone(setup, steps))


def skip_and_go_on(setup: Setup, steps: list[Step], foreach: bool, ranks: bool) -> dict[str, Tensor]:
    """Of each step's micro-batches only the last counts: the gradients of the others are cleared without a step."""
    if ranks:
        model, optimizer = sharded_model(setup, "root")
    else:
        model = setup.model()
        model.head.attach(optimizer := setup.make_optimizer(model.parameters()))
    optimizer.defaults["foreach"] = foreach  # the default on a GPU; zero_grad looks here
    rank = dist.get_rank() if ranks else 0
    for step in steps:
        for micro_batch in step:
            optimizer.zero_grad(set_to_none=setup.set_to_none)
            x, targets = (each.to(setup.device) for each in micro_batch[rank])
            (model(x, targets) / targets.numel()).backward()
        finish_step(setup, model, optimizer)
    return snapshot(model)


@pytest.mark.parametrize(("set_to_none", "foreach"), [(True, False), (False, False), (False, True)])
@pytest.mark.parametrize("clip", [None, 0.1])
@pytest.mark.parametrize("micro_batches", [2, 3])
def test_what_is_cleared_is_not_written(
    pool: Pool, set_to_none: bool, foreach: bool, clip: float | None, micro_batches: int
) -> None:
    """Also on the third rank, which has no rows and so no gradient to look at."""
    setup = Setup(classes=4, set_to_none=set_to_none, clip=clip)
    steps = make_steps(setup, [4, 4, 4], micro_batches=micro_batches)
    alone = skip_and_go_on(setup, joined(steps), foreach, ranks=False)
    assert alone["head.counts"].sum() == 4 * 12
    assert_same(pool.run(3, skip_and_go_on, setup, steps, foreach, ranks=True), alone)


def forget_once(setup: Setup, steps: list[Step]) -> dict[str, Tensor]:
    """In the first step the last rank remembers nothing. In the second a first backward pass is cleared."""
    model, optimizer = sharded_model(setup, "root")
    model.remember = dist.get_rank() < 2
    train_on_ranks(setup, steps[:1], model, optimizer)
    model.remember = True
    (model(*steps[0][0][dist.get_rank()])).backward()
    optimizer.zero_grad(set_to_none=False)
    train_on_ranks(setup, steps[1:], model, optimizer)
    return snapshot(model)


def test_ranks_that_were_out_of_step_agree_again(pool: Pool) -> None:
    """The last rank has no rows: it takes the word of others that a pass was cleared, and must know which."""
    setup = Setup(classes=4, set_to_none=False)
    steps = make_steps(setup, [4, 4, 4], steps=2)
    ranks = pool.run(3, forget_once, setup, steps)
    seen = torch.cat([*(targets for _x, targets in steps[0][0][:2]), *(targets for _x, targets in steps[1][0])])
    assert [values["head.counts"].tolist() for values in ranks] == [seen.bincount(minlength=4).tolist()] * 3
