"""The training loop of every experiment: `train`."""

import math
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any, Protocol

import torch
from torch import Tensor

from hebbian_softmax.lab.base.errors import DivergedError, LabError, OutOfTimeError, reason
from hebbian_softmax.lab.base.progress import Progress
from hebbian_softmax.lab.base.ranks import current_ranks
from hebbian_softmax.lab.base.runs import Run


class Task(Protocol):
    """The thing to train: the model, its optimizer, its data and the place in the data.

    The loop owns the step count, the global random states, the log and the checkpoint; the task owns the rest.
    `state_dict` holds only what `torch.load(weights_only=True)` reads: tensors, numbers, strings, lists, dicts.
    """

    def train_step(self) -> Mapping[str, Tensor]:
        """Take one optimizer step; return its losses by name, as scalars on the device."""

    def evaluate(self) -> Mapping[str, float]:
        """Measure on held-out data."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any], /) -> None: ...


class Interrupted(BaseException):
    """Ctrl-C or SIGTERM came; the run stopped after a whole step and its checkpoint is saved.

    Like KeyboardInterrupt this is not an error, so `except Exception` lets it pass.
    """

    def __init__(self, run: Run, step: int, signum: int) -> None:
        super().__init__(f"stopped at step {step}")
        self.run, self.step, self.signum = run, step, signum


def train(
    task: Task,
    run: Run,
    *,
    steps: int,
    evaluate_every: int,
    checkpoint_seconds: float = 60.0,
    deadline: float | None = None,
    label: str = "training",
    quiet: bool = False,
    show: Callable[..., Progress] = Progress,
    logged: Callable[[Mapping[str, Any]], object] | None = None,
) -> float:
    """Train `task` up to step `steps`, from the run's checkpoint if it has one; return the seconds it took in all.

    A run that was stopped or killed and then resumed ends, on the CPU, in the same bits as one that was not.
    Ctrl-C and SIGTERM save a checkpoint and raise `Interrupted`. If the `deadline` (a value of `time.monotonic()`)
    passes before the last step, a checkpoint is saved and `OutOfTimeError` is raised. A loss or a measurement that is
    not finite raises a `LabError` and leaves the last checkpoint in place. `show` makes the progress; `logged` is
    called with each record of the log.

    In a process group every rank calls this. The task makes their steps and losses equal; the first rank writes.
    """
    ranks = current_ranks()
    step, seconds, losses = resume(task, run)
    if ranks.first:
        run.cut_log(step)

    saved_step, saved_at = step, time.monotonic()
    clock = time.monotonic() - seconds  # so that `seconds` adds up over all resumes
    metrics: Mapping[str, float] = {}

    with catch_signals() as received, show(label, total=steps, start=step, quiet=quiet or not ranks.first) as progress:
        if lost := missing_records(run, step, steps, evaluate_every):
            progress.note(f"the log lacks the records of {lost}; they do not come back")
        while step < steps:
            losses.add(task.train_step())
            step += 1

            if step % evaluate_every == 0 or step == steps:
                means = finite(losses.read(), step, saved_step)
                metrics = finite(task.evaluate(), step, saved_step)
                if ranks.first:
                    record = {"step": step, "seconds": time.monotonic() - clock, **means, **metrics}
                    run.log(record)
                    if logged is not None:
                        logged(record)
                losses = RunningMeans()

            now = time.monotonic()
            stop, late, save, look = ranks.any(
                bool(received),
                deadline is not None and now > deadline and step < steps,
                now - saved_at >= checkpoint_seconds,
                progress.due(),
            )
            if stop or late or save or step == steps:
                finite(losses.read(), step, saved_step)
                checkpoint = {
                    "step": step,
                    "seconds": (seconds := time.monotonic() - clock),
                    "losses": losses.state_dict(),
                    "task": task.state_dict(),
                    "random": random_states(),
                }
                # The loss can be finite while a gradient is not.
                if (value := first_nonfinite(checkpoint["task"])) is not None:
                    raise diverged("the task's state", value, step, saved_step)
                if ranks.first:
                    run.save_checkpoint(checkpoint)
                saved_step, saved_at = step, time.monotonic()

            if stop:
                progress.update(step)
                raise Interrupted(run, step, received[0] if received else signal.SIGTERM)
            if late:
                progress.update(step)
                raise OutOfTimeError(f"the time was up after step {step}")

            if look:  # not at every step, since reading the losses waits for the device
                progress.update(step, {**metrics, **finite(losses.read(), step, saved_step)})
        progress.update(steps, metrics)
    return seconds


def resume(task: Task, run: Run) -> tuple[int, float, "RunningMeans"]:
    """Load the run's checkpoint into `task`; return the step, the seconds and the losses so far."""
    losses = RunningMeans()
    if (checkpoint := run.load_checkpoint()) is None:
        return 0, 0.0, losses
    try:
        losses.load_state_dict(checkpoint["losses"])
        task.load_state_dict(checkpoint["task"])
        set_random_states(checkpoint["random"])
        return checkpoint["step"], checkpoint["seconds"], losses
    except LabError as error:
        raise LabError(f"{run.path} cannot go on: {error}") from error
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise LabError(
            f"the checkpoint of {run.path} does not fit ({reason(error)}): "
            "go on with the version of hebbian-softmax that wrote it, or delete its checkpoint files to start over"
        ) from error


def missing_records(run: Run, step: int, steps: int, evaluate_every: int) -> str:
    """Name the steps up to `step` that lack a record in the log; return an empty text if none does."""
    expected = {*range(evaluate_every, step + 1, evaluate_every), *([step] if step == steps else ())}
    lost = sorted(expected - {record["step"] for record in run.records()})
    if len(lost) <= 1:
        return "".join(f"step {number}" for number in lost)
    return f"{len(lost)} steps from {lost[0]} to {lost[-1]}"


def finite(values: Mapping[str, float], step: int, saved_step: int) -> Mapping[str, float]:
    """Return the losses or measurements of a step; raise an error if one of them is nan or infinite."""
    for name, value in values.items():
        if not math.isfinite(value):
            raise diverged(name, value, step, saved_step)
    return values


def diverged(name: str, value: float, step: int, saved_step: int) -> DivergedError:
    """Return the error to raise when `name` is not finite any more."""
    kept = f"the checkpoint of step {saved_step} is kept" if saved_step else "no checkpoint was saved"
    return DivergedError(
        f"{name} became {value} at or before step {step}: start a new run with a lower learning rate, "
        f"as this one keeps the rate it was started with ({kept})"
    )


def first_nonfinite(state: Any) -> float | None:
    """Return the first nan or infinity in the tensors of nested dicts and lists, or None if there is none."""
    if isinstance(state, Tensor) and state.is_floating_point():
        finite = state.isfinite()
        return None if finite.all() else float(state[~finite][0])
    if isinstance(state, Mapping):
        state = list(state.values())
    found = map(first_nonfinite, state if isinstance(state, list | tuple) else ())
    return next((value for value in found if value is not None), None)


class RunningMeans:
    """Means of scalars, each over the steps that named it.

    The sums are kept on the device, so adding never waits for it. One value that is not finite makes its mean not
    finite.
    """

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}
        self.counts: dict[str, int] = {}

    def add(self, values: Mapping[str, Tensor]) -> None:
        for name, value in values.items():
            value = value.detach().float()
            self.sums[name] = self.sums[name] + value if name in self.sums else value
            self.counts[name] = self.counts.get(name, 0) + 1

    def read(self) -> dict[str, float]:
        return {name: total.item() / self.counts[name] for name, total in self.sums.items()}

    def state_dict(self) -> dict[str, Any]:
        return {"counts": dict(self.counts), "sums": {name: total.item() for name, total in self.sums.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.counts = dict(state["counts"])
        # `add` may mix CPU scalars with the device's, and a Python float keeps every float32 exactly.
        self.sums = {name: torch.tensor(total) for name, total in state["sums"].items()}


def random_states() -> dict[str, Any]:
    """Return the states of all global random generators, in types that a safe `torch.load` reads."""
    import numpy as np  # imported here because help and reports must work without numpy

    numpy_state = np.random.get_state(legacy=False)
    numpy_state["state"]["key"] = numpy_state["state"]["key"].tolist()
    return {
        "python": random.getstate(),
        "numpy": numpy_state,
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def set_random_states(states: Mapping[str, Any]) -> None:
    """Restore the states from `random_states`, without those of GPUs if this machine has another number of them."""
    import numpy as np

    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    if torch.cuda.is_available() and len(states["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(states["cuda"])


@contextmanager
def catch_signals() -> Iterator[list[int]]:
    """Collect SIGINT or SIGTERM in a list instead of dying; a second signal acts as usual, for the impatient."""
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received  # only the main thread can handle signals
        return

    def handle(signum: int, frame: FrameType | None) -> None:
        received.append(signum)
        restore()

    before = {signum: signal.signal(signum, handle) for signum in (signal.SIGINT, signal.SIGTERM)}

    def restore() -> None:
        for signum, handler in before.items():
            signal.signal(signum, handler)

    try:
        yield received
    finally:
        restore()
