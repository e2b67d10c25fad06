"""A task that draws from every global random generator, to be trained in a process of its own and killed.

    python -m tests.lab.base.toy RUN_FOLDER STEPS SECONDS_PER_STEP [WRITE_TO_DIE_IN]

Prints the steps that this process took. With the last argument the process kills itself inside that write.
"""

import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hebbian_softmax.lab.base import files
from hebbian_softmax.lab.base.runs import create_run, open_run
from hebbian_softmax.lab.base.training import Interrupted, train


class Toy:
    """Linear regression with dropout, on data drawn as it goes."""

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
    """Kill this process between the bytes and the name of the file that is written as `number`-th."""
    replace, written = os.replace, 0

    def replace_or_die(source: Any, target: Any) -> None:
        nonlocal written
        written += 1
        if written == number:
            os.kill(os.getpid(), signal.SIGKILL)
        replace(source, target)

    files.os.replace = replace_or_die  # type: ignore[attr-defined]


def main(folder: str, steps: str, pause: str, fatal_write: str = "0") -> int:
    torch.set_num_threads(1)
    path = Path(folder)
    run = open_run(path) if path.exists() else create_run(path.parent, "toy", "toy", {})
    if run.path != path:
        run.path.rename(path)
        run = open_run(path)
    if int(fatal_write):
        die_in_write(int(fatal_write))
    task = Toy(float(pause))
    try:
        with run.held():
            train(task, run, steps=int(steps), evaluate_every=7, checkpoint_seconds=0.05, quiet=True)
    except Interrupted as stop:
        return 128 + stop.signum
    finally:
        print(task.steps_taken)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
