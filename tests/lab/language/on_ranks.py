"""What every rank of a test does."""

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
    """Of `steps` training steps, whatever the number of processes."""
    task = make(input_dropout=0.0, **changes)
    losses = [{name: float(loss) for name, loss in task.train_step().items()} for _ in range(steps)]
    tensors = {
        f"{model.log_prefix}{name}": value.clone()
        for model, learner in task.learners.items()
        for name, value in learner.model.state_dict().items()
    }
    return losses, tensors


def train_in(folder: str, stop_rank: int | None = None) -> tuple[int, list[str]]:
    """Train a run; `stop_rank` gets a signal before its third step. The steps taken, and what this rank did."""
    run = open_run(Path(folder))
    task = make()
    written: list[str] = []
    log, save = Run.log, Run.save_checkpoint
    Run.log = lambda self, record: written.append("log") or log(self, record)  # type: ignore
    Run.save_checkpoint = lambda self, state: written.append("save") or save(self, state)  # type: ignore
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
    finally:
        Run.log, Run.save_checkpoint = log, save  # type: ignore[method-assign]
    return task.step, written


def plan_in(folder: str) -> int:
    """Each rank measures another speed; all get the first one's steps."""
    made = settings(Settings, max_seconds=10.0 + current_ranks().rank, final="none", evaluations=1)
    run = open_run(Path(folder))
    steps = settle_steps(run, corpus(), made, lambda steps: make(), time.monotonic())
    keep_steps(run, steps)
    return steps


def command(*arguments: str) -> int:
    """`hebbian` on every rank."""
    return main(list(arguments))
