"""The settings of memories, chosen on the validation text alone (appendix A.1), and the rows of a table with them.

The kinds of memories are chosen one after the other. All candidates of a kind read the text in one pass. From their
log-probabilities, all their shares are mixed with all shares of the memories chosen before, whose other settings stay.
A kind may then refine the choice by settings that one pass cannot read, such as MbPA of two steps.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hebbian_softmax import linear_log_prob
from hebbian_softmax.lab.data.corpus import Corpus
from hebbian_softmax.lab.language.evaluation import Score, check_finite, score, text_of
from hebbian_softmax.lab.language.memories.memory import (
    ALONE,
    Memories,
    Memory,
    Point,
    Refinement,
    Stage,
    layer_of,
    mixture,
    pieces,
    ranked_points,
    read_shown,
    usable,
)
from hebbian_softmax.lab.language.memories.settings import KINDS, Grids, at_edges
from hebbian_softmax.lab.language.memories.store import Store, digest
from hebbian_softmax.lab.language.model import LanguageModel
from hebbian_softmax.lab.language.names import TEXTS


@dataclass(frozen=True)
class Sweep:
    """Every point of the grids, and what was chosen from them."""

    points: Mapping[str, Sequence[Point]]
    """By the key of the kind, the points with it and the memories before it, the best first."""
    refined: Mapping[str, Refinement]
    """By the key of the kind, what its `refine` found."""
    chosen: Point
    """The memories of the last row."""
    squared_norm: float
    """The mean of ‖h‖², which the parameters of memories multiply."""
    notes: Sequence[str]

    def as_plain(self) -> dict[str, Any]:
        """Return the content of memory-sweep.json."""
        points = {kind.key: [point.as_plain() for point in self.points.get(kind.key, ())] for kind in KINDS}
        refined = {kind.refined: self.refined.get(kind.key) for kind in KINDS if kind.refined}
        return {
            "chosen": {KINDS[0].key: self.points[KINDS[0].key][0].as_plain(), "last": self.chosen.as_plain()},
            "mean_squared_norm_of_activations": self.squared_norm,
            "notes": list(self.notes),
            **points,
            **{name: None if found is None else found.as_plain() for name, found in refined.items()},
        }


@dataclass(frozen=True)
class Row:
    """A mixture and its scores, by split."""

    memories: Memories
    scores: Mapping[str, Score]

    def as_plain(self) -> dict[str, Any]:
        """Return the row for JSON; a kind that is not used is null."""
        used = {kind.key: self.memories.of(kind) for kind in KINDS}
        return {
            "name": self.memories.name,
            **{key: None if each is None else each.as_plain() for key, each in used.items()},
            "scores": {split: asdict(each) for split, each in self.scores.items()},
        }


@dataclass(frozen=True)
class MemoryRows:
    """The rows of a table, each with one memory more than the row before."""

    rows: Sequence[Row]
    parts: Mapping[str, Mapping[str, Tensor]]
    """The log-probabilities that the rows come from, by split, then by `model` or the key of a memory."""
    sweep: Sweep | None = None
    notes: Sequence[str] = ()
    """Sentences on how memories were chosen that no sweep has chosen, and on words that were not read."""
    stopped: BaseException | None = None
    """The signal that ended the reading, if it was ended."""

    def losses(self, split: str) -> list[Tensor]:
        """Return -log p of every word, row by row."""
        return [mixture(self.parts[split], row.memories) for row in self.rows]


def memory_rows(
    model: LanguageModel,
    corpus: Corpus,
    *,
    grids: Grids | None = None,
    kinds: Sequence[type[Memory]] = KINDS,
    splits: Sequence[str] = ("valid", "test"),
    folder: Path | None = None,
    prefix: str = "",
    workspace: int | None = None,
    label: str = "the model",
    quiet: bool = False,
) -> MemoryRows:
    """Choose settings on the validation text, then measure each of `splits` once with what was chosen.

    Args:
        grids: the grids to sweep over; None: the paper's.
        kinds: the kinds of memories to choose, the first of `KINDS`; there is a row for each.
        folder: where results are kept as they are found; a repeated call takes them from there.
        prefix: the beginning of their file names, for models that share a folder.
        workspace: the bytes that each memory may work in; None: the library's default.
        label: what progress calls the model.
    """
    grids = Grids() if grids is None else grids
    store = Store(folder, prefix, f"{digest(model)} {corpus.fingerprint}" if folder else "")
    texts = {split: text_of(corpus, split) for split in dict.fromkeys(("valid", *splits))}
    later = sum(len(texts[split]) - 1 for split in splits if split != "valid")
    stage = Stage(model, texts["valid"], grids, later, store, workspace, label, quiet)
    found = _sweep(stage, kinds)
    chosen = replace(found.chosen.memories, workspace=workspace)
    before = [replace(found.points[kind.key][0].memories, workspace=workspace) for kind in kinds[:-1]]
    parts = {}
    used = {kind.key: chosen.of(kind) for kind in KINDS}
    identity = {key: None if each is None else each.identity() for key, each in used.items()}
    for split in splits:
        if split == "valid":
            parts[split] = stage.parts
            continue
        title = f"{label} with memories, {TEXTS[split]} text"
        read = partial(read_shown, model, texts[split], chosen, title, quiet)
        parts[split] = store.get(f"{split}-parts", {"split": split, **identity}, read)
    return MemoryRows(score_rows(corpus, [ALONE, *before, chosen], parts), parts, found)


def _sweep(stage: Stage, kinds: Sequence[type[Memory]]) -> Sweep:
    """Choose settings of each kind, and put the words' log-probabilities under what was chosen into `stage.parts`."""
    points: dict[str, list[Point]] = {}
    refined: dict[str, Refinement] = {}
    notes: list[str] = []
    norm = 0.0
    for kind in kinds:
        identity = kind.grid_identity(stage.grids, stage.before)
        kept = stage.store.get(f"valid-{kind.key}-grid", identity, partial(read_grid, stage, kind))
        if not stage.before.used:
            stage.parts["model"], norm = kept["model"], float(kept["squared_norm"])
        log_probs = kept[kind.key].flatten(0, -2)
        stage.candidates = dict(zip(kind.candidates(stage.grids, stage.before), log_probs, strict=True))
        points[kind.key] = ranked_points(stage.parts, stage.candidates, stage.before, stage.grids)
        chosen = stage.best = points[kind.key][0]
        log_prob = stage.candidates[chosen.memories.used[-1].with_share(0.0)]
        if (found := kind.refine(stage)) is not None:
            refined[kind.key] = found
            notes += found.notes
            if found.chosen is not None and found.log_prob is not None:
                chosen, log_prob = found.chosen, found.log_prob
        stage.parts[kind.key], stage.before = log_prob, chosen.memories
    return Sweep(points, refined, chosen, norm, [*notes, *at_edges(chosen, stage.grids)])


@torch.no_grad()
def read_grid(stage: Stage, kind: type[Memory]) -> dict[str, Tensor]:
    """Read the validation text with all candidates of a kind: log p (..., T) under its key.

    The pass of the first kind also gives log p of the `model` (T,), and the mean of ‖h‖².
    """
    layer, first = layer_of(stage.model), not stage.before.used
    read = kind.grid_reader(stage.grids, stage.before, layer, stage.workspace)
    base, every, norms = [], [], []
    with usable(), stage.progress(f"{kind.title} grid of {stage.label}", len(stage.ids) - 1) as progress:
        for h, targets in pieces(stage.model, stage.ids):
            if first:
                base.append(linear_log_prob(h, layer[0], targets, linear_bias=layer[1])[0].cpu())
                norms.append(h.float().square().sum(1).cpu())
            every.append(read(h, targets).cpu())
            progress.update(progress.done + len(targets))
        found = {kind.key: torch.cat(every, -1)}
        if first:
            found |= {"model": torch.cat(base), "squared_norm": torch.cat(norms).double().mean()}
        return found


def words_read(corpus: Corpus, split: str, parts: Mapping[str, Tensor]) -> Tensor:
    """Return the words of a text that were predicted: all, or those before somebody stopped."""
    return text_of(corpus, split)[1 : 1 + len(parts["model"])]


def score_rows(corpus: Corpus, rows: Sequence[Memories], parts: Mapping[str, Mapping[str, Tensor]]) -> list[Row]:
    """Return the perplexities of each mixture on each split, in all and by frequency.

    A perplexity that is not finite raises a `DivergedError`.
    """
    targets = {split: words_read(corpus, split, part) for split, part in parts.items()}
    found = [
        Row(each, {name: score(mixture(part, each), targets[name], corpus.counts) for name, part in parts.items()})
        for each in rows
    ]
    for row in found:
        for split, each in row.scores.items():
            check_finite(each, f"the model {row.memories.name} on the {TEXTS[split]} text")
    return found
