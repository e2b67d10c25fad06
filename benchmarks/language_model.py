"""Training words a second of the paper's language model, plain and Hebbian in turn, and the time of a step's parts.

The words are random with Zipf's frequencies, so that no corpus is needed; the two vocabularies have the sizes of
WikiText-103's and of that of 529 Gutenberg novels. Each part of a step is shown with its floor: its matrix products at
the rate that this machine reaches in one large product, or the bytes that it must move at the rate of a large copy. The
rule has the paper's T of 500: with a small T most words would soon be past it, and writing would cost next to nothing.
The last number is the words a second of an evaluation in one stream, as for all final perplexities: there the LSTM
reads one word after another.

    python -m benchmarks.language_model --device cuda [--json FILE] [--budget SECONDS]
    python -m benchmarks.language_model --quick
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hebbian_softmax.lab.base import environment
from hebbian_softmax.lab.base.files import write_atomic
from hebbian_softmax.lab.base.json_files import to_json
from hebbian_softmax.lab.language.evaluation import word_losses
from hebbian_softmax.lab.language.learner import Learner
from hebbian_softmax.lab.language.model import PRESETS
from hebbian_softmax.lab.language.settings import OPTIMIZERS, Settings
from hebbian_softmax.lab.language.task import Windows, make_windows
from hebbian_softmax.lab.language.zipf import zipf_corpus
from hebbian_softmax.lab.report.tables import Table, as_text

VOCABULARIES = (267_735, 63_951)
HEADS = {"plain": False, "Hebbian": True}
PARTS = ("input and LSTM forward", "output layer", "LSTM backward", "clipping", "optimizer and write")
STEPS_OF_TEXT = 40
RATE = 1e-3
STREAM = 8192
"""The number of words that are read in one stream."""


def finish(device: torch.device) -> None:
    """Wait until the device has done all its work."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def seconds_of(work: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Return the least seconds of several calls."""
    found = []
    for _ in range(repeats + 1):
        finish(device)
        since = time.perf_counter()
        work()
        finish(device)
        found.append(time.perf_counter() - since)
    return min(found[1:])


def machine_rates(device: torch.device, size: int) -> dict[str, float]:
    """Return the FLOP/s of a large product in the precision of training, and the bytes/s of a large copy."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    source = torch.empty(size * size * 8, device=device)
    target = torch.empty_like(source)
    return {
        "flops": 2 * size**3 / seconds_of(lambda: a @ b, device, 10),
        "bytes": 2 * source.numel() * 4 / seconds_of(lambda: target.copy_(source), device, 10),
    }


class Racer:
    """One model in training, step after step."""

    def __init__(self, learner: Learner, windows: Windows, *, loop: bool = False) -> None:
        """Train a learner; with `loop` it launches every kernel of a step instead of replaying a CUDA graph."""
        self.learner, self.windows, self.device = learner, windows, windows.device
        if loop:
            learner.captured = None
        self.steps = 0

    def step(self) -> None:
        """Take one training step."""
        self.learner.step(self.windows.at(self.steps), RATE)
        self.steps += 1

    def block(self, steps: int) -> tuple[float, float]:
        """Return the seconds of a step, and the seconds until the host had launched it."""
        finish(self.device)
        since = time.perf_counter()
        for _ in range(steps):
            self.step()
        asked = time.perf_counter() - since
        finish(self.device)
        return (time.perf_counter() - since) / steps, asked / steps

    def parts(self) -> list[float]:
        """Return the seconds of each of `PARTS` in one step, which is `Learner.take` without a capture."""
        model, optimizer = self.learner.model, self.learner.optimizer
        marks = [_mark(self.device)]
        words = self.windows.at(self.steps)
        self.steps += 1
        optimizer.zero_grad()
        features, _ = model.features(words[:-1])
        marks.append(_mark(self.device))
        with torch.autocast(self.device.type, torch.bfloat16, enabled=model.precision == torch.bfloat16):
            loss = model.head.loss(features, words[1:], remember=model.memorizes)
        marks.append(_mark(self.device))
        loss.backward()
        marks.append(_mark(self.device))
        nn.utils.clip_grad_norm_(model.parameters(), self.learner.clip)
        marks.append(_mark(self.device))
        optimizer.step()
        marks.append(_mark(self.device))
        finish(self.device)
        return [_between(one, other) for one, other in pairwise(marks)]


def _mark(device: torch.device) -> Any:
    """Return the time now, on the device's own clock."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _between(one: Any, other: Any) -> float:
    return other - one if isinstance(one, float) else one.elapsed_time(other) / 1e3


def floors(settings: Settings, vocabulary: int, rates: dict[str, float]) -> list[float]:
    """Return the seconds that each of `PARTS` takes at least; backward has two products for each one of forward."""
    sizes = settings.sizes
    words = sizes.batch * sizes.sequence
    gates, narrow = 4 * sizes.hidden, sizes.embedding != sizes.hidden
    first = words * gates * sizes.embedding + (gates * sizes.hidden * sizes.embedding if narrow else 0)
    later = (sizes.layers - 1) * words * gates * sizes.hidden
    lstm = first + later + sizes.layers * words * gates * sizes.hidden
    lstm += words * sizes.hidden * sizes.embedding if narrow else 0
    output = words * sizes.embedding * vocabulary
    parameters = vocabulary * sizes.embedding + sizes.layers * 2 * gates * sizes.hidden
    products = [2 * lstm, 3 * 2 * output, 2 * 2 * lstm]
    moved = [
        4 * 3 * parameters,
        4 * 7 * parameters + 2 * parameters,
    ]  # Clipping reads twice and writes once; Adam reads 4 and writes 3.
    return [count / rates["flops"] for count in products] + [count / rates["bytes"] for count in moved]


def race(
    settings: Settings, vocabulary: int, device: torch.device, rounds: int, seconds: float, deadline: float, loop: bool
) -> dict[str, Any]:
    """Time blocks of `seconds` of both heads in turn, then the parts of a step."""
    sizes = settings.sizes
    words = sizes.batch * sizes.sequence
    corpus = zipf_corpus(vocabulary, (STEPS_OF_TEXT * sizes.batch + 1) * sizes.sequence)
    windows = make_windows(corpus, settings, device)
    racers = {
        name: Racer(Learner(settings, vocabulary, hebbian=hebbian, device=device), windows, loop=loop)
        for name, hebbian in HEADS.items()
    }
    for racer in racers.values():
        racer.block(5)
    steps = max(3, round(seconds / max(racer.block(3)[0] for racer in racers.values())))
    blocks: dict[str, list[tuple[float, float]]] = {name: [] for name in HEADS}
    for number in range(rounds):
        if number and time.monotonic() > deadline:
            break
        for name in list(racers)[:: 1 if number % 2 == 0 else -1]:  # The first one may find a cooler chip.
            blocks[name].append(racers[name].block(steps))
    for racer in racers.values():
        racer.parts()  # The first call compiles kernels that captured steps do not need.
    taken: dict[str, list[list[float]]] = {name: [] for name in HEADS}
    for number in range(max(3, steps // 4)):
        if number and time.monotonic() > deadline:
            break
        for name, racer in racers.items():
            taken[name].append(racer.parts())
    ratios = [plain[0] / hebbian[0] for plain, hebbian in zip(blocks["plain"], blocks["Hebbian"], strict=True)]
    found: dict[str, Any] = {"vocabulary": vocabulary, "steps_in_a_block": steps, "rounds": len(ratios)}
    found["captured"] = racers["plain"].learner.captured is not None
    for name in HEADS:
        times = [each for each, _ in blocks[name]]
        found[name] = {
            "words_per_second": words / statistics.median(times),
            "all_words_per_second": [words / each for each in times],
            "step_ms": 1e3 * statistics.median(times),
            "host_ms": 1e3 * statistics.median(asked for _, asked in blocks[name]),
            "parts_ms": {
                part: 1e3 * statistics.median(each[index] for each in taken[name]) for index, part in enumerate(PARTS)
            },
        }
    found["hebbian_over_plain"] = statistics.median(ratios)
    text, model = corpus.splits["test"][: STREAM + 1], racers["plain"].learner.model
    found["one_stream_words_per_second"] = (len(text) - 1) / seconds_of(lambda: word_losses(model, text), device, 1)
    if device.type == "cuda":
        found["peak_gigabytes"] = torch.cuda.max_memory_allocated() / 1e9
    return found


def report(found: dict[str, Any], floor: Sequence[float]) -> str:
    """Return two tables: the speed, and the parts of a step."""
    speed = Table(
        f"{found['vocabulary']:,} words in the vocabulary",
        ["softmax", "words/s", "ms a step", "ms to launch it"],
        [
            [name, round(found[name]["words_per_second"]), found[name]["step_ms"], found[name]["host_ms"]]
            for name in HEADS
        ],
    )
    rows = [
        [part, *(found[name]["parts_ms"][part] for name in HEADS), 1e3 * least]
        for part, least in zip(PARTS, floor, strict=True)
    ]
    whole = [sum(found[name]["parts_ms"].values()) for name in HEADS]
    rows.append(["sum", *whole, 1e3 * sum(floor)])
    rows.append(["step as measured", *(found[name]["step_ms"] for name in HEADS), None])
    parts = Table("Where the time goes, ms", ["part", *HEADS, "floor"], rows)
    ratio = f"Hebbian / plain, median over {found['rounds']} rounds: {found['hebbian_over_plain']:.4f} of the speed"
    stream = f"Measured in one stream: {found['one_stream_words_per_second']:,.0f} words/s"
    return "\n\n".join([as_text(speed), ratio, as_text(parts), stream])


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--preset", default="paper", choices=tuple(PRESETS))
    parser.add_argument("--vocabularies", type=int, nargs="+", default=list(VOCABULARIES))
    parser.add_argument("--optimizer", default="one-pass-adam", choices=OPTIMIZERS)
    parser.add_argument("--loop", action="store_true", help="launch every kernel of a step, without CUDA graphs")
    parser.add_argument("--rounds", type=int, default=10, help="blocks of about a second for each head (default 10)")
    parser.add_argument(
        "--budget", type=float, default=300.0, help="seconds for all vocabularies together (default 300)"
    )
    parser.add_argument("--quick", action="store_true", help="toy sizes, to see whether everything runs")
    parser.add_argument("--json", type=Path, help="write all numbers to this file")
    parser.add_argument("--commit", default=None, help="commit to name in the record (default: that of git)")
    arguments = parser.parse_args(argv)
    began = time.monotonic()
    if arguments.quick:
        arguments.preset, arguments.rounds, arguments.vocabularies = "tiny", 2, [300, 100]
    device = torch.device(arguments.device)
    measured = {"preset": arguments.preset, "optimizer": arguments.optimizer, "device": arguments.device}
    settings = Settings(**measured, limit=500, start=0)  # so that every step writes
    rates = machine_rates(device, 256 if arguments.quick else 8192 if device.type == "cuda" else 1024)
    print(f"One large product: {rates['flops'] / 1e12:.3g} TFLOP/s. One large copy: {rates['bytes'] / 1e9:.3g} GB/s.\n")
    results = []
    for number, vocabulary in enumerate(arguments.vocabularies, start=1):
        deadline = began + arguments.budget * number / len(arguments.vocabularies)
        found = race(
            settings, vocabulary, device, arguments.rounds, 0.1 if arguments.quick else 1.0, deadline, arguments.loop
        )
        floor = floors(settings, vocabulary, rates)
        found["floor_ms"] = {part: 1e3 * least for part, least in zip(PARTS, floor, strict=True)}
        results.append(found)
        print(report(found, floor), end="\n\n", flush=True)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
    if arguments.json:
        content = {
            "settings": asdict(settings),
            "sizes": asdict(settings.sizes),
            "rates": rates,
            "commit": arguments.commit or environment.commit(),
            "versions": environment.versions(),
            "hardware": environment.hardware(),
            "cudnn": torch.backends.cudnn.version() if device.type == "cuda" else None,
            "seconds": time.monotonic() - began,
            "results": results,
        }
        write_atomic(arguments.json, (to_json(content, indent=2) + "\n").encode())


if __name__ == "__main__":
    main()
