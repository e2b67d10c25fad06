"""One rank's share of a large head, timed, and from it the expected scaling over many ranks, computed.

    python -m benchmarks.shares --device cuda --json shares.json

A head of 10 million classes with 512 features is divided by rows over R ranks. One step of the rank's own rows is timed
on this device, for each R after another: the loss of N tokens and its backward pass with products in bfloat16,
OnePassAdam on the float32 weight, and the rule's write. Every target is one of the rank's own classes, so the write is
at least that of a real rank. Activations have about the length of trained ones, because the rule writes them into rows:
longer ones make logits so large that targets become unlikelier than they ever are in training, and the kernels compute
such rows again. Steps take a few batches in turn, so that none is learnt by heart.

The exchange is not measured, because there is one process. It is computed: for each token a maximum, a sum and the
logit of its target, and dh (N x d) summed once, in float32, each by a ring of 2 (R - 1) / R times its bytes over the
link's bandwidth, and a latency for each of the two exchanges.

Also measured: the largest number of classes that trains on this device with 512 features.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hebbian_softmax import HebbianSoftmax, OnePassAdam
from hebbian_softmax.lab.base import environment

RANKS = (1, 2, 4, 8, 64)
LINKS = {"NVLink 4, 450 GB/s": 450e9, "400 Gbit/s": 50e9}
"""Bytes per second in each direction."""
GIB = 2**30
ACTIVATION_LENGTH = 4.5
"""With it the logit of a memorised activation is about 20, a few more than log V of ten million classes."""
BATCHES = 4


@dataclass
class Share:
    """One rank's step: its median milliseconds, and the most memory that was held."""

    ranks: int
    classes: int
    ms: float | None = None
    samples_ms: list[float] = field(default_factory=list)
    host_ms: float | None = None
    """The time to launch a step; where it is near ``ms``, the device waits for the host."""
    tflops: float | None = None
    peak_bytes: int | None = None
    reason: str = ""


def wire_bytes(tokens: int, features: int, gradient_bytes: int = 4) -> int:
    """Return the bytes that every rank contributes: three float32 for each token, and dh.

    >>> wire_bytes(4096, 512)
    8437760
    """
    return tokens * (3 * 4 + features * gradient_bytes)


def wire_ms(ranks: int, nbytes: int, bandwidth: float, latency: float) -> float:
    """Return the milliseconds of the two sums over all ranks: of the terms of the rows, and of dh.

    >>> wire_ms(1, 10**6, 1e9, 1e-5)
    0.0
    >>> wire_ms(2, 10**6, 1e9, 0.0)
    1.0
    """
    if ranks == 1:
        return 0.0
    return 1e3 * (2 * (ranks - 1) / ranks * nbytes / bandwidth + 2 * latency)


class Training:
    """A head, its optimizer and a few batches on the device."""

    def __init__(self, classes: int, features: int, tokens: int, device: str) -> None:
        self.device = device
        self.head = HebbianSoftmax(features, classes, gamma=0.1, limit=500, start=0, device=device)
        self.optimizer = OnePassAdam([self.head.weight], head=self.head, lr=1e-5)
        self.batches = cycle([self.draw(classes, features, tokens) for _ in range(BATCHES)])

    def draw(self, classes: int, features: int, tokens: int) -> tuple[Tensor, Tensor]:
        h = torch.randn(tokens, features, device=self.device) * (ACTIVATION_LENGTH / features**0.5)
        ranks = float(classes) ** torch.rand(tokens, device=self.device, dtype=torch.float64)  # Zipf's frequencies
        return h.to(torch.bfloat16).requires_grad_(), (ranks - 1).long().clamp(0, classes - 1)

    def step(self) -> Tensor:
        """Make a step with the next batch, and return its loss."""
        h, targets = next(self.batches)
        with torch.autocast(self.device, torch.bfloat16):
            loss = self.head.loss(h, targets)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        h.grad = None
        return loss.detach()


def free(device: str) -> None:
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def out_of_memory(error: BaseException) -> bool:
    """Return whether the allocator, the driver or cuBLAS found no memory."""
    told = str(error).lower()
    return isinstance(error, torch.OutOfMemoryError) or "out of memory" in told or "alloc_failed" in told


def time_steps(training: Training, seconds: float) -> tuple[list[float], float]:
    """Return the milliseconds of a step, one number for each burst of steps, and those that the host needs for one.

    Bursts let the host's launches run ahead of the device. About ``seconds`` are spent, after steps that compile.
    """
    for _ in range(2):
        training.step()
    synchronize(training.device)
    start = time.perf_counter()
    training.step()
    host = time.perf_counter() - start
    synchronize(training.device)
    each = time.perf_counter() - start
    burst = max(1, min(20, round(0.05 / each)))
    found: list[float] = []
    while len(found) < 3 or (sum(found) * burst < 1e3 * seconds and len(found) < 50):
        start = time.perf_counter()
        for _ in range(burst):
            training.step()
        synchronize(training.device)
        found.append(1e3 * (time.perf_counter() - start) / burst)
    return found, 1e3 * host


def measure_share(ranks: int, total: int, features: int, tokens: int, device: str, seconds: float) -> Share:
    share = Share(ranks, -(-total // ranks))
    training: Training | None = None
    try:
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        training = Training(share.classes, features, tokens, device)
        share.samples_ms, share.host_ms = time_steps(training, seconds)
        share.ms = statistics.median(share.samples_ms)
        share.tflops = 6 * tokens * features * share.classes / share.ms / 1e9
        share.peak_bytes = torch.cuda.max_memory_allocated() if device == "cuda" else None
    except Exception as error:
        share.reason = "out of memory" if out_of_memory(error) else f"{type(error).__name__}: {error}"[:200]
    training = None  # or its memory could not be freed
    free(device)
    return share


def trains(classes: int, features: int, tokens: int, device: str) -> int | None:
    """Return the most bytes held while a head of so many classes takes two steps; None where memory runs out."""
    training: Training | None = None
    try:
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        training = Training(classes, features, tokens, device)
        for _ in range(2):
            training.step()
        synchronize(device)
        found: int | None = torch.cuda.max_memory_allocated() if device == "cuda" else 0
    except Exception as error:
        if not out_of_memory(error):
            raise
        found = None
    training = None  # or its memory could not be freed
    free(device)
    return found


def largest(first_guess: int, fits: Callable[[int], bool], grain: int, tries: int = 7) -> tuple[int, int | None]:
    """Return the largest number that was seen to fit and the smallest that was seen not to, in a few tries.

    >>> largest(900, lambda classes: classes <= 1000, grain=10)
    (1000, 1010)
    """
    good, bad, guess = 0, None, first_guess
    for _ in range(tries):
        if fits(guess):
            good = guess
        else:
            bad = guess
        if bad is None:
            guess = (good + good // 20) // grain * grain
        else:
            guess = (good + bad) // 2 // grain * grain if good else bad * 19 // 20 // grain * grain
        if guess in (good, bad):
            break
    return good, bad


def largest_head(features: int, tokens: int, budget: float) -> dict[str, Any]:
    """Search the largest head that trains on the CUDA device, from the memory of two smaller ones."""
    started, device = time.monotonic(), "cuda"
    sizes = 1_000_000, 2_000_000
    peaks = [trains(size, features, tokens, device) for size in sizes]
    if peaks[0] is None or peaks[1] is None:
        return {"reason": "a head of two million classes does not fit"}
    per_class = (peaks[1] - peaks[0]) / (sizes[1] - sizes[0])
    free_bytes = torch.cuda.mem_get_info()[0]
    most_workspace = 3_600_000_000
    guess = int((0.985 * free_bytes - most_workspace) / per_class) // 50_000 * 50_000
    tried: dict[int, int | None] = {}

    def fits(classes: int) -> bool:
        if time.monotonic() - started > budget:
            return False
        tried[classes] = trains(classes, features, tokens, device)
        return tried[classes] is not None

    largest(guess, fits, grain=50_000)
    good = max((classes for classes, peak in tried.items() if peak is not None), default=None)
    bad = min((classes for classes, peak in tried.items() if peak is None), default=None)
    return {
        "largest_that_trains": good,
        "its_peak_bytes": None if good is None else tried[good],
        "smallest_that_does_not": bad,
        "bytes_per_class": per_class,
        "device_bytes_free": free_bytes,
        "features": features,
        "tokens": tokens,
        "seconds": round(time.monotonic() - started, 1),
    }


def scaling(shares: list[Share], nbytes: int, links: dict[str, float], latency: float) -> list[dict[str, Any]]:
    """Return the computed step for each number of ranks and link: the measured compute and the computed exchange."""
    base = next((s.ms for s in shares if s.ranks == 1), None)
    found = []
    for share in shares:
        for link, bandwidth in links.items():
            if share.ms is None:
                continue
            exchange = wire_ms(share.ranks, nbytes, bandwidth, latency)
            step = share.ms + exchange
            speedup = None if base is None else base / step
            efficiency = None if speedup is None else speedup / share.ranks
            found.append(
                {
                    "ranks": share.ranks,
                    "link": link,
                    "measured_compute_ms": share.ms,
                    "computed_exchange_ms": exchange,
                    "computed_step_ms": step,
                    "computed_speedup": speedup,
                    "computed_efficiency": efficiency,
                }
            )
    return found


def print_tables(shares: list[Share], computed: list[dict[str, Any]]) -> None:
    print("measured: one rank's compute (loss, backward, OnePassAdam, write)")
    print(f"{'ranks':>6} {'classes':>12} {'ms':>10} {'eq TFLOP/s':>11} {'host ms':>8} {'peak GiB':>9}")
    for share in shares:
        row = f"{share.ranks:6} {share.classes:12,}"
        if share.ms is None:
            print(f"{row} {share.reason}")
            continue
        memory = "-" if share.peak_bytes is None else f"{share.peak_bytes / GIB:.1f}"
        print(f"{row} {share.ms:10.3f} {share.tflops:11.4g} {share.host_ms:8.2f} {memory:>9}")
    print("computed: the exchange, and the step with it (speed-up over one rank)")
    print(f"{'ranks':>6}  {'link':<22} {'exchange ms':>12} {'step ms':>10} {'speed-up':>9} {'efficiency':>10}")
    for row_of in computed:
        speedup, efficiency = row_of["computed_speedup"], row_of["computed_efficiency"]
        print(
            f"{row_of['ranks']:6}  {row_of['link']:<22} {row_of['computed_exchange_ms']:12.3f} "
            f"{row_of['computed_step_ms']:10.3f} {'-' if speedup is None else f'{speedup:.2f}':>9} "
            f"{'-' if efficiency is None else f'{100 * efficiency:.0f} %':>10}"
        )


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.shares", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--classes", type=int, default=10_000_000, help="of the whole head (default 10 million)")
    parser.add_argument("--features", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=4_096)
    parser.add_argument("--link", type=float, action="append", help="bytes per second of a link (default: two links)")
    parser.add_argument("--latency", type=float, default=2e-5, help="seconds of each exchange, assumed (default 2e-5)")
    parser.add_argument("--budget", type=float, default=80.0, help="seconds after which the rest is left out")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--commit", help="commit to name in the record (default: that of git)")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to see whether everything runs")
    options = parser.parse_args(arguments)
    if options.device == "cpu":
        torch.set_num_threads(1)
    if options.quick:
        options.classes, options.features, options.tokens = 4_000, 16, 32
    links = {f"{each / 1e9:g} GB/s": each for each in options.link} if options.link else LINKS
    started = time.monotonic()
    shares = []
    for ranks in sorted(RANKS, reverse=True):  # Small ones first, in case that the budget is spent.
        if time.monotonic() - started > 0.6 * options.budget:
            shares.append(Share(ranks, -(-options.classes // ranks), reason="budget spent"))
            continue
        seconds = 0.01 if options.quick else 1.5
        shares.append(measure_share(ranks, options.classes, options.features, options.tokens, options.device, seconds))
    shares.sort(key=lambda share: share.ranks)
    nbytes = wire_bytes(options.tokens, options.features)
    computed = scaling(shares, nbytes, links, options.latency)
    record: dict[str, Any] = {
        "benchmark": "shares",
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "device": torch.cuda.get_device_name() if options.device == "cuda" else f"{platform.machine()} CPU",
        "torch": torch.__version__,
        "commit": options.commit or environment.commit(),
        "tokens": options.tokens,
        "features": options.features,
        "classes": options.classes,
        "measured": [asdict(share) for share in shares],
        "wire_bytes_per_rank": nbytes,
        "latency_s": options.latency,
        "computed": computed,
        "largest": None,
    }

    def save() -> None:
        record["seconds"] = round(time.monotonic() - started, 1)
        if options.json:
            options.json.write_text(json.dumps(record, indent=1) + "\n")

    print(f"{record['device']}, torch {record['torch']}, commit {record['commit']}")
    print(f"{options.tokens:,} tokens, {options.features} features, {options.classes:,} classes over all ranks")
    print_tables(shares, computed)
    save()
    if options.device == "cuda" and not options.quick:
        left = options.budget - (time.monotonic() - started)
        try:
            record["largest"] = largest_head(options.features, options.tokens, left)
        except Exception as error:
            record["largest"] = {"reason": f"{type(error).__name__}: {error}"[:200]}
        print(f"largest head that trains on this device: {json.dumps(record['largest'])}")
    save()
    print(f"{record['seconds']} s")


if __name__ == "__main__":
    main()
