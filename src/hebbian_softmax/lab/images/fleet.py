"""Learners at work, alone or many together, and trials of the curriculum that are stored as they finish.

On a GPU a step of this network is about a hundred kernels of a few microseconds, so a Python loop leaves the device
idle most of the time. Each learner's step and its check are therefore recorded once as CUDA graphs. The graphs of many
learners are replayed in turn, each on its own stream, so that their small kernels run side by side. That needs no
stacked version of network, optimizer and rule: every learner runs the very code that a user runs. Learners with
different settings can mix, start and end at any time, and one process holds the images once.

On a CPU each learner has its own thread, which computes on one core: learners scale better than operators, and the
numbers do not depend on how many cores there are.
"""

import copy
import gc
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from hebbian_softmax.lab.base.console import say
from hebbian_softmax.lab.base.devices import choose_device
from hebbian_softmax.lab.base.errors import LabError, OutOfTimeError, reason
from hebbian_softmax.lab.base.files import cannot_write, remove_temporary
from hebbian_softmax.lab.base.json_files import from_json, read_json, to_json, write_json
from hebbian_softmax.lab.base.progress import Progress
from hebbian_softmax.lab.base.rule import RULE_BEFORE, write_of_center
from hebbian_softmax.lab.data.workers import cores
from hebbian_softmax.lab.images.curriculum import ADDED, CHECK_EVERY, History
from hebbian_softmax.lab.images.data import ImageSet
from hebbian_softmax.lab.images.learner import Learner, Method

WARM_UP = 3  # steps before a recording: libraries choose their algorithms, the optimizer makes its state
CAPACITIES = (64, 128, 192, 256, 384, 512, 768, 1024, 1536)  # numbers of classes for which checks are recorded

T = TypeVar("T")


class Runner:
    """Drives one learner with plain PyTorch, operation by operation."""

    def __init__(self, learner: Learner) -> None:
        self.learner = learner
        self._classes = int(learner.active)
        self._unread: deque[Any] = deque()

    def steps(self, count: int) -> None:
        """Take training steps."""
        for _ in range(count):
            self.learner.step()

    def check(self) -> None:
        """Test the learner, and add a level if it passes."""
        self.learner.check(self._classes)
        accuracy, classes = self.learner.outcome.tolist()
        self._classes = int(classes)
        self._unread.append((accuracy, self._classes))

    def read(self) -> tuple[float, int]:
        """Return the accuracy of the oldest check that was not read yet, and the number of classes after it."""
        accuracy, classes = self._unread.popleft()
        return accuracy, classes

    def loss(self) -> Tensor:
        """Return the loss of the last step, to be used on the current stream."""
        return self.learner.loss.clone()

    def finish(self) -> None:
        """Wait until all work is done."""
        if self.learner.device.type == "cuda":
            torch.cuda.synchronize(self.learner.device)

    def close(self) -> None:
        """Finish and free the device's memory. The learner stays; the runner cannot be used any more."""
        self.finish()


class Graphed(Runner):
    """Runs a learner with CUDA graphs of a step and of a check, on their own stream. Recording leaves it as it was.

    Only `read`, `loss` and `finish` wait for the device.
    """

    def __init__(self, learner: Learner) -> None:
        super().__init__(learner)
        self.stream = torch.cuda.Stream(learner.device)
        # The graphs run one after the other and leave their outcome in the learner's own tensors, so they share memory.
        self._pool = torch.cuda.graph_pool_handle()
        self._checks: dict[int, torch.cuda.CUDAGraph] = {}
        self.stream.wait_stream(torch.cuda.current_stream(learner.device))
        draws = learner.generator.get_state()
        with torch.cuda.stream(self.stream):
            before = [tensor.clone() for tensor in learner.tensors()]
            optimizer = {
                parameter: {name: value.clone() for name, value in state.items()}
                for parameter, state in learner.optimizer.state.items()
            }
            for _ in range(WARM_UP):
                learner.step()
        self.stream.synchronize()
        self._step = self.record(learner.step)
        with torch.cuda.stream(self.stream), torch.no_grad():
            for tensor, value in zip(learner.tensors(), before, strict=True):
                tensor.copy_(value)
            for parameter, state in learner.optimizer.state.items():
                for name, value in state.items():
                    saved = optimizer.get(parameter, {}).get(name)
                    value.zero_() if saved is None else value.copy_(saved)  # RMSProp starts from zeros
        learner.generator.set_state(draws)
        self._check_for(self._classes)

    def record(self, work: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """Record `work` as a graph to be replayed on this stream."""
        graph = torch.cuda.CUDAGraph()
        graph.register_generator_state(self.learner.generator)
        # torch.cuda.graph() waits for all streams and collects garbage: a tenth of a second for each recording.
        with torch.cuda.stream(self.stream):
            graph.capture_begin(self._pool, capture_error_mode="thread_local")
            try:
                work()
            finally:
                graph.capture_end()
        return graph

    def _check_for(self, classes: int) -> torch.cuda.CUDAGraph:
        """Return the graph of a check that holds so many classes; it is recorded when it is first needed."""
        total = self.learner.total
        capacity = next((size for size in CAPACITIES if classes <= size < total), total)
        if capacity not in self._checks:
            with torch.cuda.stream(self.stream):
                self.learner.right_answers(capacity)
            self._checks[capacity] = self.record(lambda: self.learner.check(capacity))
        return self._checks[capacity]

    def steps(self, count: int) -> None:
        with torch.cuda.stream(self.stream):
            for _ in range(count):
                self._step.replay()

    def check(self) -> None:
        # Each check that was not read yet may have added a level.
        graph = self._check_for(min(self._classes + ADDED * len(self._unread), self.learner.total))
        with torch.cuda.stream(self.stream):
            graph.replay()
            outcome = torch.empty(2, pin_memory=True)
            outcome.copy_(self.learner.outcome, non_blocking=True)
            done = torch.cuda.Event()
            done.record()
        self._unread.append((done, outcome))

    def read(self) -> tuple[float, int]:
        done, outcome = self._unread.popleft()
        done.synchronize()
        accuracy, classes = outcome.tolist()
        self._classes = int(classes)
        return accuracy, self._classes

    def loss(self) -> Tensor:
        torch.cuda.current_stream(self.learner.device).wait_stream(self.stream)
        value = self.learner.loss.clone()
        self.stream.wait_stream(torch.cuda.current_stream(self.learner.device))
        return value

    def finish(self) -> None:
        self.stream.synchronize()

    def close(self) -> None:
        """Free the memory of the graphs, about a gigabyte, instead of waiting until Python collects the learner."""
        self.finish()
        self.learner.optimizer.zero_grad(set_to_none=True)  # the gradients lie in the memory of the graphs
        for graph in (self._step, *self._checks.values()):
            graph.reset()
        self._checks.clear()
        self._unread.clear()


def start(learner: Learner, record: Callable[[Learner], Runner] = Graphed) -> Runner:
    """Return a runner of the learner: with recorded graphs on a GPU, or without, with a note, if recording fails."""
    if learner.device.type != "cuda" or not learner.method.capturable:
        return Runner(learner)
    before = copy.deepcopy(learner.state_dict())
    try:
        return record(learner)
    except RuntimeError as error:
        say(f"note: no CUDA graph, so training is slower ({reason(error)})")
        learner.load_state_dict(before)
        return Runner(learner)


class Threads:
    """Does the same with several items: in threads on a CPU; one after the other on a GPU, where that is enough."""

    def __init__(self, device: torch.device | str, most: int) -> None:
        self.size = max(1, min(cores(), most)) if torch.device(device).type == "cpu" else 1
        self._pool: ThreadPoolExecutor | None = None

    def __enter__(self) -> "Threads":
        if self.size > 1:
            self._pool = ThreadPoolExecutor(self.size, initializer=torch.set_num_threads, initargs=(1,))
        return self

    def __exit__(self, *_: Any) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def each(self, work: Callable[[Any], T], items: Iterable[Any]) -> list[T]:
        """Return `work(item)` for each item, in their order."""
        return list(map(work, items) if self._pool is None else self._pool.map(work, items))


@dataclass(frozen=True)
class Trial:
    """One training from one seed: `steps` long, or shorter if it reaches `stop_at` classes earlier."""

    name: str
    method: Method
    seed: int
    steps: int
    stop_at: int | None = None

    @property
    def key(self) -> str:
        """The name of the trial's file."""
        return f"{self.name}-seed{self.seed}"

    def done(self, history: History) -> bool:
        """Say whether a trial with this history is finished."""
        reached = self.stop_at is not None and history.reached >= self.stop_at
        return reached or len(history.classes) * CHECK_EVERY >= self.steps


AGAIN = "delete it to run that trial again"


def _with_later_settings(method: dict[str, Any]) -> dict[str, Any]:
    """Return the stored settings of a method, with what it did where there was no setting when it was stored."""
    method = dict(method)
    if "center" in method:  # of version 0.1
        method["write"] = write_of_center(str(method.pop("center")))
    later = {field.name: field.default for field in fields(Method) if field.default is not MISSING}
    return later | RULE_BEFORE | method


def _what_matters(method: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a method without those of a rule that it does not have."""
    if method["hebbian"]:
        return method
    unused = {"gamma", "rate", "scale", "write", "objective", "start", "fade"}
    unused |= set() if method["extra_steps"] else {"limit"}  # extra steps are for classes seen fewer than T times
    return {name: value for name, value in method.items() if name not in unused}


class Store:
    """The finished trials, one JSON file each, in a folder of the run, which this process holds."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            folder.mkdir(exist_ok=True)
            remove_temporary(folder)
        except OSError as error:
            raise cannot_write(folder, error) from error

    def save(self, trial: Trial, history: History, seconds: float, device: str) -> None:
        """Write a finished trial. Its accuracies are finite: a network that diverged gives wrong answers, not NaN."""
        record = {**asdict(trial), **history.state_dict(), "seconds": round(seconds, 3), "device": device}
        record["accuracy"] = [round(value, 5) for value in history.accuracy]
        write_json(self.folder / f"{trial.key}.json", record, indent=None)

    def load(self, trial: Trial) -> History | None:
        """Return the history of a finished trial, or None if there is none."""
        path = self.folder / f"{trial.key}.json"
        if not path.exists():
            return None
        record = read_json(path, AGAIN)
        try:
            found = {**record, "method": _what_matters(_with_later_settings(record["method"]))}
            asked = {**asdict(trial), "method": _what_matters(asdict(trial.method))}
            if any(found[name] != value for name, value in from_json(to_json(asked)).items()):
                raise ValueError("it belongs to a trial with other settings")
            history = History(record["start"])
            history.load_state_dict(record)
            history.check()
        except (ValueError, KeyError, TypeError) as error:
            raise LabError(f"{path} cannot be used ({reason(error)}): {AGAIN}") from error
        return history

    def records(self) -> list[dict[str, Any]]:
        """Return the content of all files."""
        return [read_json(path, AGAIN) for path in sorted(self.folder.glob("*.json"))]


@dataclass(eq=False)
class _Live:
    """A trial that is running."""

    trial: Trial
    runner: Runner
    history: History
    began: float
    asked: int = 0
    """The number of checks begun, whether read or not."""


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
    """Return the histories of all trials, running those that are not stored yet, up to `together` at a time.

    The device is not touched if all are stored. After the `deadline` (a value of `time.monotonic()`) this raises
    `OutOfTimeError`; finished trials are stored by then.
    """
    histories = {trial: history for trial in trials if (history := store.load(trial)) is not None}
    # A trial that no graph can hold waits for the device at every step, so it comes last and runs alone.
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
        each.history.began, each.history.written = each.runner.learner.writes()
        store.save(each.trial, each.history, time.monotonic() - each.began, device_name)
        histories[each.trial] = each.history

    total = sum(trial.steps for trial in waiting)
    live: list[_Live] = []
    steps = 0
    with Threads(place, together) as threads, Progress(label, total=total, quiet=quiet) as progress:
        most = together if place.type == "cuda" else threads.size
        while waiting or live:
            if deadline is not None and time.monotonic() > deadline:
                raise OutOfTimeError
            live += threads.each(begin, next_trials(waiting, len(live), most, place))
            threads.each(_advance, live)
            done = [each for each in live if each.trial.done(each.history)]
            live = [each for each in live if each not in done]
            for each in done:
                finished(each)
                steps += each.trial.steps
            if done and place.type == "cuda":
                del each  # it still refers to the last of them
                done.clear()
                gc.collect()
                torch.cuda.empty_cache()  # memory kept for one stream is of no use to others
            now = steps + sum(CHECK_EVERY * len(each.history.classes) for each in live)
            progress.update(min(now, total), {"trials_done": len(histories)})
    return histories


def next_trials(waiting: list[Trial], running: int, most: int, device: torch.device) -> list[Trial]:
    """Remove from `waiting` and return the trials to begin now, so that at most `most` run.

    On a GPU, a trial that no graph can hold runs alone.
    """
    taken: list[Trial] = []
    while waiting and running + len(taken) < most:
        if device.type == "cuda" and not waiting[0].method.capturable and (running or taken):
            break
        taken.append(waiting.pop(0))
    return taken


def _advance(each: _Live) -> None:
    """Begin the steps up to the next check and that check; read the one before, which is done by now."""
    if each.asked * CHECK_EVERY < each.trial.steps:
        each.runner.steps(CHECK_EVERY)
        each.runner.check()
        each.asked += 1
        if each.asked == 1:
            return
    if not each.trial.done(each.history):
        each.history.add(*each.runner.read())
