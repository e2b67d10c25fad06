"""Many trials of the curriculum, as many together as the device takes; each is stored as soon as it is done."""

import gc
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from hebbian_softmax.lab.base.devices import choose_device
from hebbian_softmax.lab.base.errors import LabError, OutOfTimeError, reason
from hebbian_softmax.lab.base.files import cannot_write, write_atomic
from hebbian_softmax.lab.base.progress import Progress
from hebbian_softmax.lab.base.runs import to_json
from hebbian_softmax.lab.images.curriculum import CHECK_EVERY, History
from hebbian_softmax.lab.images.data import ImageSet
from hebbian_softmax.lab.images.fleet import Runner, Threads, start
from hebbian_softmax.lab.images.learner import Learner, Method


@dataclass(frozen=True)
class Trial:
    """One training from one seed: `steps` long, or shorter if it reaches `stop_at` classes before."""

    name: str
    method: Method
    seed: int
    steps: int
    stop_at: int | None = None

    @property
    def key(self) -> str:
        """Its file's name."""
        return f"{self.name}-seed{self.seed}"

    def done(self, history: History) -> bool:
        reached = self.stop_at is not None and history.reached >= self.stop_at
        return reached or len(history.classes) * CHECK_EVERY >= self.steps


class Store:
    """Finished trials, one JSON file each in a folder of the run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            folder.mkdir(exist_ok=True)
        except OSError as error:
            raise cannot_write(folder, error) from error

    def save(self, trial: Trial, history: History, seconds: float, device: str) -> None:
        # NaN as an accuracy cannot be: a diverged network answers wrongly, and that is a number.
        record = {**asdict(trial), **history.state_dict(), "seconds": round(seconds, 3), "device": device}
        record["accuracy"] = [round(value, 5) for value in history.accuracy]
        write_atomic(self.folder / f"{trial.key}.json", to_json(record).encode())

    def load(self, trial: Trial) -> History | None:
        """The history of a finished trial; None if it is not there."""
        path = self.folder / f"{trial.key}.json"
        if not path.exists():
            return None
        try:
            record = json.loads(path.read_bytes())
            if any(record[name] != value for name, value in json.loads(to_json(asdict(trial))).items()):
                raise ValueError("it is of a trial with other settings")
            history = History(record["start"])
            history.load_state_dict(record)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise LabError(f"{path} cannot be used ({reason(error)}): delete it to make that trial again") from error
        return history

    def records(self) -> list[dict[str, Any]]:
        """All of them, as they are in their files."""
        return [json.loads(path.read_bytes()) for path in sorted(self.folder.glob("*.json"))]


@dataclass(eq=False)
class _Live:
    trial: Trial
    runner: Runner
    history: History
    began: float
    asked: int = 0
    """Checks under way or read."""


def run_trials(
    trials: Sequence[Trial],
    store: Store,
    data: ImageSet,
    *,
    device: str,
    together: int,
    classes: int | None = None,
    filters: int = 64,
    deadline: float | None = None,
    label: str = "trials",
    quiet: bool = False,
) -> dict[Trial, History]:
    """The histories of all trials: those stored, and the others after carrying them out.

    Where all are stored, the device need not be there.
    """
    histories = {trial: history for trial in trials if (history := store.load(trial)) is not None}
    # What no graph can hold waits for the device at every step, so it goes last and alone.
    waiting = sorted((trial for trial in trials if trial not in histories), key=lambda each: not each.method.capturable)
    if not waiting:
        return histories
    place = choose_device(device)
    device_name = torch.cuda.get_device_name(place) if place.type == "cuda" else "cpu"
    images = data.images.to(place)

    def begin(trial: Trial) -> _Live:
        learner = Learner(data, trial.method, trial.seed, device=place, images=images, classes=classes, filters=filters)
        return _Live(trial, start(learner), History(learner.start), time.monotonic())

    def finished(each: _Live) -> None:
        each.runner.close()
        store.save(each.trial, each.history, time.monotonic() - each.began, device_name)
        histories[each.trial] = each.history

    total = sum(trial.steps for trial in waiting)
    live: list[_Live] = []
    steps = 0
    with Threads(place, together) as threads, Progress(label, total=total, quiet=quiet) as progress:
        while waiting or live:
            if deadline is not None and time.monotonic() > deadline:
                raise OutOfTimeError
            live += threads.each(begin, _next(waiting, live, together if place.type == "cuda" else threads.size, place))
            threads.each(_advance, live)
            done = [each for each in live if each.trial.done(each.history)]
            live = [each for each in live if each not in done]
            for each in done:
                finished(each)
                steps += each.trial.steps
            if done and place.type == "cuda":
                del each  # the last of them
                done.clear()
                gc.collect()
                torch.cuda.empty_cache()  # what their streams kept is of no use to others
            now = steps + sum(CHECK_EVERY * len(each.history.classes) for each in live)
            progress.update(min(now, total), {"trials_done": len(histories)})
    return histories


def _next(waiting: list[Trial], live: list[_Live], most: int, device: torch.device) -> list[Trial]:
    """Take the trials to begin now from `waiting`, for `most` at a time; without a graph, one at a time on a GPU."""
    taken: list[Trial] = []
    while waiting and len(live) + len(taken) < most:
        if device.type == "cuda" and not waiting[0].method.capturable and (live or taken):
            break
        taken.append(waiting.pop(0))
    return taken


def _advance(each: _Live) -> None:
    """Ask for the steps up to the next check and for that check; read the one before, which is done by now."""
    if each.asked * CHECK_EVERY < each.trial.steps:
        each.runner.steps(CHECK_EVERY)
        each.runner.check()
        each.asked += 1
        if each.asked == 1:
            return
    if not each.trial.done(each.history):
        each.history.add(*each.runner.read())
