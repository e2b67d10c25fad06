"""torch.distributed.checkpoint: saved on some ranks, resumed on another number of them, as if never interrupted."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from tests.distributed.pool import Pool
from tests.distributed.training import Setup, Step, Training, assert_same, join, make_steps, train

SAVED_AFTER = 3


def train_and_save(setup: Setup, steps: list[Step], how: str, folder: str) -> None:
    training = Training(setup, how)
    training.run(steps[:SAVED_AFTER])
    model_state, optimizer_state = get_state_dict(training.model, training.optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)


def resume(setup: Setup, steps: list[Step], how: str, folder: str) -> dict[str, Tensor]:
    training = Training(setup, how)
    training.run(steps[:1])  # what was there before loading must not matter
    model_state, optimizer_state = get_state_dict(training.model, training.optimizer)
    state = {"model": model_state, "optimizer": optimizer_state}
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(
        training.model, training.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    return training.run(steps[SAVED_AFTER:])


def dealt(steps: list[Step], world_size: int) -> list[Step]:
    """The same joined batches, dealt out to another number of ranks."""

    def deal(step: Step) -> Step:
        x, targets = join(step[0])
        return [[(x[rank::world_size], targets[rank::world_size]) for rank in range(world_size)]]

    return [deal(step) for step in steps]


@pytest.mark.parametrize(("how", "tied"), [("root", False), ("head", False), ("root", True)])
@pytest.mark.parametrize("optimizer", [pytest.param("sgd", marks=pytest.mark.slow), "adam"])
@pytest.mark.parametrize("resumed_on", [1, 2, 3])
def test_resumes_on_another_number_of_ranks(
    pool: Pool, tmp_path: Path, resumed_on: int, optimizer: str, how: str, tied: bool
) -> None:
    setup = Setup(classes=8, optimizer=optimizer, tied=tied, head={"start": 2, "fade": True}, decay=0.7)
    steps = make_steps(setup, [4, 3], steps=6)
    pool.run(2, train_and_save, setup, steps, how, str(tmp_path))
    resumed = pool.run(resumed_on, resume, setup, dealt(steps, resumed_on), how, str(tmp_path))
    assert_same(resumed, train(setup, steps, "alone"))


def test_resumes_in_a_process_without_ranks(pool: Pool, tmp_path: Path) -> None:
    setup = Setup(classes=8, optimizer="adam")
    steps = make_steps(setup, [4, 3], steps=6)
    pool.run(2, train_and_save, setup, steps, "root", str(tmp_path))
    assert not dist.is_initialized()
    with pytest.warns(UserWarning, match="torch.distributed is disabled, unavailable or uninitialized"):
        resumed = resume(setup, dealt(steps, 1), "alone", str(tmp_path))
    assert_same([resumed], train(setup, steps, "alone"))
