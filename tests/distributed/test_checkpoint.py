"""torch.distributed.checkpoint: saved on some ranks, resumed on another number of them, as if never interrupted."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from tests.distributed.pool import Pool
from tests.distributed.sharding import sharded_model
from tests.distributed.training import (
    Setup,
    Step,
    assert_same,
    joined,
    make_steps,
    snapshot,
    train_alone,
    train_on_ranks,
)

SAVED_AFTER = 3


def save(folder: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)


def load(folder: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state}
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


def train_and_save(setup: Setup, steps: list[Step], how: str, folder: str) -> None:
    model, optimizer = sharded_model(setup, how)
    train_on_ranks(setup, steps[:SAVED_AFTER], model, optimizer)
    save(folder, model, optimizer)


def resume(setup: Setup, steps: list[Step], how: str, folder: str) -> dict[str, Tensor]:
    model, optimizer = sharded_model(setup, how)
    train_on_ranks(setup, steps[:1], model, optimizer)  # what was there before loading must not matter
    load(folder, model, optimizer)
    train_on_ranks(setup, steps[SAVED_AFTER:], model, optimizer)
    return snapshot(model)


def dealt(steps: list[Step], world_size: int) -> list[Step]:
    """The same joined batches, dealt out to another number of ranks."""

    def deal(step: Step) -> Step:
        [[(x, targets)]] = joined([step])[0]
        return [[(x[rank::world_size], targets[rank::world_size]) for rank in range(world_size)]]

    return [deal(step) for step in steps]


@pytest.mark.parametrize(("how", "tied"), [("root", False), ("head", False), ("root", True)])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("resumed_on", [1, 2, 3])
def test_resumes_on_another_number_of_ranks(
    pool: Pool, tmp_path: Path, resumed_on: int, optimizer: str, how: str, tied: bool
) -> None:
    setup = Setup(classes=8, optimizer=optimizer, tied=tied)
    steps = make_steps(setup, [4, 3], steps=6)
    pool.run(2, train_and_save, setup, steps, how, str(tmp_path))
    resumed = pool.run(resumed_on, resume, setup, dealt(steps, resumed_on), how, str(tmp_path))
    assert_same(resumed, train_alone(setup, steps))


def test_resumes_in_a_process_without_ranks(pool: Pool, tmp_path: Path) -> None:
    setup = Setup(classes=8, optimizer="adam")
    steps = make_steps(setup, [4, 3], steps=6)
    pool.run(2, train_and_save, setup, steps, "root", str(tmp_path))
    model = setup.model()
    optimizer = setup.make_optimizer(model.parameters())
    model.head.attach(optimizer)
    assert not dist.is_initialized()
    with pytest.warns(UserWarning, match="torch.distributed is disabled, unavailable or uninitialized"):
        load(str(tmp_path), model, optimizer)
    for step in dealt(steps, 1)[SAVED_AFTER:]:
        x, targets = step[0][0]
        (model(x, targets) / targets.numel()).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_same([snapshot(model)], train_alone(setup, steps))
