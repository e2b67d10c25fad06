"""What the options of the loss cost: each beside the plain loss, forward and backward, in turns.

python -m benchmarks.output_layer.options --device cuda --budget 40 --json options.json
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.output_layer import problems, report
from benchmarks.output_layer.contenders import Contender, Gradients, Run, differentiate
from benchmarks.output_layer.measuring import Entry, measure, reason_of
from benchmarks.output_layer.problems import Problem, Spec, draw
from hebbian_softmax import linear_cross_entropy, linear_log_prob

PLAIN = "plain"
SHAPES = {"cuda": [problems.B, problems.D], "cpu": [problems.CPU[2], problems.CPU[3]]}


def with_options(make: Callable[[Problem], dict[str, Any]] = lambda problem: {}) -> Contender:
    """Return the loss with the options that ``make`` returns for a problem; the caller names it."""

    def build(problem: Problem) -> tuple[Run, str]:
        options = make(problem)

        def loss(h: Tensor, weight: Tensor, targets: Tensor, _: Tensor | None) -> Tensor:
            return linear_cross_entropy(h, weight, targets, **options)

        return differentiate(loss, problem), ""

    return Contender("", "ours", build)


def log_prob(entropy: bool) -> Contender:
    """Return the log-probability of each token; with the entropy, a hundredth of it is part of the loss."""

    def build(problem: Problem) -> tuple[Run, str]:
        def loss(h: Tensor, weight: Tensor, targets: Tensor, _: Tensor | None) -> Tensor:
            found = linear_log_prob(h, weight, targets, entropy=entropy)
            value = -found[0].mean()
            return value - 0.01 * found[2].mean() if entropy else value

        return differentiate(loss, problem), ""

    return Contender("", "ours", build)


def frozen(problem: Problem) -> tuple[Run, str]:
    """Build the loss with a weight that needs no gradient: two of three products."""
    weight = problem.weight.detach()

    def run() -> Gradients:
        value = linear_cross_entropy(problem.h, weight, problem.targets)
        (h_gradient,) = torch.autograd.grad(value, problem.h)
        return value.detach(), h_gradient, h_gradient.new_empty(0)

    return run, "no gradient of W"


def log_frequencies(problem: Problem) -> Tensor:
    counts = torch.bincount(problem.targets, minlength=problem.spec.classes)
    return ((counts + 1) / (counts + 1).sum()).log()


def token_weights(problem: Problem) -> Tensor:
    return torch.linspace(0.1, 2.0, problem.spec.n, device=problem.h.device)


BUILDS = {
    PLAIN: with_options(),
    "prior": with_options(lambda p: {"prior": log_frequencies(p)}),
    "token_weight": with_options(lambda p: {"token_weight": token_weights(p)}),
    "temperature 2": with_options(lambda p: {"temperature": 2.0}),
    "softcap 30": with_options(lambda p: {"softcap": 30.0}),
    "z_loss 1e-4": with_options(lambda p: {"z_loss": 1e-4}),
    "label_smoothing 0.1": with_options(lambda p: {"label_smoothing": 0.1}),
    'reduction="none", averaged': Contender(
        "",
        "ours",
        lambda p: (differentiate(lambda h, w, y, _: linear_cross_entropy(h, w, y, reduction="none").mean(), p), ""),
    ),
    "linear_log_prob": log_prob(entropy=False),
    "linear_log_prob, entropy": log_prob(entropy=True),
    "frozen head": Contender("", "ours", frozen),
}
CONTENDERS = [Contender(name, each.kind, each.build) for name, each in BUILDS.items()]


def table(entries: list[Entry]) -> str:
    """Return the table: the times, and their ratios to that of the plain loss."""
    lines = [f"{'':<30} {'ms':>9} {'of plain':>9} {'host ms':>9} {'extra GB':>9}"]
    for spec in dict.fromkeys(entry.spec for entry in entries):
        here = [entry for entry in entries if entry.spec == spec]
        plain = next((entry.ms for entry in here if entry.contender == PLAIN), None)
        lines.append(spec.title())
        for entry in here:
            if entry.ms is None:
                lines.append(f"  {entry.contender:<28} {entry.status}: {entry.reason}")
                continue
            ratio = "-" if plain is None else f"{entry.ms / plain:.2f}x"
            host = "-" if entry.host_ms is None else f"{entry.host_ms:.2f}"
            extra = "-" if entry.extra_bytes is None else f"{entry.extra_bytes / 1e9:.2f}"
            lines.append(f"  {entry.contender:<28} {entry.ms:9.3f} {ratio:>9} {host:>9} {extra:>9}")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.output_layer.options", description=__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--budget", type=float, default=40.0, help="seconds after which the rest is left out")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--commit", help="commit to name in the record (default: that of git)")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to see whether everything runs")
    options = parser.parse_args(arguments)
    if options.device == "cpu":
        torch.set_num_threads(1)  # On a busy machine several threads mostly wait for a core.
    specs: list[Spec] = problems.QUICK[1:3] if options.quick else SHAPES[options.device]
    head = report.header(options.device, options.commit, "python -m benchmarks.output_layer.options")
    print("\n".join(f"{key}: {value}" for key, value in head.items() if value is not None), flush=True)
    started = time.monotonic()

    def why_not() -> str:
        return f"budget of {options.budget:g} s spent" if time.monotonic() - started > options.budget else ""

    entries: list[Entry] = []
    for spec in specs:
        seconds = 0.01 if options.quick else 0.5
        try:
            problem = draw(spec, options.device)
            entries += measure(CONTENDERS, problem, None, options.device, seconds, why_not)
        except Exception as error:
            entries += [Entry(spec, c.name, c.kind, "failed", reason_of(error)) for c in CONTENDERS]
        if options.json:
            records = [report.record_of(entry, entries) for entry in entries]
            options.json.write_text(json.dumps(head | {"entries": records}, indent=1) + "\n")
    print(table(entries))
    print(f"{time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
