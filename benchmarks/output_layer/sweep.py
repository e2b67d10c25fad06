"""Whether ``impl="auto"`` takes the fastest of its implementations and eager torch, over a grid of N x V x d.

    python -m benchmarks.output_layer.sweep --device cuda --budget 100 --json sweep.json

Prints every problem with the times of all, marks those where auto is more than 5 % slower than the best, and the number
of logits up to which ``reference`` should be taken so that the worst problem is slowed down least. ``eager`` is
``F.cross_entropy(F.linear(h, W), y)`` with the logits in the dtype of W; ours returns the loss in float32.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.output_layer import report
from benchmarks.output_layer.contenders import Contender, Loss, eager, plain
from benchmarks.output_layer.measuring import Entry, free_memory, measure, reason_of
from benchmarks.output_layer.problems import Spec, draw
from hebbian_softmax.loss import linear_cross_entropy

LIMIT = 1.05
"""Auto may take this many times as long as the best."""
ENGINES = ("triton", "chunked")
"""What auto takes for problems that are not small: the first that runs."""
WIDTHS = {"cuda": (512, 64, 1_024, 4_096), "cpu": (128, 64, 512)}
"""Numbers of features; the first is measured in every dtype."""
CLASSES = {"cuda": (1_000, 10_000, 32_768, 128_256, 267_735, 1_000_000), "cpu": (1_000, 10_000, 33_278, 100_000)}
ROWS = {"cuda": (256, 1_024, 4_096, 16_384), "cpu": (8, 32, 128, 512, 2_048)}
LOGITS = {"cuda": (1e6, 1.1e9), "cpu": (6e4, 3e7)}
DTYPES = {"cuda": (torch.bfloat16, torch.float32, torch.float16), "cpu": (torch.float32, torch.bfloat16)}


def problems(device: str, quick: bool) -> list[Spec]:
    """Return the grid: each N and V with the first width in every dtype, and with another one in the first dtype."""
    if quick:
        return [Spec("8 x 40", 8, 16, 40, dtype=t) for t in DTYPES[device]]
    least, most = LOGITS[device]
    sizes = [(n, v) for v in CLASSES[device] for n in ROWS[device] if least <= n * v <= most]
    first, *others = WIDTHS[device]
    first_dtype, *other_dtypes = DTYPES[device]

    def spec(n: int, d: int, v: int, dtype: torch.dtype) -> Spec:
        return Spec(f"{n:,} x {d:,} x {v:,}", n, d, v, dtype=dtype)

    found = [spec(n, first, v, first_dtype) for n, v in sizes]
    for i, (n, v) in enumerate(sizes):
        d = others[i % len(others)]
        if d * v <= 1.1e9:
            found.append(spec(n, d, v, first_dtype))
    return found + [spec(n, first, v, dtype) for dtype in other_dtypes for n, v in sizes]


def ours(impl: str) -> Loss:
    def loss(h: Tensor, weight: Tensor, targets: Tensor, _: Tensor | None) -> Tensor:
        return linear_cross_entropy(h, weight, targets, impl=impl)

    return loss


CONTENDERS = [
    *(Contender(impl, "ours", plain(ours(impl))) for impl in ("auto", "reference", *ENGINES)),
    Contender("eager", "peer", plain(eager)),
]


def milliseconds(entries: list[Entry]) -> dict[str, float]:
    return {entry.contender: entry.ms for entry in entries if entry.ms is not None}


def slowdown(times: dict[str, float], chosen: str) -> float:
    """Return how many times as long the chosen implementation takes as the best."""
    return times[chosen] / min(times.values())


def chosen(times: dict[str, float], logits: int, threshold: float) -> str:
    """Return what auto would take with this threshold."""
    engine = next(name for name in ENGINES if name in times)
    return "reference" if logits <= threshold else engine


def best_threshold(measured: list[tuple[Spec, dict[str, float]]]) -> tuple[float, float, int]:
    """Return up to how many logits to take reference, the worst slowdown then, and how many are above the limit.

    >>> few, many = Spec("few", 8, 4, 10), Spec("many", 8, 4, 100)
    >>> fast, slow = {"reference": 1.0, "chunked": 2.0}, {"reference": 3.0, "chunked": 2.0}
    >>> best_threshold([(few, fast), (many, slow)])
    (80, 1.0, 0)
    """
    usable = [(s, t) for s, t in measured if "reference" in t and any(name in t for name in ENGINES)]

    def outcome(threshold: float) -> tuple[int, float]:
        found = [slowdown(t, chosen(t, s.n * s.classes, threshold)) for s, t in usable]
        return sum(each > LIMIT for each in found), max(found, default=1.0)

    candidates = [0, *sorted({s.n * s.classes for s, _ in usable})]
    threshold = min(candidates, key=outcome)
    count, worst = outcome(threshold)
    return threshold, worst, count


def line(spec: Spec, times: dict[str, float], entries: list[Entry]) -> str:
    cells = [f"{times[c.name]:9.3f}" if c.name in times else f"{'-':>9}" for c in CONTENDERS]
    late = slowdown(times, "auto") if "auto" in times else float("nan")
    best = min(times, key=lambda name: times[name]) if times else "-"
    host = next((e.host_ms for e in entries if e.contender == "auto" and e.host_ms is not None), float("nan"))
    mark = " <-- slower" if late > LIMIT else ""
    dtype = str(spec.dtype).removeprefix("torch.")
    size = f"{spec.name:<26} {dtype:<9} {spec.n * spec.classes / 1e6:9.2f}"
    return f"{size} {' '.join(cells)} {late:6.2f} {host:7.2f}  {best}{mark}"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.output_layer.sweep", description=__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--budget", type=float, default=100.0, help="seconds after which the rest is left out")
    parser.add_argument("--seconds", type=float, default=0.08, help="seconds for each contender (default 0.08)")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (default 1)")
    parser.add_argument("--most", type=int, help="measure only so many problems, spread over the grid")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--commit", help="commit to name in the record (default: that of git)")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to see whether everything runs")
    options = parser.parse_args(arguments)
    if options.device == "cpu":
        torch.set_num_threads(options.threads)
    else:
        gc.freeze()  # Imported objects stay alive, so collecting between problems is fast.
    torch.backends.cuda.matmul.allow_tf32 = False
    grid = problems(options.device, options.quick)
    if options.most is not None and options.most < len(grid):
        grid = [grid[i * len(grid) // options.most] for i in range(options.most)]
    head = report.header(options.device, options.commit, "python -m benchmarks.output_layer.sweep")
    print("\n".join(f"{key}: {value}" for key, value in head.items() if value is not None))
    print(f"{'N x d x V':<26} {'':<9} {'Mlogits':>9} " + " ".join(f"{c.name:>9}" for c in CONTENDERS), end="")
    print(f" {'auto/best':>6} {'host':>6}  best   (ms)", flush=True)
    started = time.monotonic()
    measured: list[tuple[Spec, dict[str, float]]] = []
    records: list[dict[str, Any]] = []
    for i, spec in enumerate(grid):
        if time.monotonic() - started > options.budget:
            print(f"budget of {options.budget:g} s spent: {len(grid) - i} of {len(grid)} problems left out")
            break
        try:
            entries = measure(CONTENDERS, draw(spec, options.device), None, options.device, options.seconds)
        except Exception as error:
            print(f"{spec.title()}: {reason_of(error)}")
            free_memory(options.device)
            continue
        records += [report.record_of(entry, entries) for entry in entries]
        times = milliseconds(entries)
        measured.append((spec, times))
        print(line(spec, times, entries), flush=True)
        if options.json:
            options.json.write_text(json.dumps(head | {"entries": records}, indent=1) + "\n")
    for dtype in DTYPES[options.device]:
        some = [(spec, times) for spec, times in measured if spec.dtype == dtype]
        if not some:
            continue
        now = [slowdown(times, "auto") for _, times in some if "auto" in times]
        threshold, worst, count = best_threshold(some)
        print(
            f"{str(dtype).removeprefix('torch.')}: auto now more than 5 % slower in {sum(s > LIMIT for s in now)} of "
            f"{len(now)}, worst {max(now, default=1.0):.2f}; best threshold {threshold / 1e6:g} million logits "
            f"({threshold / 2**18:g} x 2^18): {count} slower, worst {worst:.2f}"
        )
    print(f"{time.monotonic() - started:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
