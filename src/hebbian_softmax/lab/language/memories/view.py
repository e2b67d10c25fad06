"""The part of each word's probability that came from the model and from each memory, as data and as a picture."""

import io
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle

import torch
from torch import Tensor

from hebbian_softmax.lab.base.errors import LabError
from hebbian_softmax.lab.language.memories.memory import ALONE, Memories, Parts, mixture
from hebbian_softmax.lab.language.memories.settings import KINDS
from hebbian_softmax.lab.report.figures import STYLES, require_extras

LENGTH = 60  # words that are shown if none are named
MOST = 240  # words that a picture can hold
COLUMN = 20  # words below each other
HATCHES = ("", "///", "...")  # repeat what the colours say


@dataclass(frozen=True)
class Word:
    """A word and its probability."""

    position: int
    """The number of the prediction in the text."""
    word: str
    alone: float
    """The model's probability without memories."""
    parts: Mapping[str, float]
    """What the `model`, and each memory under its key, give to the mixture: share times probability."""

    @property
    def mixture(self) -> float:
        """The probability with memories."""
        return sum(self.parts.values())

    def as_plain(self) -> dict[str, object]:
        """Return the word for JSON."""
        plain = {"position": self.position, "word": self.word, "alone": self.alone}
        return {**plain, **self.parts, "mixture": self.mixture}


def choose_stretch(parts: Parts, memories: Memories, length: int = LENGTH) -> tuple[int, int]:
    """Return the stretch of text whose log-probability the first memory raised most."""
    gain = mixture(parts, ALONE) - mixture(parts, Memories(memories.used[:1]))
    length = min(length, len(gain))
    total = torch.cat([gain.new_zeros(1), gain.cumsum(0)])
    first = int((total[length:] - total[:-length]).argmax())
    return first, first + length


def check_stretch(stretch: tuple[int, int], words: int) -> None:
    """Refuse a stretch that is not inside a text of `words` predictions, or is too long to show."""
    first, last = stretch
    if not 0 <= first < last <= words:
        raise LabError(f"--words {first}:{last} is not inside the text: it has {words:,} predictions, counted from 0")
    if last - first > MOST:
        raise LabError(f"--words {first}:{last} are {last - first:,} words: a picture holds at most {MOST}")


def view(
    parts: Parts, memories: Memories, targets: Tensor, vocabulary: Sequence[str], stretch: tuple[int, int]
) -> list[Word]:
    """Return the words of a stretch. While a memory is empty, its share is the model's."""
    check_stretch(stretch, len(targets))
    first, last = stretch
    alone = parts["model"][first:last].double().exp()
    left, given = torch.ones_like(alone), {kind.key: torch.zeros_like(alone) for kind in KINDS}
    for memory in memories.used:
        probability = parts[memory.key][first:last].double().exp()
        present = ~probability.isnan()
        left = left - memory.share * present
        given[memory.key] = torch.where(present, memory.share * probability, 0.0)
    columns = {name: values.tolist() for name, values in {"model": left * alone, **given}.items()}
    return [
        Word(first + at, vocabulary[index], p, {name: values[at] for name, values in columns.items()})
        for at, (index, p) in enumerate(zip(targets[first:last].tolist(), alone.tolist(), strict=True))
    ]


def draw(words: Sequence[Word], memories: Memories) -> bytes:
    """Draw a bar for each word, divided by which part of its probability came from the model and from each memory.

    Beside the bar is the probability without and with memories.
    """
    require_extras()
    from matplotlib.figure import Figure

    names = {"model": "model", **{each.key: each.title for each in memories.used}}
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
        for (name, label), (colour, _, _), hatch in zip(names.items(), cycle(STYLES), cycle(HATCHES), strict=False):
            part = [word.parts[name] / word.mixture if word.mixture else 0.0 for word in shown]
            axes.barh(
                range(len(shown)), part, left=start, height=0.7, color=colour, hatch=hatch, edgecolor="white",
                label=label,
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
