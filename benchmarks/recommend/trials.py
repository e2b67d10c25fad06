"""One trial: a method with its settings learns a task from a seed, and is asked."""

from __future__ import annotations

import math
import time
import traceback
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from examples.recommender import Recommender, train_once, windows

from benchmarks.recommend.baselines import Baseline, Neighbours, Popularity
from benchmarks.recommend.data import BY_TIME, LAST_ITEM, Items, Lesson, Split, by_time, check, leave_one_out
from benchmarks.recommend.reading import read
from benchmarks.recommend.scores import BEST, Tally
from hebbian_softmax import OnePassAdam

WARMUP = 50
"""The steps in which the learning rate rises."""
SMALL_BATCH = 16
"""The windows of a batch when a period is learned: there are few of them."""

BEAUTY, MOVIELENS = "recommend/amazon-beauty.txt.xz", "recommend/movielens-100k.inter.xz"


class Task(NamedTuple):
    """A set of interactions, how it is divided, and the sizes that all methods share."""

    file: str
    """Where the interactions are, in the folder of the data."""
    length: int
    """How many items a network reads at once."""
    batch: int
    epochs: tuple[int, ...]
    """The lengths of training that are tried first."""
    periods: bool = False
    """Whether it goes on after training, period by period."""


TASKS = {
    "beauty": Task(BEAUTY, 50, 256, (15, 30)),
    "movielens": Task(MOVIELENS, 100, 64, (40, 80)),
    "movielens by time": Task(MOVIELENS, 100, 64, (60,), periods=True),
}
"""Amazon Beauty has an order for each user and no dates, so it cannot be split by time."""
LAST, TIME = "last item of ", "by time: "
"""How the names of tasks begin that are made of a file of one's own; the file's path follows."""


def task_of(name: str) -> Task:
    """Return a task by its name: one of ``TASKS``, or one of a file of one's own."""
    if name in TASKS:
        return TASKS[name]
    if name.startswith(LAST):
        return Task(name.removeprefix(LAST), 100, 128, (20, 40))
    if name.startswith(TIME):
        return Task(name.removeprefix(TIME), 100, 128, (40,), periods=True)
    raise ValueError(f"task must be one of {', '.join(TASKS)}, or begin with {LAST!r} or {TIME!r}, got {name!r}")


@dataclass(frozen=True)
class Trial:
    """A task, a method and its settings. Settings that a method does not use are left as they are."""

    task: str
    method: str
    """plain, rule, popularity or neighbours."""
    seed: int = 0
    final: bool = False
    """Whether the test is asked, too. Settings are chosen by trials that never see it."""
    epochs: int = 30
    learning_rate: float = 1e-3
    dropout: float = 0.2
    period_rate: float = 0.25
    """The learning rate in later periods, as a share of the one in training."""
    passes: int = 1
    """How often what a period has brought is learned."""
    gamma: float = 0.2
    limit: int | None = None
    start: int | str = "auto"
    fade: bool = True
    neighbours: int = 100
    recent: int = 1000
    data: str = ""
    """The fingerprint of the file that must be read; of any file if empty."""
    protocol: str = ""
    """How the file is divided, in words."""


class Course(NamedTuple):
    """A task that has been read."""

    split: Split
    sequences: list[Items]
    """All items of each user."""
    summary: str
    """What the file has, in words."""
    data: str
    """A fingerprint of the file."""
    protocol: str
    """How it is divided, in words."""


@cache
def course_of(name: str, root: Path) -> Course:
    """Return a task, read and divided once. Raise ValueError where that cannot be done."""
    task = task_of(name)
    path = root / task.file
    found = read(path, timed=task.periods)
    try:
        split = by_time(found.events or []) if task.periods else leave_one_out(found.sequences)
        check(split)
    except ValueError as error:
        raise ValueError(f"{path} ({found.summary()}): {error}") from None
    return Course(split, found.sequences, found.summary(), found.digest, BY_TIME if task.periods else LAST_ITEM)


def split_of(name: str, root: Path) -> Split:
    """Return the divided interactions of a task."""
    return course_of(name, root).split


def run(trial: Trial, root: Path, device: str, deadline: float) -> dict[str, Any]:
    """Return the scores of a trial with the data below ``root``. Raise TimeoutError once ``time.time()`` is late."""
    course = course_of(trial.task, root)
    if trial.data not in ("", course.data):
        raise ValueError(f"the file of {trial.task!r} has changed since the program was started: start it again")
    split, begun = course.split, time.perf_counter()
    torch.manual_seed(trial.seed)
    learner = trained_learner(trial, split, device, deadline)
    trained = time.perf_counter() - begun
    tallies: dict[str, Tally] = {}
    for period in split.periods:
        if period.split == "test" and not trial.final:
            break
        if period.histories:  # in a short period all users may be new
            recommended = learner.recommend(period.histories, BEST).numpy()
            tallies.setdefault(period.split, Tally(split.items)).add(recommended, period)
        if period.lessons:
            learner.learn(period.lessons, period.items)
        _check_time(deadline)
    found = {name: tally.scores() for name, tally in tallies.items()}
    seconds = {"training_seconds": trained, "seconds": time.perf_counter() - begun}
    return {"given": asdict(trial)} | found | seconds | (learner.notes() if isinstance(learner, Network) else {})


def trained_learner(trial: Trial, split: Split, device: str, deadline: float) -> Network | Baseline:
    """Return the method of a trial, after training."""
    baseline: Baseline
    match trial.method:
        case "plain" | "rule":
            return Network(trial, split, device, deadline)
        case "popularity":
            baseline = Popularity(device)
        case "neighbours":
            baseline = Neighbours(trial.neighbours, trial.recent)
        case _:
            raise ValueError(f"method must be plain, rule, popularity or neighbours, got {trial.method!r}")
    baseline.learn(split.train, split.items)
    return baseline


def work(todo: Any, done: Any, root: Path, device: str, deadline: float) -> None:
    """Run the trials of the queue ``todo`` until it gives None; results go to ``done``, None for one out of time."""
    torch.set_num_threads(1)
    while (trial := todo.get()) is not None:
        try:
            done.put(run(trial, root, device, deadline))
        except TimeoutError:
            done.put(None)
        except Exception:
            done.put({"given": asdict(trial), "error": traceback.format_exc()[-2000:]})


class Network:
    """A recommender that is trained, and goes on learning after each period."""

    def __init__(self, trial: Trial, split: Split, device: str, deadline: float) -> None:
        self.task, self.trial = task_of(trial.task), trial
        rule = {name: getattr(trial, name) for name in ("gamma", "limit", "start", "fade")}
        memorizing = trial.method == "rule"
        self.model = Recommender(
            split.items, length=self.task.length, dropout=trial.dropout, memorizing=memorizing, **rule
        ).to(device)
        self.optimizer = OnePassAdam(self.model.parameters(), lr=trial.learning_rate, head=self.model.head)
        inputs, targets = self._windows(split.train)
        total = trial.epochs * math.ceil(len(inputs) / self.task.batch)
        schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: min(1, (step + 1) / WARMUP) * 0.5 * (1 + math.cos(math.pi * step / total))
        )
        for _ in range(trial.epochs):
            train_once(self.model, self.optimizer, inputs, targets, self.task.batch, schedule)
            _check_time(deadline)
        for group in self.optimizer.param_groups:
            group["lr"] = trial.period_rate * trial.learning_rate
        self.steps = total

    def recommend(self, histories: list[Items], k: int) -> torch.Tensor:
        """Return the k items that are recommended after each history."""
        return self.model.recommend(histories, k)

    def learn(self, lessons: list[Lesson], items: int) -> None:
        """Add the items that have arrived, and train with what is new."""
        arrived = items - self.model.head.num_classes
        if arrived:
            self.model.head.add_classes(arrived)
        for _ in range(self.trial.passes):
            train_once(self.model, self.optimizer, *self._windows(lessons), SMALL_BATCH)

    def notes(self) -> dict[str, Any]:
        """Return what else a result says: the steps of training, and when writing began (-1: never)."""
        settling = self.model.head.settling
        return {"steps": self.steps, "began": None if settling is None else int(settling.began)}

    def _windows(self, lessons: list[Lesson]) -> tuple[torch.Tensor, torch.Tensor]:
        return windows([each.history for each in lessons], [each.fresh for each in lessons], self.task.length)


def _check_time(deadline: float) -> None:
    if time.time() > deadline:
        raise TimeoutError("the time is over")
