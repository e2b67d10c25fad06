"""The time that the rule adds to a training step of the output layer.

Three heads of the same size take turns, one step each; the ratios of the medians are the result. On a CPU one thread is
used, because on a busy machine several threads mostly wait for a core; the milliseconds are only an orientation.

    python -m benchmarks.rule_overhead [--device cuda] [--json FILE]
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
import torch.nn.functional as F
from torch import Tensor, nn

from hebbian_softmax import HebbianSoftmax

SHAPES = {
    "cpu": [(32, 64, 1_623), (256, 128, 10_000), (512, 256, 33_278)],
    "cuda": [(32, 64, 1_623), (8_192, 1_024, 32_768), (4_096, 512, 267_735)],
}
"""(activations, features, classes) of the image curriculum and of language models with growing vocabularies."""


def steps_of(n: int, features: int, classes: int, device: str) -> dict[str, Callable[[Tensor, Tensor], None]]:
    """Return the training steps of three heads: nn.Linear, ours without writes, and ours."""
    linear = nn.Linear(features, classes, bias=False, device=device)
    heads = [HebbianSoftmax(features, classes, gamma=0.1, limit=50, start=0, device=device) for _ in range(2)]
    heads[0].memorizing = False
    optimizers = [torch.optim.RMSprop(head.parameters(), lr=1e-3) for head in (linear, *heads)]
    for head, optimizer in zip(heads, optimizers[1:], strict=True):
        head.attach(optimizer)

    def step(loss: Tensor, optimizer: torch.optim.Optimizer) -> None:
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return {
        "nn.Linear": lambda h, y: step(F.cross_entropy(linear(h), y), optimizers[0]),
        "writes off": lambda h, y: step(heads[0].loss(h, y), optimizers[1]),
        "Hebbian": lambda h, y: step(heads[1].loss(h, y), optimizers[2]),
    }


def zipf_targets(n: int, classes: int, device: str) -> Tensor:
    """Return n targets with Zipf's frequencies."""
    ranks = torch.arange(1, classes + 1, dtype=torch.float64, device=device)
    return torch.multinomial(1 / ranks, n, replacement=True)


def measure(shape: tuple[int, int, int], device: str, rounds: int, warmup: int = 3) -> dict[str, float]:
    """Return the median milliseconds of a step for each head."""
    n, features, classes = shape
    steps = steps_of(n, features, classes, device)
    times: dict[str, list[float]] = {name: [] for name in steps}
    for round_number in range(rounds + warmup):
        h = torch.randn(n, features, device=device, requires_grad=True)
        y = zipf_targets(n, classes, device)
        for name, step in steps.items():
            synchronize(device)
            start = time.perf_counter()
            step(h, y)
            synchronize(device)
            if round_number >= warmup:
                times[name].append(1e3 * (time.perf_counter() - start))
    return {name: statistics.median(values) for name, values in times.items()}


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def hardware(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else f"{platform.machine()} CPU, 1 thread"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--rounds", type=int, default=15, help="timed steps of each head (default 15)")
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    print(f"{hardware(options.device)}, torch {torch.__version__}")
    rows = []
    print(f"{'N x d x V':>24} {'nn.Linear ms':>13} {'writes off':>11} {'Hebbian':>9}   (ratios to nn.Linear)")
    for shape in SHAPES[options.device]:
        medians = measure(shape, options.device, options.rounds)
        base = medians["nn.Linear"]
        name = " x ".join(f"{size:,}" for size in shape)
        print(f"{name:>24} {base:13.2f} {medians['writes off'] / base:11.3f} {medians['Hebbian'] / base:9.3f}")
        rows.append({"shape": shape, "median_ms": medians})
    record = {
        "benchmark": "rule_overhead",
        "device": hardware(options.device),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "rounds": options.rounds,
        "rows": rows,
    }
    if options.json:
        options.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
