"""The table and the JSON record of a run."""

from __future__ import annotations

import datetime
import importlib.metadata
import math
import platform
import subprocess
from typing import Any

import torch

from benchmarks.output_layer.bars import added_by_write
from benchmarks.output_layer.measuring import Entry
from benchmarks.output_layer.problems import Spec
from hebbian_softmax.lab.base import environment

EAGER = "eager"
COLUMNS = (
    f"{'':<58} {'ms':>10} {'eq TFLOP/s':>10} {'of peak':>8} {'host ms':>8} {'eager/it':>8} {'extra GB':>8} "
    f"{'dh err':>8} {'dW err':>8}"
)

Peaks = dict[torch.dtype, dict[str, float]]
"""The rates of matrix products of which shares are shown."""


def header(device: str, commit: str | None, command: str) -> dict[str, Any]:
    """Return what the numbers depend on."""
    return {
        "benchmark": "output_layer",
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "device": torch.cuda.get_device_name() if device == "cuda" else f"{platform.machine()} CPU",
        "threads": torch.get_num_threads() if device == "cpu" else None,
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
        if device == "cuda"
        else None,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "torch": torch.__version__,
        **{name: _version(name) for name in ("triton", "liger-kernel", "cut-cross-entropy")},
        "commit": commit or environment.commit(),
        "command": command,
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip().splitlines()[0] if done.stdout.strip() else None


def record_of(entry: Entry, entries: list[Entry], peaks: Peaks) -> dict[str, Any]:
    spec, rate = entry.spec, entry.tflops()
    return {
        "shape": spec.name,
        "n": spec.n,
        "features": spec.features,
        "classes": spec.classes,
        "dtype": str(spec.dtype).removeprefix("torch."),
        "logits": spec.logits,
        "contender": entry.contender,
        "kind": entry.kind,
        "status": entry.status,
        "reason": entry.reason,
        "note": entry.note,
        "median_ms": entry.ms,
        "host_ms": entry.host_ms,
        "repeats": entry.repeats,
        "eq_tflops": rate,
        "share_of_gemm_peak": None if rate is None else rate / peak_of(peaks),
        "eager_over_it": eager_ratio(entry, entries),
        "extra_bytes": entry.extra_bytes,
        "relative_errors": _finite(entry.errors),
        "kernels_ms": entry.kernels,
        "rule_kernels_ms": entry.rule_ms,
        "write_adds_ms": added_by_write(entry, entries) if "write" in entry.kind else None,
    }


def _finite(errors: dict[str, float] | None) -> dict[str, float | None] | None:
    """Replace values that are not finite by None, because JSON has no NaN."""
    if errors is None:
        return None
    return {name: error if math.isfinite(error) else None for name, error in errors.items()}


def peak_of(peaks: Peaks) -> float:
    """Return the peak over all dtypes: some CPUs multiply bf16 slower than fp32, and a contender may convert."""
    return max(rate for rates in peaks.values() for rate in rates.values())


def eager_ratio(entry: Entry, entries: list[Entry]) -> float | None:
    """Return how many times faster the entry is than eager torch on the same problem."""
    eager = next((e.ms for e in entries if e.spec == entry.spec and e.contender == EAGER), None)
    return None if eager is None or entry.ms is None or entry.kind.startswith("step") else eager / entry.ms


def table(entries: list[Entry], peaks: Peaks, target_probabilities: dict[Spec, float]) -> str:
    lines = [COLUMNS]
    for spec in dict.fromkeys(entry.spec for entry in entries):
        probability = target_probabilities.get(spec)
        lines.append(spec.title() + ("" if probability is None else f", mean p(target) {probability:.2g}"))
        lines += [_row(entry, entries, peaks) for entry in entries if entry.spec == spec]
    return "\n".join(lines)


def kernels(entries: list[Entry], most: int = 8) -> str:
    """Return the kernels that took the device's time, for the entries that were profiled."""
    lines = []
    for entry in entries:
        if entry.kernels:
            total = sum(entry.kernels.values())
            lines.append(f"{entry.spec.name}: {entry.contender}: device {total:.3f} ms, in kernels")
            lines += [
                f"  {ms:9.3f} ms {100 * ms / total:5.1f} %  {name[:90]}" for name, ms in _first(entry.kernels, most)
            ]
    return "\n".join(lines)


def _first(kernels: dict[str, float], most: int) -> list[tuple[str, float]]:
    listed = list(kernels.items())
    rest = sum(ms for _, ms in listed[most:])
    return listed[:most] + ([("all others", rest)] if rest else [])


def _row(entry: Entry, entries: list[Entry], peaks: Peaks) -> str:
    name = f"  {entry.contender}" + (" [approximate]" if entry.kind == "approximate" else "")
    rate = entry.tflops()
    if entry.ms is None or rate is None:
        return f"{name:<58} {entry.status}: {entry.reason}"
    errors = entry.errors or {}
    cells = [
        f"{name:<58} {entry.ms:10.3f} {rate:10.3g} {100 * rate / peak_of(peaks):7.1f}%",
        _cell(entry.host_ms, ".2f"),
        _cell(eager_ratio(entry, entries), ".2f"),
        _cell(None if entry.extra_bytes is None else entry.extra_bytes / 1e9, ".2f"),
        _cell(errors.get("dh"), ".1e"),
        _cell(max(errors["dW_targets"], errors["dW_any"]) if errors else None, ".1e"),
    ]
    remarks = [entry.note]
    if entry.rule_ms is not None:
        remarks.append(f"rule's kernels {1e3 * entry.rule_ms:.0f} us")
    added = added_by_write(entry, entries) if "write" in entry.kind else None
    if added is not None:
        remarks.append(f"write adds {1e3 * added:.0f} us")
    if entry.status != "ok":
        remarks.insert(0, f"{entry.status.upper()}: {entry.reason}")
    return " ".join(cells) + "  " + "; ".join(filter(None, remarks))


def _cell(value: float | None, form: str) -> str:
    return f"{'-' if value is None else format(value, form):>8}"
