"""How closely Hebbian rows track the infinite cache of section 3.2 on a frozen network that reads real text.

The paper's argument: a row that is written at constant rate λ is the geometric average Σ_j λ(1−λ)^{j−1} h_{I_w(j)} of
its class's activations, so the softmax over such rows stands in for the infinite cache p̃_c, which stores them all. Here
the model of a run of `hebbian train` is frozen and reads a text word by word. The rule writes rows that start at 0 (or
at the trained rows) in several ways, without gradients, and these rows are compared with the averages. Then both are
frozen and predict the text that follows.

    python -m benchmarks.tracking RUN [--words 20000] [--next 2000] [--rate 0.1] [--json FILE]
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hebbian_softmax import ConstantRate, HebbianSoftmax
from hebbian_softmax.lab.base import environment
from hebbian_softmax.lab.base.files import write_atomic
from hebbian_softmax.lab.base.json_files import to_json
from hebbian_softmax.lab.base.progress import Progress
from hebbian_softmax.lab.base.runs import open_run
from hebbian_softmax.lab.language.evaluation import stream
from hebbian_softmax.lab.language.trained import load_trained
from hebbian_softmax.lab.report.tables import Cell, Table, as_text

COUNTS = ((1, 1), (2, 4), (5, 19), (20, 99), (100, None))
"""The first and the last number of occurrences of each group of classes."""


class GeometricCache:
    r"""The infinite cache of section 3.2, whose entries fade with each later occurrence of their class.

    With :math:`I_w(j)` the j-th most recent occurrence of class w, of :math:`N_w` in all,

    .. math::
        \tilde p_c(w \mid h) \propto \sum_{j=1}^{N_w} e^{\lambda (1 - \lambda)^{j-1} h^\top h_{I_w(j)}}

    and :meth:`rows` are :math:`\sum_j \lambda (1 - \lambda)^{j-1} h_{I_w(j)}`, which the rule writes at constant rate λ
    into a row that starts at 0 and receives no gradient.

    Args:
        rate: λ.
        h: activations (T, d), oldest first.
        targets: their classes (T,).
        num_classes: V.
    """

    def __init__(self, rate: float, h: Tensor, targets: Tensor, num_classes: int) -> None:
        self.h, self.targets, self.num_classes = h, targets, num_classes
        newest = targets.flip(0).argsort(stable=True)  # Newest first within each class.
        by_class = targets.flip(0)[newest]
        later = torch.empty_like(targets)
        later[newest] = torch.arange(targets.numel()) - torch.searchsorted(by_class, by_class)
        self.weights = (rate * (1 - rate) ** later.flip(0).double()).to(h.dtype)
        """λ(1−λ)^{j−1} of each activation."""

    def counts(self) -> Tensor:
        """Return N_w of each class."""
        return torch.bincount(self.targets, minlength=self.num_classes)

    def rows(self) -> Tensor:
        """Return Σ_j λ(1−λ)^{j−1} h_{I_w(j)} of each class, (V, d)."""
        zeros = self.h.new_zeros(self.num_classes, self.h.shape[1])
        return zeros.index_add_(0, self.targets, self.h * self.weights.unsqueeze(1))

    def probabilities(self, h: Tensor) -> Tensor:
        """Return p̃_c(· | h) of activations (..., d), (..., V)."""
        attention = (h @ self.h.T * self.weights).softmax(-1)
        return h.new_zeros(*h.shape[:-1], self.num_classes).index_add_(-1, self.targets, attention)


@dataclass(frozen=True)
class Tracking:
    """How close rows are to the geometric averages of their classes, for classes seen ``count`` times."""

    count: int
    classes: int
    """The number of these classes."""
    cosine: float
    """The mean cosine of row and average."""
    error: float
    """The mean of ‖row − average‖ / ‖average‖."""


def track(rows: Tensor, cache: GeometricCache) -> list[Tracking]:
    """Compare rows (V, d) with the cache's averages, for each number of occurrences of a class.

    At constant rate, from rows of 0 and with one activation in each write, both are equal. Otherwise they differ by an
    annealed rate, a limit, rows that start elsewhere (their part is (1−λ)^{N_w}), means over a batch, or gradients.
    """
    average, counts = cache.rows(), cache.counts()
    cosine = torch.cosine_similarity(rows, average, dim=1)
    error = torch.linalg.vector_norm(rows - average, dim=1) / torch.linalg.vector_norm(average, dim=1)
    found = []
    for count in counts[counts > 0].unique().tolist():
        of = counts == count
        found.append(Tracking(count, int(of.sum()), float(cosine[of].mean()), float(error[of].mean())))
    return found


def written(weight: Tensor, h: Tensor, targets: Tensor, batch: int, gamma: float, constant: bool) -> Tensor:
    """Return rows into which the literal rule (scale 1, not centred) has written activations, `batch` at a time."""
    head = HebbianSoftmax(
        weight.shape[1],
        weight.shape[0],
        gamma=gamma,
        limit=10**9,
        write="literal",
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
    """Return means over classes with similar numbers of occurrences."""
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
    """Compare softmax(h Rᵀ) over the classes seen with the cache's distributions, on the text that follows."""
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
    """Write `words` words in every way, and compare the rows and their predictions of the `after` words that follow."""
    trained = load_trained(open_run(run), device=torch.device("cpu"))
    model, corpus = next(iter(trained.models.values())), trained.corpus
    ids = corpus.splits["valid"][: words + after + 1]
    pieces = [(h[:, 0], targets[:, 0]) for h, targets in stream(model, ids)]
    h, targets = torch.cat([each for each, _ in pieces]).float(), torch.cat([each for _, each in pieces])
    (h, later), (targets, later_targets) = h.split([words, len(h) - words]), targets.split([words, len(h) - words])
    vocabulary = len(corpus.words)
    cache = GeometricCache(rate, h, targets, vocabulary)
    seen = cache.counts() > 0
    infinite = cache.probabilities(later)
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
    """Return two tables: the rows, and the distributions."""
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
    parser.add_argument("run", type=Path, help="the run folder of a hebbian train on a corpus")
    parser.add_argument("--words", type=int, default=20_000, help="how many words of the validation text are written")
    parser.add_argument("--next", type=int, default=2_000, help="how many words after them are predicted")
    parser.add_argument("--rate", type=float, default=0.1, help="λ, and γ of the paper's rate")
    parser.add_argument("--json", type=Path, help="write all numbers to this file")
    parser.add_argument("--commit", help="commit to name in the record (default: that of git)")
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
