"""Results of torch's profiler: the time of kernels, among them the rule's, and the memory of a run on a CPU."""

from __future__ import annotations

import bisect
import json
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from benchmarks.output_layer.contenders import Run

RULE_RANGES = ("hebbian_softmax::write", "hebbian_softmax::watch")
"""The profiler ranges in which the library launches the rule's kernels."""
DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")


def rule_kernels_ms(run: Run, names: Iterable[str] = RULE_RANGES, steps: int = 3) -> float:
    """Return the device's milliseconds per step for kernels launched within profiler ranges of these names."""
    return kernel_us_within(_trace(run, steps), names) / steps / 1e3


def kernels_ms(run: Run, steps: int = 3) -> dict[str, float]:
    """Return the device's milliseconds per run for every kernel by name, the longest first."""
    found: dict[str, float] = {}
    for event in _trace(run, steps):
        if event.get("cat") in DEVICE_WORK:
            found[event["name"]] = found.get(event["name"], 0.0) + event["dur"] / steps / 1e3
    return dict(sorted(found.items(), key=lambda pair: -pair[1]))


def peak_cpu_bytes(run: Run) -> int:
    """Return the most bytes that a run holds on the CPU beyond those held before it."""
    held = [event["args"] for event in _trace(run, 1, memory=True) if event.get("name") == "[memory]"]
    totals = [args["Total Allocated"] for args in held if "Total Allocated" in args]
    if not totals:
        raise LookupError("the profiler saw no memory")
    before = totals[0] - held[0]["Bytes"]
    return max(totals) - before


def _trace(run: Run, times: int, memory: bool = False) -> list[dict[str, Any]]:
    """Return the events of a Chrome trace, in order of time."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities, profile_memory=memory) as profiler:
        for _ in range(times):
            run()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    return sorted(events, key=lambda event: event.get("ts", 0))


def kernel_us_within(events: list[dict[str, Any]], names: Iterable[str]) -> float:
    """Return the device's microseconds for kernels, copies and fills that were launched within a range of ``names``.

    ``events`` are those of a Chrome trace. A kernel shares a correlation number with its launch and an external id with
    the operation that launched it. Launch or operation lies in a range if it began on the same thread while the range
    was open.
    """
    wanted = set(names)
    ranges: dict[Any, list[tuple[float, float]]] = {}
    for event in events:
        if event.get("cat") in ("user_annotation", "cpu_op") and event.get("name") in wanted:
            ranges.setdefault(event["tid"], []).append((event["ts"], event["ts"] + event["dur"]))
    kernels = [event for event in events if event.get("cat") in DEVICE_WORK]
    if not ranges:
        raise LookupError(f"no profiler range was named {' or '.join(sorted(wanted))}")
    if not kernels:
        raise LookupError("the profiler saw no kernels on the device")
    merged = {thread: _merge(spans) for thread, spans in ranges.items()}

    def inside(event: dict[str, Any]) -> bool:
        spans = merged.get(event["tid"], [])
        i = bisect.bisect_right(spans, (event["ts"], float("inf"))) - 1
        return i >= 0 and event["ts"] <= spans[i][1]

    def ids(categories: tuple[str, ...], key: str) -> set[Any]:
        found = (event for event in events if event.get("cat") in categories and key in event.get("args", {}))
        return {event["args"][key] for event in found if inside(event)}

    launches = ids(("cuda_runtime", "cuda_driver"), "correlation")
    operations = ids(("cpu_op", "user_annotation"), "External id")
    total = 0.0
    for kernel in kernels:
        args = kernel.get("args", {})
        if args.get("correlation") in launches or args.get("External id") in operations:
            total += kernel["dur"]
    return total


def _merge(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Sort the spans and join those that overlap, so that a range within a range counts once."""
    merged: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    return merged
