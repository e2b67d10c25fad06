"""The time that ``add_classes(1)`` takes on a head that is being trained with Adam on a CPU.

Each case adds classes one by one. The mean over all calls is the amortised time: it has the first call, which searches
all modules and makes room, and the calls that make room again. "concatenated" copies the same tensors for each class,
with nothing else.

    python -m benchmarks.growth [--classes 10000] [--features 384] [--calls 400] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from hebbian_softmax import HebbianSoftmax


class Growing:
    """A head with Adam's state and a gradient."""

    def __init__(self, classes: int, features: int) -> None:
        self.head = HebbianSoftmax(features, classes, gamma=0.1, limit=50, start=0)
        self.optimizer = torch.optim.Adam(self.head.parameters(), lr=1e-3)
        self.head.attach(self.optimizer)
        self.step()

    def step(self) -> None:
        """Make a training step, which leaves its gradient."""
        self.optimizer.zero_grad()
        targets = torch.randint(self.head.num_classes, (8,))
        self.head.loss(torch.randn(8, self.head.in_features), targets).backward()
        self.optimizer.step()

    def nothing(self) -> None:
        """Leave the head as it is."""


class Concatenated:
    """The tensors of such a head, each of which is copied to get a new row."""

    def __init__(self, classes: int, features: int) -> None:
        self.tensors = {name: torch.zeros(classes, features) for name in ("weight", "grad", "exp_avg", "exp_avg_sq")}

    def add(self) -> None:
        """Append a row to each."""
        for name, tensor in self.tensors.items():
            self.tensors[name] = torch.cat([tensor, torch.zeros_like(tensor[:1])])


def timed(add: Callable[[], None], before: Callable[[], object], calls: int) -> list[float]:
    """Return the milliseconds of each call of ``add``; ``before`` comes before each and does not count."""
    found = []
    for _ in range(calls):
        before()
        start = time.perf_counter()
        add()
        found.append(1e3 * (time.perf_counter() - start))
    return found


def cases(classes: int, features: int) -> dict[str, tuple[Callable[[], None], Callable[[], object]]]:
    """Return what is timed and what comes before, by name."""

    def of(growing: Growing, before: Callable[[], object]) -> tuple[Callable[[], None], Callable[[], object]]:
        return (lambda: growing.head.add_classes(1)), before

    one, two, three = (Growing(classes, features) for _ in range(3))
    old = Concatenated(classes, features)
    return {
        "one after the other": of(one, one.nothing),
        "gradient cleared": of(two, two.optimizer.zero_grad),
        "after a training step": of(three, three.step),
        "concatenated": (old.add, lambda: None),
    }


def main(arguments: list[str] | None = None) -> None:
    """Time the cases, print them and write them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--classes", type=int, default=10_000)
    parser.add_argument("--features", type=int, default=384)
    parser.add_argument("--calls", type=int, default=400)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    print(f"add_classes(1) at {options.classes:,} x {options.features}, Adam, torch {torch.__version__}, ms")
    print(f"{'':>24} {'amortised':>10} {'median':>8} {'first':>8} {'largest later':>14}")
    rows = {}
    for name, (add, before) in cases(options.classes, options.features).items():
        found = timed(add, before, options.calls)
        rows[name] = {
            "amortised": statistics.fmean(found),
            "median": statistics.median(found),
            "first": found[0],
            "largest later": max(found[1:], default=found[0]),
        }
        amortised, median, first, largest = rows[name].values()
        print(f"{name:>24} {amortised:10.3f} {median:8.3f} {first:8.3f} {largest:14.3f}")
    record = {
        "benchmark": "growth",
        "shape": [options.classes, options.features],
        "calls": options.calls,
        "threads": options.threads,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "milliseconds": rows,
    }
    if options.json:
        options.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
