"""Measuring: time, memory and error of each contender, and the machine's rate of matrix products (GEMM)."""

from __future__ import annotations

import contextlib
import gc
import random
import re
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.output_layer.contenders import Contender, Gradients, Run, UnavailableError
from benchmarks.output_layer.problems import Problem, Reference, Spec
from benchmarks.output_layer.profiling import peak_cpu_bytes

TOLERANCE = {torch.bfloat16: 0.1, torch.float32: 1e-3}
"""Relative gradient errors above this count as wrong. bf16 rounds logits, their gradients and sums by 0.4 % each."""


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
    repeats: int = 0
    extra_bytes: int | None = None
    """The peak memory beyond what was held before, less the returned gradients of h and W."""
    kernels: dict[str, float] | None = None
    """The device's milliseconds for each kernel."""
    errors: dict[str, float] | None = None
    rule_ms: float | None = None
    """The device's time for the rule's kernels in one step."""

    def tflops(self) -> float | None:
        """Return the equivalent TFLOP/s; None if the time is not known."""
        return None if self.ms is None else equivalent_tflops(self.spec.flops, self.ms)


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
    if device == "cuda" and contender.kind != "graph":  # A graph holds its memory before the replay.
        returned = sum(t.nbytes for t in outputs[1:]) if outputs is not None else 0
        entry.extra_bytes = torch.cuda.max_memory_allocated() - before - returned
    elif device == "cpu" and seconds < 10:  # Watching the memory takes a third run.
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
    contenders: list[Contender], problem: Problem, truth: Reference | None, device: str, seconds: float = 1.0
) -> list[Entry]:
    """Measure contenders that take turns, one run each, for about ``seconds`` each, and return entries with medians.

    If a contender raises, its entry tells the reason, and its memory is freed.
    """
    entries = [Entry(problem.spec, c.name, c.kind) for c in contenders]
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
        runs[i], each[i] = first_runs(entries[i], contenders[i], problem, truth, device)

    def turn(i: int) -> None:
        start = mark(device)
        runs[i]()
        marks[i].append((start, mark(device)))

    for i in range(len(entries)):
        guarded(i, partial(prepare, i))
    if runs:
        turns = sum(each[i] for i in runs)
        chance = random.Random(0)
        for _ in range(repeats_within(seconds * len(runs), turns, least=3 if turns < 20 else 1)):
            for i in chance.sample(list(runs), len(runs)):  # No one always follows the same one.
                guarded(i, partial(turn, i))

    def conclude(i: int) -> None:
        synchronize(device)
        times = [between_ms(*pair) for pair in marks[i]]
        if times:
            entries[i].ms, entries[i].repeats = statistics.median(times), len(times)

    for i in range(len(entries)):
        guarded(i, partial(conclude, i))
    runs.clear()
    free_memory(device)
    return entries


def sustained_tflops(product: Callable[[], object], flops: int, device: str, seconds: float) -> float:
    """Return the rate of a product that is repeated for ``seconds``, because a hot card is slower than a cold one."""
    for _ in range(3):
        product()
    repeats = repeats_within(seconds, seconds_of(product, device), most=100_000)
    synchronize(device)
    start = mark(device)
    for _ in range(repeats):
        product()
    end = mark(device)
    synchronize(device)
    return equivalent_tflops(repeats * flops, between_ms(start, end))


@torch.no_grad()
def gemm_rates(device: str, dtype: torch.dtype, quick: bool) -> dict[str, float]:
    """Return the TFLOP/s of a square product and of the three of shape A, on random data; the largest is the peak."""
    large = device == "cuda" and not quick
    seconds = 2.0 if large else 0.05 if quick else 0.5
    side = 8192 if large else 64 if quick else 1024

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, device=device, dtype=dtype)

    def rate(a: Tensor, b: Tensor) -> float:
        out = torch.mm(a, b)
        return sustained_tflops(
            lambda: torch.mm(a, b, out=out), 2 * a.shape[0] * a.shape[1] * b.shape[1], device, seconds
        )

    rates = {f"{side}^3": rate(normal(side, side), normal(side, side))}
    if large:
        h, weight, dz = normal(6_400, 2_048), normal(267_776, 2_048), normal(6_400, 267_776)
        rates |= {"A's logits": rate(h, weight.T), "A's dh": rate(dz, weight), "A's dW": rate(dz.T, h)}
    return rates
