"""How closely Hebbian rows track the infinite cache of section 3.2 on a frozen network that reads real text.

The paper's argument: written at constant rate λ, a row is the geometric average Σ_j λ(1−λ)^{j−1} h_{I_w(j)} of its
class's activations, so that the softmax over such rows stands in for the infinite cache p̃_c, which stores them all.
Here the model of a run of `hebbian train` is frozen and reads a text word by word. Rows that start at 0 (or at the
trained ones) are written by the rule in several ways, without gradients, and compared with the averages; then both,
frozen too, predict the text that follows.

    python -m benchmarks.tracking RUN [--words 20000] [--next 2000] [--rate 0.1] [--json FILE]
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hebbian_softmax import ConstantRate, HebbianSoftmax
from hebbian_softmax.lab.base import environment
from hebbian_softmax.lab.base.files import write_atomic
from hebbian_softmax.lab.base.progress import Progress
from hebbian_softmax.lab.base.runs import open_run, to_json
from hebbian_softmax.lab.language.evaluation import stream
from hebbian_softmax.lab.language.trained import load_trained
from hebbian_softmax.lab.report.tables import Cell, Table, as_text
from hebbian_softmax.memory import GeometricCache, Tracking, track

COUNTS = ((1, 1), (2, 4), (5, 19), (20, 99), (100, None))
"""Occurrences by which classes are put together: from, and to."""


def written(weight: Tensor, h: Tensor, targets: Tensor, batch: int, gamma: float, constant: bool) -> Tensor:
    """Rows after the rule has written the activations, `batch` of them at a time, literally (scale 1, not centred)."""
    head = HebbianSoftmax(
        weight.shape[1],
        weight.shape[0],
        gamma=gamma,
        limit=10**9,
        scale=1.0,
        center=False,
        rate=ConstantRate(gamma) if constant else None,
    )
    with torch.no_grad():
        head.weight.copy_(weight)
    with Progress(f"writing, {batch} at a time", total=len(targets), unit="words") as progress:
        for first in range(0, len(targets), batch):
            head.memorize(h[first : first + batch], targets[first : first + batch])
            progress.update(min(first + batch, len(targets)))
    return head.weight.detach()


def together(found: Sequence[Tracking]) -> dict[str, dict[str, float]]:
    """Means over classes with about as many occurrences."""
    merged = {}
    for low, high in COUNTS:
        some = [each for each in found if each.count >= low and (high is None or each.count <= high)]
        classes = sum(each.classes for each in some)
        if classes:
            label = f"{low}" if low == high else f"{low}–{high}" if high else f"{low}+"
            merged[label] = {
                "classes": classes,
                "cosine": sum(each.cosine * each.classes for each in some) / classes,
                "error": sum(each.error * each.classes for each in some) / classes,
            }
    return merged


def agreement(rows: Tensor, h: Tensor, targets: Tensor, cache: Tensor, seen: Tensor) -> dict[str, float]:
    """Of softmax(h Rᵀ) over the classes seen with the cache's distributions, on the text that follows."""
    logits = (h @ rows.T).masked_fill(~seen, -torch.inf)
    log_prob = logits.log_softmax(-1)
    known = seen[targets]
    model = log_prob.gather(1, targets[:, None])[known, 0]
    infinite = cache.log().gather(1, targets[:, None])[known, 0]
    kl = torch.where(cache > 0, cache * (cache.log() - log_prob), 0).sum(1)
    centred = (model - model.mean()) @ (infinite - infinite.mean())
    return {
        "kl_nats": float(kl.mean()),
        "same_likeliest": float((log_prob.argmax(1) == cache.argmax(1)).double().mean()),
        "correlation_of_target_log_prob": float(centred / (model.std() * infinite.std() * (len(model) - 1))),
        "perplexity": float((-model.mean()).exp()),
        "cache_perplexity": float((-infinite.mean()).exp()),
        "known_targets": int(known.sum()),
    }


def measure(run: Path, words: int, after: int, rate: float) -> dict[str, Any]:
    trained = load_trained(open_run(run), device=torch.device("cpu"))
    model, corpus = next(iter(trained.models.values())), trained.corpus
    ids = corpus.splits["valid"][: words + after + 1]
    pieces = [(h[:, 0], targets[:, 0]) for h, targets in stream(model, ids)]
    h, targets = torch.cat([each for each, _ in pieces]).float(), torch.cat([each for _, each in pieces])
    (h, later), (targets, later_targets) = h.split([words, len(h) - words]), targets.split([words, len(h) - words])
    cache = GeometricCache(rate)
    cache.observe(h, targets)
    vocabulary = len(corpus.words)
    seen = cache.counts(vocabulary) > 0
    infinite = cache.probabilities(later, vocabulary)
    zeros = torch.zeros(vocabulary, h.shape[1])
    ways = {
        "constant rate, one at a time": written(zeros, h, targets, 1, rate, constant=True),
        "constant rate, 64 at a time": written(zeros, h, targets, 64, rate, constant=True),
        "the paper's rate max(1/c, λ), one at a time": written(zeros, h, targets, 1, rate, constant=False),
        "the paper's rate, 64 at a time": written(zeros, h, targets, 64, rate, constant=False),
        "constant rate from trained rows": written(model.head.weight.detach(), h, targets, 1, rate, constant=True),
    }
    results = {
        name: {
            "tracking": together(track(rows, cache)),
            "all": [asdict(each) for each in track(rows, cache)],
            "following": agreement(rows, later, later_targets, infinite, seen),
        }
        for name, rows in ways.items()
    }
    return {
        "run": {"command": trained.run.command, "settings": trained.run.settings, "step": trained.step},
        "corpus": corpus.name,
        "rate": rate,
        "words": len(targets),
        "following": len(later_targets),
        "classes_seen": int(seen.sum()),
        "mean_squared_norm": float(h.square().sum(1).mean()),
        "results": results,
    }


def report(found: dict[str, Any]) -> str:
    """Two tables: the rows, and the distributions."""
    results = found["results"]
    groups = next(iter(results.values()))["tracking"]
    rows: list[list[Cell]] = [
        [name, *(f"{of['cosine']:.3f}, {of['error']:.2f}" for of in each["tracking"].values())]
        for name, each in results.items()
    ]
    columns = [f"seen {group}" for group in groups]
    classes = ", ".join(f"{group}: {of['classes']:,}" for group, of in groups.items())
    title = (
        f"Rows beside geometric averages (λ = {found['rate']:g}): mean cosine, mean relative error, by occurrences "
        f"({classes} classes)"
    )
    first = Table(title, ["written", *columns], rows)
    likely: list[list[Cell]] = [
        [
            name,
            f"{each['following']['same_likeliest']:.1%}",
            f"{each['following']['correlation_of_target_log_prob']:.3f}",
            f"{each['following']['kl_nats']:.3f}",
            f"{each['following']['perplexity']:.1f}",
        ]
        for name, each in results.items()
    ]
    other = next(iter(results.values()))["following"]
    title = (
        f"Softmax over such rows beside the infinite cache on the {found['following']:,} words that follow; perplexity "
        f"of the {other['known_targets']:,} seen before, which the cache gives {other['cache_perplexity']:.1f}"
    )
    second = Table(title, ["written", "same likeliest word", "correlation", "KL, nats", "perplexity"], likely)
    return "\n\n".join([as_text(first), as_text(second)])


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="a run folder of hebbian train on a corpus")
    parser.add_argument("--words", type=int, default=20_000, help="of the validation text that are written")
    parser.add_argument("--next", type=int, default=2_000, help="words after them that are predicted")
    parser.add_argument("--rate", type=float, default=0.1, help="λ, and γ of the paper's rate")
    parser.add_argument("--json", type=Path, help="where to write all numbers")
    parser.add_argument("--commit", help="to name in the record (default: asked of git)")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    found = measure(options.run, options.words, options.next, options.rate)
    print(report(found))
    if options.json:
        content = {
            "commit": options.commit or environment.commit(),
            "versions": environment.versions(),
            "hardware": environment.hardware(),
            **found,
        }
        write_atomic(options.json, (to_json(content, indent=1) + "\n").encode())


if __name__ == "__main__":
    main()
