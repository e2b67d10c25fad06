"""How well the heads of `hebbian play` recognise new characters that they were taught with one drawing each.

A lesson teaches 20 characters that the network never saw, one after the other, and then shows 5 other drawings of each:
how many are recognised among the 20, and how many among all characters known? The last column is the price: how many
test drawings of the network's own characters are still recognised. The characters are those of Omniglot's evaluation
set, in alphabets that come in the second half of the list. The learning rate and the number of steps of plain softmax
are chosen on the alphabets of the first half, with networks of other seeds.

    python -m benchmarks.one_drawing [--images glyphs] [--seeds 10] [--lessons 10] [--raw] [--json FILE]
"""

from __future__ import annotations

import argparse
import copy
import datetime
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hebbian_softmax import HebbianSoftmax
from hebbian_softmax.lab.base import environment
from hebbian_softmax.lab.base.files import write_atomic
from hebbian_softmax.lab.base.json_files import to_json
from hebbian_softmax.lab.base.seeds import derive_seed
from hebbian_softmax.lab.base.statistics import mean_and_spread
from hebbian_softmax.lab.images.data import ImageSet
from hebbian_softmax.lab.images.glyphs import make_glyphs
from hebbian_softmax.lab.images.omniglot import load_omniglot
from hebbian_softmax.lab.play.lesson import descend, hebbian_head, with_new_row
from hebbian_softmax.lab.play.network import STEPS, Knowledge, divide, prepare

TAUGHT, LATER = 20, 5  # characters in a lesson, and drawings of each that are shown later
TUNING_SEEDS = (1000, 1001)
LEARNING_RATES = (0.03, 0.1, 0.2, 0.25, 0.3, 0.35, 0.4, 0.5, 1.0, 1.5, 2.0, 3.0, 5.0)
STEP_COUNTS = (1, 3, 10, 30, 100)
METHODS = {
    "plain": "plain softmax",
    "replay": "plain softmax with replay",
    "hebbian": "Hebbian head, one write",
    "imprinting": "imprinting",
    "means": "nearest class mean",
}

Scores = Callable[[Tensor], Tensor]
"""Turns activations (n, features) into scores (n, known classes + taught classes)."""


@dataclass(frozen=True)
class Subject:
    """A trained network, with activations (classes, drawings, features) of unseen and of its own test drawings."""

    knowledge: Knowledge
    unseen: Tensor
    own: Tensor


@dataclass(frozen=True)
class Manner:
    """How plain softmax takes its gradient steps."""

    learning_rate: float
    steps: int
    replay: bool


def embed(knowledge: Knowledge, images: Tensor) -> Tensor:
    parts = [knowledge.embed(part.flatten(0, 1)) for part in images.split(50)]
    return torch.cat(parts).view(*images.shape[:2], -1)


def halves(names: list[str]) -> tuple[list[int], list[int]]:
    """Divide classes by their alphabets: those of the first half in alphabetical order, and those of the second."""
    alphabets = sorted({name.partition("/")[0] for name in names})
    first = set(alphabets[: len(alphabets) // 2])
    chosen = [name.partition("/")[0] in first for name in names]
    return [i for i, each in enumerate(chosen) if each], [i for i, each in enumerate(chosen) if not each]


def lessons(subject: Subject, classes: list[int], seed: int, count: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield lessons: activations (20, features) to teach, and (20, 5, features) to show later."""
    draws = torch.Generator().manual_seed(derive_seed(seed, "lessons"))
    for _ in range(count):
        chosen = torch.tensor(classes)[torch.randperm(len(classes), generator=draws)[:TAUGHT]]
        drawings = torch.randperm(subject.unseen.shape[1], generator=draws)[: 1 + LATER]
        activations = subject.unseen[chosen][:, drawings]
        yield activations[:, 0], activations[:, 1:]


def teach_plain(knowledge: Knowledge, h: Tensor, manner: Manner) -> Scores:
    layer, known = knowledge.head, knowledge.head.out_features
    labels = known + torch.arange(len(h))
    for number in range(len(h)):
        draws = torch.Generator().manual_seed(derive_seed(number + 1, "plain"))
        layer = with_new_row(layer, draws)
        one = slice(number, number + 1)
        taught = (h[: number + 1], labels[: number + 1]) if manner.replay else None
        how = manner.steps, manner.learning_rate, draws
        descend(layer, h[one], labels[one], *how, taught, knowledge.activations)
    return layer


def teach_hebbian(untaught: HebbianSoftmax, h: Tensor) -> Scores:
    head = copy.deepcopy(untaught)
    for number in range(len(h)):
        head.add_classes(1)
        head.memorize(h[number : number + 1], torch.tensor([head.num_classes - 1]))
    return head


def imprint(knowledge: Knowledge, h: Tensor) -> Scores:
    """Weight imprinting: the drawing's activation becomes the row, and the cosine with the rows decides."""
    rows = F.normalize(torch.cat([knowledge.head.weight, h]), dim=1)
    return lambda shown: F.normalize(shown, dim=1) @ rows.T


def class_means(knowledge: Knowledge, h: Tensor) -> Scores:
    """The nearest class mean decides; a new class has one drawing, so its mean is that drawing."""
    means = torch.cat([knowledge.activations.mean(dim=1), h])
    return lambda shown: -torch.cdist(shown, means)


@torch.no_grad()
def outcome(scores: Scores, later: Tensor, own: Tensor) -> tuple[float, float, float]:
    """Return three accuracies: of later drawings among the taught and among all, and of the network's own classes."""
    if isinstance(scores, nn.Module):
        scores.requires_grad_(False)
    known = len(own)
    labels = torch.arange(len(later)).repeat_interleave(later.shape[1])
    found = scores(later.flatten(0, 1))
    among_taught = (found[:, known:].argmax(dim=1) == labels).float().mean()
    among_all = (found.argmax(dim=1) == known + labels).float().mean()
    own_labels = torch.arange(known).repeat_interleave(own.shape[1])
    kept = (scores(own.flatten(0, 1)).argmax(dim=1) == own_labels).float().mean()
    return float(among_taught), float(among_all), float(kept)


def average(found: list[tuple[float, float, float]]) -> list[float]:
    return [sum(values) / len(found) for values in zip(*found, strict=True)]


def tune(subjects: list[Subject], classes: list[int], count: int) -> dict[str, Any]:
    """Try plain softmax in many manners; choose those with the best mean of new and own characters among all."""
    tried: dict[str, list[dict[str, Any]]] = {"plain": [], "replay": []}
    for name, rows in tried.items():
        for rate in LEARNING_RATES:
            for steps in STEP_COUNTS:
                manner = Manner(rate, steps, name == "replay")
                found = [
                    outcome(teach_plain(subject.knowledge, h, manner), later, subject.own)
                    for number, subject in enumerate(subjects)
                    for h, later in lessons(subject, classes, TUNING_SEEDS[number], count)
                ]
                taught, everything, own = average(found)
                rows.append({"learning_rate": rate, "steps": steps, "taught": taught, "all": everything, "own": own})
            print(f"tuning {name}, learning rate {rate:g}", flush=True)
    best = {name: max(rows, key=lambda row: row["all"] + row["own"]) for name, rows in tried.items()}
    return {"tried": tried, "chosen": best}


def measure(subject: Subject, classes: list[int], seed: int, count: int, chosen: dict[str, Any]) -> dict[str, Any]:
    """Return the accuracies of each method, averaged over lessons, and that of the network's classes before."""
    untaught = hebbian_head(subject.knowledge)
    manners = {name: Manner(row["learning_rate"], row["steps"], name == "replay") for name, row in chosen.items()}
    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in METHODS}
    for h, later in lessons(subject, classes, seed, count):
        for name in METHODS:
            if name in manners:
                scores = teach_plain(subject.knowledge, h, manners[name])
            elif name == "hebbian":
                scores = teach_hebbian(untaught, h)
            else:
                scores = (imprint if name == "imprinting" else class_means)(subject.knowledge, h)
            found[name].append(outcome(scores, later, subject.own))
    labels = torch.arange(len(subject.own)).repeat_interleave(subject.own.shape[1])
    before = (subject.knowledge.head(subject.own.flatten(0, 1)).argmax(dim=1) == labels).float().mean()
    return {"own_before": float(before), **{name: average(values) for name, values in found.items()}}


def show(per_seed: list[dict[str, Any]]) -> None:
    """Print the table: mean and standard deviation over seeds."""
    print(f"{'':28} {f'of {LATER}, among {TAUGHT}':>16} {f'of {LATER}, among all':>18} {'own characters':>18}")
    for name, title in METHODS.items():
        cells = []
        for column, scale in enumerate((LATER, LATER, 100)):
            mean, spread = mean_and_spread([scale * each[name][column] for each in per_seed])
            cells.append(f"{mean:.2f} ± {spread:.2f}" if scale == LATER else f"{mean:.1f} ± {spread:.1f} %")
        print(f"{title:28} {cells[0]:>16} {cells[1]:>18} {cells[2]:>18}")
    before, spread = mean_and_spread([100 * each["own_before"] for each in per_seed])
    print(f"own characters before the lesson: {before:.1f} ± {spread:.1f} %")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", choices=["omniglot", "glyphs"], default="omniglot", help="what the network knows")
    parser.add_argument("--seeds", type=int, default=10, help="networks (default 10)")
    parser.add_argument("--lessons", type=int, default=10, help="lessons for each network (default 10)")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"training steps of the networks (default {STEPS})")
    parser.add_argument("--raw", action="store_true", help="networks that do not normalise their activations")
    parser.add_argument("--data-root", help="folder with omniglot/*.zip in it (default: HEBBIAN_DATA)")
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    options = parser.parse_args(arguments)
    omniglot = load_omniglot(options.data_root, quiet=True)
    known = divide(omniglot if options.images == "omniglot" else make_glyphs(quiet=True))[0]
    record = run(known, divide(omniglot)[1], options.seeds, options.lessons, options.steps, not options.raw)
    if options.json:
        given = {name: value for name, value in vars(options).items() if name not in ("json", "data_root")}
        record = {
            "benchmark": "one_drawing",
            "arguments": given,
            "date": datetime.date.today().isoformat(),
            "commit": environment.commit(),
            "versions": environment.versions(),
            "hardware": environment.hardware(),
            **record,
        }
        write_atomic(options.json, (to_json(record, indent=1) + "\n").encode())


def run(
    known: ImageSet, unseen: ImageSet, seeds: int, count: int, steps: int, normalised: bool = True
) -> dict[str, Any]:
    """Tune, then measure each seed, and print the table."""

    def subject(seed: int) -> Subject:
        knowledge = prepare(known, steps, seed, lambda done, total: None, normalised=normalised)
        print(f"the network of seed {seed} is ready", flush=True)
        return Subject(knowledge, embed(knowledge, unseen.images), embed(knowledge, known.test))

    tuning, testing = halves(unseen.class_names)
    tuned = tune([subject(seed) for seed in TUNING_SEEDS], tuning, max(1, count // 3))
    for name, row in tuned["chosen"].items():
        print(f"chosen for {METHODS[name]}: learning rate {row['learning_rate']:g}, {row['steps']} steps")
    per_seed = [measure(subject(seed), testing, seed, count, tuned["chosen"]) for seed in range(seeds)]
    show(per_seed)
    return {"tuning": tuned, "per_seed": per_seed}


if __name__ == "__main__":
    main()
