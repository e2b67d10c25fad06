"""Functions that a test runs in every process of a group."""

import signal
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hebbian_softmax.lab.base.ranks import current_ranks
from hebbian_softmax.lab.base.runs import Run, open_run
from hebbian_softmax.lab.base.training import Interrupted, train
from hebbian_softmax.lab.cli import main
from hebbian_softmax.lab.language.experiments.train import keep_steps, settle_steps
from hebbian_softmax.lab.language.names import HEBBIAN, PLAIN
from hebbian_softmax.lab.language.settings import Settings
from hebbian_softmax.lab.language.task import WordTask
from tests.lab.language.toy import corpus, device, settings

BOTH = {PLAIN: False, HEBBIAN: True}


def make(**changes: Any) -> WordTask:
    return WordTask(corpus(), settings(Settings, **changes), BOTH, steps=8, device=device())


def losses_and_weights(steps: int, **changes: Any) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    """Take `steps` training steps; return their losses and the weights after them."""
    task = make(input_dropout=0.0, **changes)
    losses = [{name: float(loss) for name, loss in task.train_step().items()} for _ in range(steps)]
    tensors = {
        f"{model.log_prefix}{name}": value.clone()
        for model, learner in task.learners.items()
        for name, value in learner.model.state_dict().items()
    }
    return losses, tensors


def train_in(folder: str, stop_rank: int | None = None) -> tuple[int, list[str]]:
    """Train a run; `stop_rank` gets a signal before its third step. Return the steps, and what this process wrote."""
    written: list[str] = []

    class Watched(Run):
        def log(self, record: Any) -> None:
            written.append("log")
            super().log(record)

        def save_checkpoint(self, state: Any) -> None:
            written.append("save")
            super().save_checkpoint(state)

    run = Watched(**vars(open_run(Path(folder))))
    task = make()
    if dist.get_rank() == stop_rank:
        step = task.train_step

        def stepping() -> Any:
            if task.step == 2:
                signal.raise_signal(signal.SIGTERM)
            return step()

        task.train_step = stepping  # type: ignore[method-assign]
    try:
        train(task, run, steps=8, evaluate_every=4, quiet=True)
    except Interrupted:
        written.append("stopped")
    return task.step, written


def plan_in(folder: str) -> int:
    """Settle the number of steps: each process measures another speed, and all get the first one's steps."""
    made = settings(Settings, max_seconds=10.0 + current_ranks().rank, final="none", evaluations=1)
    run = open_run(Path(folder))
    steps = settle_steps(run, corpus(), made, lambda steps: make(), time.monotonic())
    keep_steps(run, steps)
    return steps


def command(*arguments: str) -> int:
    """Run the command `hebbian`."""
    return main(list(arguments))
