"""The table and the JSON record of a run."""

from __future__ import annotations

import datetime
import importlib.metadata
import math
import platform
import subprocess
from typing import Any

import torch

from benchmarks.output_layer.bars import added_by_write, peak, published
from benchmarks.output_layer.measuring import Entry
from benchmarks.output_layer.peers import PUBLISHED
from benchmarks.output_layer.problems import Spec
from hebbian_softmax.lab.base import environment

EAGER = "eager"
PACKAGES = ("triton", "liger-kernel", "quack-kernels", "nvidia-cutlass-dsl", "cut-cross-entropy")
COLUMNS = (
    f"{'':<58} {'ms':>10} {'eq TFLOP/s':>10} {'% of best':>9} {'host ms':>8} {'eager/it':>8} {'extra GB':>8} "
    f"{'dh err':>8} {'dW err':>8}"
)


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
        **{name: _version(name) for name in PACKAGES},
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


def record_of(entry: Entry, entries: list[Entry]) -> dict[str, Any]:
    spec = entry.spec
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
        "burst": entry.burst,
        "preparation_s": entry.preparation_s,
        "samples_ms": [round(sample, 5) for sample in entry.samples],
        "published_ms": PUBLISHED.get((spec.name, entry.contender), (None,))[0] if entry.ms is None else None,
        "operations": entry.operations,
        "eq_tflops": entry.tflops(),
        "share_of_product": share(entry, entries),
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


def share(entry: Entry, entries: list[Entry]) -> float | None:
    """Return the rate of an entry over that of the best product on a problem of the same size."""
    rate, best = entry.tflops(), peak(entry.spec, entries)
    return None if rate is None or best is None else rate / best


def eager_ratio(entry: Entry, entries: list[Entry]) -> float | None:
    """Return how many times faster the entry is than eager torch on the same problem."""
    eager = next((e.ms for e in entries if e.spec == entry.spec and e.contender == EAGER), None)
    return None if eager is None or entry.ms is None or entry.kind.startswith(("step", "product")) else eager / entry.ms


def table(entries: list[Entry], target_probabilities: dict[Spec, float]) -> str:
    lines = [COLUMNS]
    for spec in dict.fromkeys(entry.spec for entry in entries):
        probability = target_probabilities.get(spec)
        lines.append(spec.title() + ("" if probability is None else f", mean p(target) {probability:.2g}"))
        lines += [_row(entry, entries) for entry in entries if entry.spec == spec]
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


def _row(entry: Entry, entries: list[Entry]) -> str:
    name = f"  {entry.contender}" + (" [approximate]" if entry.kind == "approximate" else "")
    rate = entry.tflops()
    if entry.ms is None or rate is None:
        return f"{name:<58} {entry.status}: {entry.reason}{published(entry.spec.name, entry.contender)}"
    errors = entry.errors or {}
    cells = [
        f"{name:<58} {entry.ms:10.3f} {rate:10.3g}",
        _cell(part if (part := share(entry, entries)) is None else 100 * part, ".1f"),
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
