"""A task that draws from every global random generator, to be trained in a process that may be killed."""

import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hebbian_softmax.lab.base.runs import create_run, open_run
from hebbian_softmax.lab.base.training import Interrupted, train


class Toy:
    """Linear regression with dropout on data drawn at each step."""

    def __init__(self, pause: float = 0.0, bad_step: int | None = None) -> None:
        torch.manual_seed(3)
        random.seed(4)
        np.random.seed(5)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.pause, self.bad_step, self.steps_taken = pause, bad_step, 0

    def train_step(self) -> dict[str, Tensor]:
        time.sleep(self.pause)
        self.steps_taken += 1
        inputs = torch.randn(5, 4) * random.random() + float(np.random.randn())
        loss = self.model(inputs).square().mean()
        if self.steps_taken == self.bad_step:
            loss = loss * float("nan")
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return {"loss": loss}

    def evaluate(self) -> dict[str, float]:
        return {"bias": self.model[2].bias.item(), "drawn": torch.rand(()).item()}

    def state_dict(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])


def die_in_write(number: int) -> None:
    """Kill this process between writing the `number`-th file or folder and giving it its name."""
    replace, rename, written = os.replace, os.rename, 0

    def replace_or_die(source: Any, target: Any) -> None:
        nonlocal written
        written += 1
        if written == number:
            os.kill(os.getpid(), signal.SIGKILL)
        (replace if os.path.isfile(source) else rename)(source, target)

    os.replace = os.rename = replace_or_die


def train_toy(folder: Path, steps: int, pause: float, fatal_write: int = 0) -> int:
    """Train in `folder` and return an exit code; leave the number of steps that this process took in a file beside it.

    `pause` is the time that a step takes. The process kills itself in the middle of the `fatal_write`-th write.
    """
    if not folder.exists():
        create_run(folder.parent, "toy", "toy", {}).path.rename(folder)
    run = open_run(folder)
    if fatal_write:
        die_in_write(fatal_write)
    task = Toy(pause)
    try:
        with run.held():
            train(task, run, steps=steps, evaluate_every=7, checkpoint_seconds=0.05, quiet=True)
    except Interrupted as stop:
        return 128 + stop.signum
    finally:
        folder.with_name("taken").write_text(str(task.steps_taken))
    return 0
