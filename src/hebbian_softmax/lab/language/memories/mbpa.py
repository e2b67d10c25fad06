"""Memory-based parameter adaptation (MbPA, Sprechmann et al. 2018) as a memory of evaluation time.

MbPA of two steps costs many times as much as one step, because each query needs the softmaxes of its K neighbours anew
(docs/memory.md). A grid of two steps is therefore read on a stretch of the validation text that begins where the memory
is full, and compared with one step on the same words, each with its best shares there. If two steps are better and the
time is enough to measure whole texts with them, the best of them reads the whole validation text, and whichever number
of steps is better there is chosen.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from hebbian_softmax import MbPA
from hebbian_softmax.lab.base.errors import LabError, OutOfTimeError
from hebbian_softmax.lab.base.progress import Progress
from hebbian_softmax.lab.base.settings import integer, number, positive, setting, several
from hebbian_softmax.lab.language.memories.memory import (
    Layer,
    Memories,
    Memory,
    Point,
    Reader,
    Refinement,
    Stage,
    layer_of,
    pieces,
    ranked_points,
    read_shown,
    usable,
)
from hebbian_softmax.lab.language.model import LanguageModel

CPU_AT_ONCE, AT_ONCE = 32, 1024
"""Queries of two steps between two looks at the clock, on a CPU and on other devices. They share much of their work."""


@dataclass(frozen=True)
class MbpaGrid:
    """The grids of MbPA: the paper's, and for α and β, whose grids it does not give, values around its choices."""

    neighbours: Sequence[int] = setting((512, 1024), "K of MbPA, at most n", several(integer(1)))
    rates: Sequence[float] = setting((0.03, 0.1, 0.3, 1.0, 3.0, 10.0), "α of MbPA", several(positive))
    l2: Sequence[float] = setting((0.1, 0.5, 1.0), "β of MbPA, at two steps", several(number(0)))
    mbpa_shares: Sequence[float] = setting((0.02, 0.04, 0.06, 0.08, 0.1), "λ of MbPA", several(number(0, 1)))
    two_step_words: int = setting(500, "validation words to sweep two steps of MbPA on; 0: one step only", integer(0))
    budget: float = setting(600.0, "seconds that two steps may take in all", number(0))

    def counts(self, size: int) -> list[int]:
        """Return the values of K: no more neighbours than the memory holds."""
        return sorted({min(count, size) for count in self.neighbours})

    def two_steps(self, size: int, rate: float) -> list["MbpaSettings"]:
        """Return all K, then α from `rate`, the best at one step, and the next to it in the grid, then all β."""
        ordered = sorted(set(self.rates))
        at = ordered.index(rate)
        near = ordered[max(0, at - 1) : at + 2]
        every = product(self.counts(size), near, self.l2)
        return [MbpaSettings(size, count, 2, each, l2, 0.0) for count, each, l2 in every]


@dataclass(frozen=True)
class MbpaSettings(Memory):
    """MbPA; the defaults are the values that the paper chose."""

    key: ClassVar[str] = "mbpa"
    title: ClassVar[str] = "MbPA"
    named: ClassVar[str] = "MbPA"
    summary: ClassVar[str] = "memory-based parameter adaptation"
    symbols: ClassVar[str] = "K, steps, α, β, λ"
    grid: ClassVar[type] = MbpaGrid
    grid_title: ClassVar[str] = "the best with MbPA of one step on"
    refined: ClassVar[str] = "two_steps"

    size: int = setting(
        10_000, "the words that MbPA's memory holds; with --cache-size, by default as many as the cache", integer(1)
    )
    neighbours: int = setting(
        1024, "K, the stored words that adapt the output layer; by default at most all", integer(1)
    )
    steps: int = setting(1, "gradient steps; two cost many times as much as one", integer(1, 2))
    rate: float = setting(0.3, "α, the size of a step", positive)
    l2: float = setting(0.5, "β, the pull to the model's weights; it has no effect at the first step", number(0))
    share: float = setting(0.04, "λ, MbPA's share in the mixture", number(0, 1))

    @classmethod
    def completed(cls, given: dict[str, Any]) -> dict[str, Any]:
        """Let K be no larger than a memory whose size is given, unless K is given, too."""
        return {"neighbours": min(cls.neighbours, given["size"]), **given} if "size" in given else given

    def make(self) -> MbPA:
        return MbPA(self.size, self.neighbours, self.steps, self.rate, self.l2)

    def reader(self, layer: Layer, workspace: int | None, stored: tuple[Tensor, Tensor] | None = None) -> Reader:
        mbpa = self.make()
        if stored is not None:
            mbpa.observe(*stored)
        return lambda h, targets: mbpa.sequence_log_prob(h, targets, *layer, workspace=workspace)

    @property
    def slow(self) -> bool:
        return self.steps > 1

    def describe(self) -> str:
        pull = f"{self.l2:g}" if self.steps > 1 else "–"  # β has no effect at one step
        return f"{self.neighbours:,}, {self.steps}, {self.rate:g}, {pull}, {self.share:g}"

    def check(self) -> None:
        if self.neighbours > self.size:
            raise LabError(
                f"MbPA cannot find {self.neighbours:,} neighbours in a memory of {self.size:,} words: "
                "give a smaller --mbpa-neighbours or a larger --mbpa-size"
            )

    def ends(self, grids: MbpaGrid) -> list[tuple[str, float, Sequence[float]]]:
        return [
            ("K", self.neighbours, grids.counts(self.size)),
            ("α", self.rate, grids.rates),
            ("MbPA's λ", self.share, grids.mbpa_shares),
        ]

    @classmethod
    def candidates(cls, grids: MbpaGrid, before: Memories) -> list[Self]:
        """Return all K with all α, at one step. The pull β is zero at the first step, so one value stands for all."""
        size = before.used[-1].size
        return [cls(size, count, 1, rate, 0.0, 0.0) for count in grids.counts(size) for rate in grids.rates]

    @classmethod
    def grid_reader(cls, grids: MbpaGrid, before: Memories, layer: Layer, workspace: int | None) -> Reader:
        size = before.used[-1].size
        counts, rates = grids.counts(size), list(grids.rates)
        mbpa = MbPA(size, counts[-1])

        def read(h: Tensor, targets: Tensor) -> Tensor:
            found = mbpa.sequence_log_prob(
                h, targets, *layer, neighbours=counts, learning_rates=rates, workspace=workspace
            )
            return found.flatten(0, 1)

        return read

    @classmethod
    def grid_identity(cls, grids: MbpaGrid, before: Memories) -> dict[str, Any]:
        size = before.used[-1].size
        return {"size": size, "neighbours": grids.counts(size), "rates": list(grids.rates)}

    @classmethod
    def refine(cls, stage: Stage) -> Refinement | None:
        return sweep_two_steps(stage)


@dataclass(frozen=True)
class TwoSteps(Refinement):
    """MbPA of two steps; all points are on the predictions `first` … `last` - 1 of the validation text."""

    title: ClassVar[str] = "the best of two steps, on a stretch of"

    first: int
    last: int
    one_step: Point
    """The best of one step on these words."""
    left_out: Sequence[MbpaSettings]
    """Settings for which the time was not enough."""

    def as_plain(self) -> dict[str, Any]:
        return {
            "first": self.first,
            "last": self.last,
            "one_step": self.one_step.as_plain(),
            **super().as_plain(),
            "left_out": [settings.as_plain() for settings in self.left_out],
        }


def sweep_two_steps(stage: Stage) -> TwoSteps | None:
    """Compare two steps with one on a stretch of the validation text; return None if two steps are not wanted."""
    grids: MbpaGrid = stage.grids
    best = stage.best.memories.of(MbpaSettings)
    assert best is not None
    predictions = len(stage.ids) - 1
    words = min(grids.two_step_words, predictions)
    if words == 0:
        return None
    first = min(best.size, predictions - words)
    last = first + words
    wanted = grids.two_steps(best.size, best.rate)
    deadline = time.monotonic() + grids.budget
    found, seconds, left_out = _read_stretches(stage, wanted, first, last, deadline)

    def ranked(candidates: Mapping[MbpaSettings, Tensor]) -> list[Point]:
        cut = {name: log_prob[first:last] for name, log_prob in stage.parts.items()}
        return ranked_points(cut, candidates, stage.before, grids)

    one_step = ranked({settings: log_prob[first:last] for settings, log_prob in stage.candidates.items()})[0]
    points = ranked(found)
    notes = [f"Two steps were swept on predictions {first:,} to {last:,} of the validation text."]
    if left_out:
        notes.append(f"{len(left_out)} of {len(wanted)} settings of two steps were left out: the budget was used up.")
    chosen, log_prob = None, None
    if points and points[0].perplexity < one_step.perplexity:
        notes.append(f"There two steps reach {points[0].perplexity:.4g}, one step {one_step.perplexity:.4g}.")
        twice = points[0].memories.of(MbpaSettings)
        assert twice is not None
        twice = twice.with_share(0.0)
        needed = seconds[twice] / words * (predictions + stage.later)
        if needed > deadline - time.monotonic():
            notes.append(f"One step was chosen all the same: two on the whole texts would take {needed:,.0f} s more.")
        else:
            label = f"{stage.label} with MbPA of two steps, validation text"
            read = partial(read_shown, stage.model, stage.ids, Memories((twice,), stage.workspace), label, stage.quiet)
            log_prob = stage.store.get("valid-two-steps", twice.as_plain(), read)["mbpa"]
            rival = ranked_points(stage.parts, {twice: log_prob}, stage.before, grids)[0]
            reached = f"{rival.perplexity:.4g}, one step {stage.best.perplexity:.4g}"
            notes.append(f"On the whole validation text two steps reach {reached}.")
            chosen = rival if rival.perplexity < stage.best.perplexity else None
    elif points:
        notes.append(f"There one step reaches {one_step.perplexity:.4g}, two steps {points[0].perplexity:.4g}.")
    return TwoSteps(points, notes, chosen, log_prob, first, last, one_step, left_out)


def _read_stretches(
    stage: Stage, wanted: Sequence[MbpaSettings], first: int, last: int, deadline: float
) -> tuple[dict[MbpaSettings, Tensor], dict[MbpaSettings, float], list[MbpaSettings]]:
    """Read the stretch with all settings; return log p and the seconds of each, and the settings left out."""
    words = last - first
    memory: tuple[Tensor, Tensor] | None = None
    found: dict[MbpaSettings, Tensor] = {}
    seconds: dict[MbpaSettings, float] = {}
    left_out = []
    with stage.progress(f"MbPA of two steps, {stage.label}", words * len(wanted)) as progress:
        for number, settings in enumerate(wanted):

            def read(settings: MbpaSettings = settings) -> dict[str, Tensor]:
                nonlocal memory
                if memory is None:
                    memory = around(stage.model, stage.ids, max(0, first - settings.size), last)
                return read_stretch(stage, memory, words, settings, deadline, progress)

            identity = {**settings.as_plain(), "first": first, "last": last}
            try:
                kept = stage.store.get(f"valid-two-steps-{number}", identity, read)
                found[settings], seconds[settings] = kept["mbpa"], float(kept["seconds"])
            except OutOfTimeError:
                left_out.append(settings)
            progress.update(words * (number + 1))
    return found, seconds, left_out


def around(model: LanguageModel, ids: Tensor, low: int, high: int, piece: int | None = None) -> tuple[Tensor, Tensor]:
    """Return activations and targets of the predictions `low` … `high` - 1. `piece` is as for `pieces`."""
    kept, done = [], 0
    with usable():
        for h, targets in pieces(model, ids[: high + 1], piece=piece):
            part = slice(max(0, low - done), None)
            kept.append((h[part], targets[part]))
            done += len(targets)
        return torch.cat([h for h, _ in kept]), torch.cat([targets for _, targets in kept])


@torch.no_grad()
def read_stretch(
    stage: Stage,
    memory: tuple[Tensor, Tensor],
    words: int,
    settings: MbpaSettings,
    deadline: float,
    progress: Progress,
) -> dict[str, Tensor]:
    """Return log p of the last `words` of `memory`, after storing those before them, and the seconds spent."""
    (h, targets), found, began = memory, [], time.monotonic()
    mbpa, layer = settings.make(), layer_of(stage.model)
    with usable():
        mbpa.observe(h[:-words], targets[:-words])
        at_once = CPU_AT_ONCE if h.device.type == "cpu" else AT_ONCE
        for low in range(len(targets) - words, len(targets), at_once):
            if time.monotonic() > deadline:
                raise OutOfTimeError
            part = slice(low, min(low + at_once, len(targets)))
            adapted = mbpa.sequence_log_prob(h[part], targets[part], *layer, workspace=stage.workspace)
            found.append(adapted.cpu())
            progress.update(progress.done + len(found[-1]))
    spent = torch.tensor(time.monotonic() - began, dtype=torch.float64)
    return {"mbpa": torch.cat(found), "seconds": spent}
