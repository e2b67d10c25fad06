"""MbPA of two steps on a stretch of the validation text.

Each query needs the softmaxes of its K neighbours anew (docs/memory.md), so a whole text is out of reach for a grid.
Both numbers of steps are compared on the same words, each with its best λ there.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hebbian_softmax.lab.base.progress import Progress
from hebbian_softmax.lab.language.memories.grid import Grids, Point, best_first, mbpa_points
from hebbian_softmax.lab.language.memories.reading import MbpaSettings, layer_of, pieces, usable
from hebbian_softmax.lab.language.memories.store import Store
from hebbian_softmax.lab.language.model import LanguageModel

AT_ONCE = 32  # queries between two looks at the clock


@dataclass(frozen=True)
class TwoSteps:
    """Points of two steps, the best first, all on the predictions `first` … `last` - 1 of the validation text."""

    first: int
    last: int
    points: Sequence[Point]
    one_step: Point  # the best of one step on these words
    candidate: MbpaSettings | None  # the best of two steps, where it is better and there is time for whole texts
    left_out: Sequence[MbpaSettings]  # for want of time
    notes: Sequence[str]

    def as_plain(self) -> dict[str, Any]:
        return {
            "first": self.first,
            "last": self.last,
            "one_step": self.one_step.as_plain(),
            "points": [point.as_plain() for point in self.points],
            "left_out": [asdict(settings) for settings in self.left_out],
        }


def sweep_two_steps(
    model: LanguageModel,
    ids: Tensor,
    grids: Grids,
    parts: Mapping[str, Tensor],
    one_step: Mapping[MbpaSettings, Tensor],
    best: Point,
    *,
    later: int,
    store: Store,
    workspace: int | None,
    label: str,
    quiet: bool,
) -> TwoSteps | None:
    """None where two steps are not wanted. `best` is that of one step, `later` the words still to be measured."""
    assert best.mbpa is not None
    size, words = best.mbpa.size, min(grids.two_step_words, len(ids) - 1)
    if words == 0:
        return None
    first = min(size, len(ids) - 1 - words)
    last = first + words
    wanted = grids.two_steps(size, best.mbpa.rate)
    deadline = time.monotonic() + grids.budget
    memory: tuple[Tensor, Tensor] | None = None
    found: dict[MbpaSettings, Tensor] = {}
    seconds: dict[MbpaSettings, float] = {}
    left_out = []
    total = words * len(wanted)
    with Progress(f"MbPA of two steps, {label}", total=total, unit="words", quiet=quiet) as progress:
        for number, settings in enumerate(wanted):

            def read(settings: MbpaSettings = settings) -> dict[str, Tensor]:
                nonlocal memory
                memory = around(model, ids, max(0, first - size), last) if memory is None else memory
                return read_stretch(model, memory, words, settings, deadline, workspace, progress)

            name = f"valid-two-steps-{number}"
            try:
                kept = store.get(name, {**asdict(settings), "first": first, "last": last}, read)
                found[settings], seconds[settings] = kept["mbpa"], float(kept["seconds"])
            except OutOfTimeError:
                left_out.append(settings)
            progress.update(words * (number + 1))

    def points(of: Mapping[MbpaSettings, Tensor]) -> list[Point]:
        cut = {name: log_prob[first:last] for name, log_prob in parts.items()}
        return best_first(mbpa_points(cut["model"], cut["cache"], of, best.cache, grids))

    rival = points({settings: log_prob[first:last] for settings, log_prob in one_step.items()})[0]
    ranked = points(found)
    notes = [f"Two steps were swept on predictions {first:,} to {last:,} of the validation text."]
    if left_out:
        notes.append(f"{len(left_out)} of {len(wanted)} settings of two steps were left out: the budget was used up.")
    candidate = None
    if ranked and ranked[0].perplexity < rival.perplexity:
        assert ranked[0].mbpa is not None
        candidate = replace(ranked[0].mbpa, share=0.0)
        needed = seconds[candidate] / words * later
        notes.append(f"There two steps reach {ranked[0].perplexity:.4g}, one step {rival.perplexity:.4g}.")
        if needed > deadline - time.monotonic():
            notes.append(f"One step was taken all the same: two on the whole texts would take {needed:,.0f} s more.")
            candidate = None
    elif ranked:
        notes.append(f"There one step reaches {rival.perplexity:.4g}, two steps {ranked[0].perplexity:.4g}.")
    return TwoSteps(first, last, ranked, rival, candidate, left_out, notes)


class OutOfTimeError(Exception):
    """The budget is used up."""


def around(model: LanguageModel, ids: Tensor, low: int, high: int) -> tuple[Tensor, Tensor]:
    """Activations and targets of the predictions `low` … `high` - 1."""
    kept, done = [], 0
    with usable():
        for h, targets in pieces(model, ids[: high + 1]):
            part = slice(max(0, low - done), None)
            kept.append((h[part], targets[part]))
            done += len(targets)
        return torch.cat([h for h, _ in kept]), torch.cat([targets for _, targets in kept])


@torch.no_grad()
def read_stretch(
    model: LanguageModel,
    memory: tuple[Tensor, Tensor],
    words: int,
    settings: MbpaSettings,
    deadline: float,
    workspace: int | None,
    progress: Progress,
) -> dict[str, Tensor]:
    """log p of the last `words` of what `memory` holds, after what is before them, and the seconds it took."""
    h, targets = memory
    mbpa = settings.make()
    weight, bias = layer_of(model)
    found = []
    began = time.monotonic()
    with usable():
        mbpa.observe(h[:-words], targets[:-words])
        for low in range(len(targets) - words, len(targets), AT_ONCE):
            if time.monotonic() > deadline:
                raise OutOfTimeError
            part = slice(low, min(low + AT_ONCE, len(targets)))
            adapted = mbpa.sequence_log_prob(h[part], targets[part], weight, bias, workspace=workspace)
            found.append(adapted.cpu())
            progress.update(progress.done + len(found[-1]))
    spent = torch.tensor(time.monotonic() - began, dtype=torch.float64)
    return {"mbpa": torch.cat(found), "seconds": spent}
