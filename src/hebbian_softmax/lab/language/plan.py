"""How many steps a run takes: settled once, kept in the run folder, the same for all that is compared in it.

Learning rates depend on the number of steps, so it must not change when a run is resumed. With `--max-seconds` it
follows from a measurement, made with models that are thrown away.
"""

import gc
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch

from hebbian_softmax.lab.base.errors import LabError, reason
from hebbian_softmax.lab.base.files import write_atomic
from hebbian_softmax.lab.base.ranks import current_ranks
from hebbian_softmax.lab.base.runs import Run, to_json
from hebbian_softmax.lab.language.captured import WARM_UP
from hebbian_softmax.lab.language.evaluation import word_losses
from hebbian_softmax.lab.language.settings import FINAL, Settings
from hebbian_softmax.lab.language.task import WordTask
from hebbian_softmax.lab.language.windows import Windows

FILE = "plan.json"
WARM_STEPS = WARM_UP + 1  # the last one is captured, on a GPU
SAMPLE = 2000  # words of the final measurement that are tried out
RESERVE = 0.97  # of the time; the rest is for checkpoints


@dataclass(frozen=True)
class Speed:
    """Seconds that things take, after warm-up."""

    step: float
    evaluation: float
    final: float
    spent: float
    """By measuring itself, and loading before it."""


@dataclass(frozen=True)
class Plan:
    """What is settled, and what it was settled from."""

    steps: int
    measured: Speed | None = None

    def keep(self, run: Run) -> None:
        """From now on it is the plan of `run`."""
        if current_ranks().first:
            write_atomic(run.path / FILE, (to_json(asdict(self), indent=2) + "\n").encode())


def make_plan(
    run: Run, settings: Settings, windows: Windows, make_task: Callable[[int], WordTask], began: float
) -> Plan:
    """The plan that `run` has, or a new one. `began` is when the time of --max-seconds started."""
    ranks = current_ranks()
    if ranks.any((run.path / FILE).exists())[0]:
        return _read(run)
    if not settings.max_seconds:
        return Plan(settings.steps or max(1, round(settings.epochs * windows.epoch_steps)))
    speed = measure_speed(make_task(1), settings, began)
    gc.collect()  # these models go before the real ones come
    steps = affordable_steps(settings, speed) if ranks.first else 0
    return Plan(int(ranks.shared(str(steps))), speed)  # each rank has measured another speed


def measure_speed(task: WordTask, settings: Settings, began: float) -> Speed:
    """Train, evaluate and measure with `task`, whose weights are of no use afterwards."""
    for _ in range(WARM_STEPS):
        task.train_step()
    _finish(task)
    least = min(5.0, settings.max_seconds / 20)
    since, steps = time.monotonic(), 0
    while steps < WARM_STEPS or _agreed(time.monotonic() - since < least):
        task.train_step()
        steps += 1
        if steps % 10 == 0:
            _finish(task)  # else the host could run seconds ahead
    _finish(task)
    step = (time.monotonic() - since) / steps
    # A GPU compiles kernels for each of the two ways to read a text, which would count 20 or 100 times over.
    for streams in (settings.valid_streams, 1):
        _seconds_a_word(task, "valid", streams)
    since = time.monotonic()
    task.evaluate()
    evaluation = time.monotonic() - since
    final = sum(
        _seconds_a_word(task, split, 1) * (len(task.corpus.splits[split]) - 1) for split in FINAL[settings.final]
    )
    return Speed(step, evaluation, final, time.monotonic() - began)


def _seconds_a_word(task: WordTask, split: str, streams: int) -> float:
    """Of measuring all models, as far as the first words of a text say."""
    ids = task.corpus.splits[split][: SAMPLE + 1]
    since = time.monotonic()
    for learner in task.learners.values():
        word_losses(learner.model, ids, streams=min(streams, len(ids) - 1))
    return (time.monotonic() - since) / (len(ids) - 1)


def affordable_steps(settings: Settings, speed: Speed) -> int:
    """The steps that fit into --max-seconds beside the evaluations."""
    evaluations = settings.evaluations * speed.evaluation
    rest = RESERVE * settings.max_seconds - speed.spent - speed.final - evaluations
    if rest < speed.step:
        raise LabError(
            f"--max-seconds {settings.max_seconds:g} is too short: getting ready took {speed.spent:.1f} s, "
            f"a step takes {speed.step:.2g} s, {settings.evaluations} evaluations {evaluations:.1f} s, "
            f"the final measurement {speed.final:.1f} s: give more time, fewer --evaluations or --final none"
        )
    return int(rest / speed.step)


def _agreed(flag: bool) -> bool:
    return current_ranks().any(flag)[0]


def _finish(task: WordTask) -> None:
    if task.windows.device.type == "cuda":
        torch.cuda.synchronize(task.windows.device)


def _read(run: Run) -> Plan:
    path = run.path / FILE
    try:
        plan = json.loads(path.read_bytes())
        if type(plan["steps"]) is not int or plan["steps"] < 1:
            raise ValueError("its number of steps is not one")
        measured = plan["measured"]
        return Plan(plan["steps"], None if measured is None else Speed(**measured))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise LabError(f"{path} is damaged ({reason(error)}): start a new run") from error
