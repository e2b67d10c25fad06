"""Whether ``impl="auto"`` takes the fastest of its implementations and eager torch, over a grid of N x V x d.

    python -m benchmarks.output_layer.sweep --device cuda --budget 100 --json sweep.json

Prints every problem with the times of all, marks those where auto is more than 5 % slower than the best, and the number
of logits up to which ``reference`` should be taken so that the worst problem is slowed down least. ``eager`` is
``F.cross_entropy(F.linear(h, W), y)`` with the logits in the dtype of W; ours returns the loss in float32.

On a GPU two times are told apart. That of the device is measured while the host is far ahead, as it is in the midst of
a training step: the device sleeps until everything is launched. That of the host is what it takes to launch a run.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.output_layer import report
from benchmarks.output_layer.contenders import Contender, Loss, Run, eager, plain
from benchmarks.output_layer.measuring import (
    between_ms,
    free_memory,
    mark,
    reason_of,
    repeats_within,
    seconds_of,
    synchronize,
)
from benchmarks.output_layer.problems import Problem, Spec, draw
from hebbian_softmax.loss import linear_cross_entropy

LIMIT = 1.05
"""Auto may take this many times as long as the best."""
ENGINES = ("triton", "chunked")
"""What auto takes for problems that are not small: the first that runs."""
LEAST_TURN, MOST_HOST = 0.004, 0.003
"""The seconds that short runs are repeated in a turn, and the most that a host takes to launch one."""
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


def measure(problem: Problem, device: str, seconds: float) -> tuple[dict[str, float], dict[str, float]]:
    """Return the milliseconds of a forward and backward pass of each contender, on the device and on its host.

    They take turns. On a CPU there is one time, and it is returned twice. A contender that does not run is left out.
    """
    runs: dict[str, Run] = {}
    each: dict[str, float] = {}
    for contender in CONTENDERS:
        try:
            run, _ = contender.build(problem)
            run()
            each[contender.name] = min(seconds_of(run, device) for _ in range(2))
            runs[contender.name] = run
        except Exception as error:
            if "not available" not in str(error):
                print(f"{problem.spec.title()}, {contender.name}: {reason_of(error)}", file=sys.stderr)
            free_memory(device)
    on_device: dict[str, list[float]] = {name: [] for name in runs}
    on_host: dict[str, list[float]] = {name: [] for name in runs}
    chance = random.Random(0)
    rounds = repeats_within(seconds * len(runs), sum(max(t, LEAST_TURN) for t in each.values()), least=3, most=9)
    for _ in range(rounds):
        for name in chance.sample(list(runs), len(runs)):
            burst = repeats_within(LEAST_TURN, each[name], least=1, most=8)
            synchronize(device)
            if device == "cuda":
                torch.cuda._sleep(int(2e9 * 1.5 * burst * min(each[name], MOST_HOST)))  # type: ignore[no-untyped-call]
            began, start = time.perf_counter(), mark(device)
            for _ in range(burst):
                runs[name]()
            end, launched = mark(device), 1e3 * (time.perf_counter() - began) / burst
            synchronize(device)
            on_device[name].append(between_ms(start, end) / burst)
            on_host[name].append(launched)
    medians = [{name: statistics.median(found) for name, found in times.items()} for times in (on_device, on_host)]
    return medians[0], medians[1]


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


def line(spec: Spec, on_device: dict[str, float], on_host: dict[str, float], device: str) -> str:
    """Return one row of the table: the times on the device, auto's slowdown, and on a GPU the times on the host."""
    dtype = str(spec.dtype).removeprefix("torch.")
    text = f"{spec.name:<26} {dtype:<9} {spec.n * spec.classes / 1e6:9.2f}"
    for times in (on_device, on_host) if device == "cuda" else (on_device,):
        cells = [f"{times[c.name]:9.3f}" if c.name in times else f"{'-':>9}" for c in CONTENDERS]
        late = slowdown(times, "auto") if "auto" in times else float("nan")
        text += f" {' '.join(cells)} {late:6.2f}{'!' if late > LIMIT else ' '}"
    return text


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
    names = " ".join(f"{c.name:>9}" for c in CONTENDERS) + f" {'':6} "
    two = options.device == "cuda"
    print(f"{'milliseconds':<26} {'':<9} {'':>9} {'on the device':<{len(names) + 1}}{'on the host' if two else ''}")
    print(f"{'N x d x V':<26} {'':<9} {'Mlogits':>9} {names}{' ' + names if two else ''}", flush=True)
    started = time.monotonic()
    measured: list[tuple[Spec, dict[str, float]]] = []
    records: list[dict[str, Any]] = []
    for i, spec in enumerate(grid):
        if time.monotonic() - started > options.budget:
            print(f"budget of {options.budget:g} s spent: {len(grid) - i} of {len(grid)} problems left out")
            break
        try:
            on_device, on_host = measure(draw(spec, options.device), options.device, options.seconds)
        except Exception as error:
            print(f"{spec.title()}: {reason_of(error)}")
            continue
        finally:
            free_memory(options.device)
        sizes = {"n": spec.n, "features": spec.features, "classes": spec.classes, "dtype": str(spec.dtype)}
        records.append(sizes | {"device_ms": on_device, "host_ms": on_host})
        measured.append((spec, on_device))
        print(line(spec, on_device, on_host, options.device), flush=True)
        if options.json:
            options.json.write_text(json.dumps(head | {"problems": records}) + "\n")
    for dtype in DTYPES[options.device]:
        some = [(spec, times) for spec, times in measured if spec.dtype == dtype]
        if not some:
            continue
        now = [slowdown(times, "auto") for _, times in some if "auto" in times]
        threshold, worst, count = best_threshold(some)
        print(
            f"{str(dtype).removeprefix('torch.')}, by the device: auto now more than 5 % slower in "
            f"{sum(s > LIMIT for s in now)} of {len(now)}, worst {max(now, default=1.0):.2f}; "
            f"best threshold {threshold / 1e6:g} million logits "
            f"({threshold / 2**18:g} x 2^18): {count} slower, worst {worst:.2f}"
        )
    print(f"{time.monotonic() - started:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
