"""Which of model, cache and MbPA gave each word of a stretch of text its probability, as data and as a picture."""

import io
import math
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from hebbian_softmax.lab.base.errors import LabError
from hebbian_softmax.lab.language.memories.reading import Memories, Parts, mixture
from hebbian_softmax.lab.report.figures import STYLES, require_extras

LENGTH = 60  # words, where none are named
MOST = 240  # words that a picture can hold
COLUMN = 20  # words below each other
HATCHES = ("", "///", "...")  # repeat what the colour says
NAMES = {"model": "model", "cache": "cache", "mbpa": "MbPA"}


@dataclass(frozen=True)
class Word:
    """One word: its probability in the mixture is the sum of what each part gave it, its share included."""

    position: int  # among the predictions of the text
    word: str
    alone: float  # the model's probability without memories
    model: float  # (1 − λ_c − λ_m) p
    cache: float  # λ_c p_c
    mbpa: float  # λ_m p_m

    @property
    def mixture(self) -> float:
        return self.model + self.cache + self.mbpa


def choose_stretch(parts: Parts, memories: Memories, length: int = LENGTH) -> tuple[int, int]:
    """The stretch whose log-probability the memories raised most: the cache, where there is one."""
    helper = Memories(memories.cache, None) if memories.cache else memories
    gain = mixture(parts, Memories(None, None)) - mixture(parts, helper)
    length = min(length, len(gain))
    total = torch.cat([gain.new_zeros(1), gain.cumsum(0)])
    first = int((total[length:] - total[:-length]).argmax())
    return first, first + length


def check_stretch(stretch: tuple[int, int], words: int) -> None:
    """Refuse a stretch that is not in a text of so many predictions, or too long to show."""
    first, last = stretch
    if not 0 <= first < last <= words:
        raise LabError(f"--words {first}:{last} is not inside the text: it has {words:,} predictions, counted from 0")
    if last - first > MOST:
        raise LabError(f"--words {first}:{last} are {last - first:,} words: a picture holds at most {MOST}")


def view(
    parts: Parts, memories: Memories, targets: Tensor, vocabulary: Sequence[str], stretch: tuple[int, int]
) -> list[Word]:
    """The words of a stretch. While the cache is empty its share is the model's."""
    check_stretch(stretch, len(targets))
    first, last = stretch
    alone = parts["model"][first:last].double().exp()
    left, given = torch.ones_like(alone), {}
    for name, settings in (("cache", memories.cache), ("mbpa", memories.mbpa)):
        given[name] = torch.zeros_like(alone)
        if settings is not None:
            probability = parts[name][first:last].double().exp()
            present = ~probability.isnan()
            left = left - settings.share * present
            given[name] = torch.where(present, settings.share * probability, 0.0)
    numbers = zip(
        targets[first:last].tolist(),
        alone.tolist(),
        (left * alone).tolist(),
        given["cache"].tolist(),
        given["mbpa"].tolist(),
        strict=True,
    )
    return [Word(first + at, vocabulary[index], *rest) for at, (index, *rest) in enumerate(numbers)]


def as_plain(words: Sequence[Word]) -> list[dict[str, object]]:
    return [{**asdict(word), "mixture": word.mixture} for word in words]


def draw(words: Sequence[Word], memories: Memories) -> bytes:
    """A bar for each word, its whole the word's probability: what part of it the model, the cache and MbPA gave.

    Beside it the probability without and with memories.
    """
    require_extras()
    from matplotlib.figure import Figure

    names = ["model", *(name for name, used in (("cache", memories.cache), ("mbpa", memories.mbpa)) if used)]
    columns = math.ceil(len(words) / COLUMN)
    across = min(columns, 3)
    down = math.ceil(columns / across)
    figure = Figure(figsize=(1 + 4.2 * across, 0.8 + 5.0 * down), layout="constrained")
    grid = figure.subplots(down, across, squeeze=False).flatten()
    for number, axes in enumerate(grid):
        shown = words[number * COLUMN : (number + 1) * COLUMN]
        axes.set_axis_off()
        axes.set_xlim(-0.75, 1.55)
        axes.set_ylim(COLUMN - 0.4, -0.6)
        start = [0.0] * len(shown)
        for name, (colour, _, _), hatch in zip(names, STYLES, HATCHES, strict=False):
            part = [getattr(word, name) / word.mixture if word.mixture else 0.0 for word in shown]
            axes.barh(
                range(len(shown)), part, left=start, height=0.7, color=colour, hatch=hatch, edgecolor="white",
                label=NAMES[name],
            )  # fmt: skip
            start = [before + more for before, more in zip(start, part, strict=True)]
        for row, word in enumerate(shown):
            text = {"va": "center", "fontsize": 9, "parse_math": False}
            axes.text(-0.03, row, word.word[:18], ha="right", **text)
            axes.text(1.03, row, f"{word.alone:.2g} → {word.mixture:.2g}", ha="left", **text)
    handles, labels = grid[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(names), fontsize=10)
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")  # a box is drawn in its place
        figure.savefig(buffer, format="png", dpi=150)
    return buffer.getvalue()
