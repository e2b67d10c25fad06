"""Measuring: time, memory and error of contenders that take turns."""

from __future__ import annotations

import contextlib
import gc
import math
import random
import re
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.output_layer.contenders import Contender, Gradients, Run, UnavailableError
from benchmarks.output_layer.problems import Problem, Reference, Spec
from benchmarks.output_layer.profiling import peak_cpu_bytes

TOLERANCE = {torch.bfloat16: 0.1, torch.float16: 0.1, torch.float32: 1e-3}
"""Relative gradient errors above this count as wrong. bf16 rounds logits, their gradients and sums by 0.4 % each."""
BURST = {"cuda": 0.04, "cpu": 0.0}
"""The least seconds of a turn: short runs are repeated, so that the host's launches run ahead of the device."""
SLOW = {"cuda": 2.5, "cpu": math.inf}
"""Contenders that take this many times as long as the fastest take turns apart, since a GPU cools among them."""


@dataclass
class Entry:
    """One row of the table. ``status`` is ok, wrong (its gradients), failed or skipped, with a ``reason``."""

    spec: Spec
    contender: str
    kind: str
    status: str = "ok"
    reason: str = ""
    note: str = ""
    ms: float | None = None
    host_ms: float | None = None
    """The milliseconds until everything was launched; on a GPU more than ``ms`` if the host is slower."""
    samples: list[float] = field(default_factory=list)
    """The milliseconds of a run, one number for each turn; ``ms`` is their median."""
    burst: int = 1
    """The runs in each turn."""
    preparation_s: float | None = None
    """The seconds until it could be timed: compilation, tuning and the first runs."""
    operations: int | None = None
    """The operations of a run, where they are not those of the problem."""
    extra_bytes: int | None = None
    """The peak memory beyond what was held before, less the returned gradients of h and W."""
    kernels: dict[str, float] | None = None
    """The device's milliseconds for each kernel."""
    errors: dict[str, float] | None = None
    rule_ms: float | None = None
    """The device's time for the rule's kernels in one step."""

    def tflops(self) -> float | None:
        """Return the equivalent TFLOP/s; None if the time is not known."""
        return None if self.ms is None else equivalent_tflops(self.operations or self.spec.flops, self.ms)


def equivalent_tflops(flops: int, ms: float) -> float:
    """Return the TFLOP/s of a computation that needs this many operations."""
    return flops / ms / 1e9


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def free_memory(device: str) -> None:
    if device == "cuda":
        gc.collect()
        with contextlib.suppress(Exception):  # The session notices and reports a lost device.
            torch.cuda.empty_cache()


def reason_of(error: BaseException) -> str:
    """Return one line about an exception, without the paths of this machine."""
    if isinstance(error, torch.cuda.OutOfMemoryError):
        wanted = re.search(r"Tried to allocate ([\d.]+ \w+)", str(error))
        return "out of memory" + (f" (asked for {wanted[1]} more)" if wanted else "")
    line = (str(error).strip().splitlines() or [""])[0]
    line = re.sub(r"(?:[A-Za-z]:)?(?:[/\\][\w.+~-]+)+[/\\]", "", line)
    return f"{type(error).__name__}: {line}"[:200]


def mark(device: str) -> Any:
    """Return the time now, on the device's own clock."""
    if device != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def between_ms(start: Any, end: Any) -> float:
    return 1e3 * (end - start) if isinstance(start, float) else float(start.elapsed_time(end))


def seconds_of(run: Callable[[], object], device: str) -> float:
    synchronize(device)
    start = time.perf_counter()
    run()
    synchronize(device)
    return time.perf_counter() - start


def repeats_within(seconds: float, each: float, least: int = 3, most: int = 200) -> int:
    return max(least, min(most, int(seconds / max(each, 1e-9))))


def relative_error(value: Tensor, truth: Tensor) -> float:
    error = (value.double() - truth).norm() / truth.norm()
    return float(error)


def errors_of(outputs: Gradients, truth: Reference) -> dict[str, float]:
    """Return the relative Frobenius errors of the sampled rows; those of dW for classes of the batch and for any."""
    loss, h_gradient, weight_gradient = outputs
    half = len(truth.classes) // 2
    rows, expected = weight_gradient[truth.classes], truth.weight_gradient
    return {
        "loss": abs(float(loss) - truth.loss) / abs(truth.loss),
        "dh": relative_error(h_gradient[truth.rows], truth.h_gradient),
        "dW_targets": relative_error(rows[:half], expected[:half]),
        "dW_any": relative_error(rows[half:], expected[half:]),
    }


def first_runs(
    entry: Entry, contender: Contender, problem: Problem, truth: Reference | None, device: str
) -> tuple[Run, float]:
    """Build and run twice; take seconds, memory and errors from the second run, because the first may compile."""
    run, entry.note = contender.build(problem)
    run()
    synchronize(device)
    before = 0
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    start = time.perf_counter()
    outputs = run()
    entry.host_ms = 1e3 * (time.perf_counter() - start)
    synchronize(device)
    seconds = time.perf_counter() - start
    if contender.kind in ("graph", "product"):  # A graph holds its memory before the replay.
        pass
    elif device == "cuda":
        returned = sum(t.nbytes for t in outputs[1:]) if outputs is not None else 0
        entry.extra_bytes = torch.cuda.max_memory_allocated() - before - returned
    elif seconds < 10:  # Watching the memory takes a third run.
        returned = sum(t.nbytes for t in outputs[1:]) if outputs is not None else 0
        entry.extra_bytes = peak_cpu_bytes(run) - returned
    if outputs is not None and truth is not None:
        entry.errors = errors_of(outputs, truth)
        worst = max((name for name in entry.errors if name != "loss"), key=lambda name: _size(entry.errors, name))
        if not _size(entry.errors, worst) <= TOLERANCE[problem.spec.dtype]:
            entry.status, entry.reason = "wrong", f"{worst} off by {100 * entry.errors[worst]:.3g} %"
    return run, seconds


def _size(errors: dict[str, float] | None, name: str) -> float:
    value = errors[name] if errors else 0.0
    return value if value == value else float("inf")


def measure(
    contenders: list[Contender],
    problem: Problem,
    truth: Reference | None,
    device: str,
    seconds: float = 1.0,
    why_not: Callable[[], str] = lambda: "",
) -> list[Entry]:
    """Measure contenders that take turns for about ``seconds`` each, and return entries with medians and all samples.

    If a contender raises, its entry tells the reason, and its memory is freed. Those still to be prepared when
    ``why_not`` gives a reason are skipped.
    """
    entries = [Entry(problem.spec, c.name, c.kind, operations=c.operations(problem.spec)) for c in contenders]
    runs: dict[int, Run] = {}
    each: dict[int, float] = {}
    marks: dict[int, list[tuple[Any, Any]]] = {i: [] for i in range(len(entries))}

    def guarded(i: int, action: Callable[[], None]) -> None:
        try:
            action()
            return
        except Exception as error:
            entries[i].status = "skipped" if isinstance(error, ImportError | UnavailableError) else "failed"
            entries[i].reason = reason_of(error)
            marks[i].clear()
        runs.pop(i, None)
        free_memory(device)  # After the except block, because the traceback keeps tensors alive.

    def prepare(i: int) -> None:
        if reason := why_not():
            raise UnavailableError(reason)
        start = time.perf_counter()
        runs[i], each[i] = first_runs(entries[i], contenders[i], problem, truth, device)
        entries[i].preparation_s = time.perf_counter() - start
        entries[i].burst = repeats_within(BURST[device], each[i], least=1)

    def turn(i: int) -> None:
        start = mark(device)
        for _ in range(entries[i].burst):
            runs[i]()
        marks[i].append((start, mark(device)))

    def conclude(i: int) -> None:
        synchronize(device)
        entries[i].samples = [between_ms(*pair) / entries[i].burst for pair in marks[i]]
        if entries[i].samples:
            entries[i].ms = statistics.median(entries[i].samples)

    for i in range(len(entries)):
        guarded(i, partial(prepare, i))
    chance = random.Random(0)
    for group, share in zip(alike(each, runs, SLOW[device]), (1.0, 0.3), strict=False):  # The slow ones get less time.
        turns = sum(each[i] * entries[i].burst for i in group)
        for _ in range(repeats_within(share * seconds * len(group), turns, least=3 if turns < 5 else 1)):
            for i in chance.sample(group, len(group)):  # No one always follows the same one.
                if i in runs:
                    guarded(i, partial(turn, i))
        synchronize(device)
    for i in range(len(entries)):
        guarded(i, partial(conclude, i))
    runs.clear()
    free_memory(device)
    return entries


def alike(each: dict[int, float], among: Iterable[int], slow: float) -> list[list[int]]:
    """Return the contenders that take less than ``slow`` times as long as the fastest, and apart from them the others.

    >>> alike({0: 1.0, 1: 9.0, 2: 1.5, 3: 0.1}, [0, 1, 2], 2.5)
    [[0, 2], [1]]
    """
    found = list(among)
    limit = slow * min((each[i] for i in found), default=0.0)
    groups = [i for i in found if each[i] <= limit], [i for i in found if each[i] > limit]
    return [group for group in groups if group]
