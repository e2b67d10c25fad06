"""The results of memories for the models of a run: tables, sentences, files, and their place on the run's page.

A picture shows which part of the probability of some words came from the model and from each memory.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle
from typing import Any

import torch
from torch import Tensor

from hebbian_softmax.lab.base.console import printable
from hebbian_softmax.lab.base.errors import LabError
from hebbian_softmax.lab.base.files import write_atomic
from hebbian_softmax.lab.base.json_files import write_json
from hebbian_softmax.lab.base.runs import Run
from hebbian_softmax.lab.data.corpus import Corpus
from hebbian_softmax.lab.language.evaluation import score_table, text_of
from hebbian_softmax.lab.language.memories.memory import ALONE, Memories, Parts, mixture
from hebbian_softmax.lab.language.memories.settings import KINDS
from hebbian_softmax.lab.language.memories.sweep import MemoryRows, words_read
from hebbian_softmax.lab.language.names import ONLY, TEXTS, ModelName
from hebbian_softmax.lab.report.figures import STYLES, as_png, require_extras
from hebbian_softmax.lab.report.page import refresh_page
from hebbian_softmax.lab.report.result import Figure, load_result, save_result
from hebbian_softmax.lab.report.tables import Cell, Table

TITLE = "With memories: "  # the beginning of the titles of all tables here
PICTURE = "memory-view.png"  # the end of the names of all pictures here
BEST = 5  # points of each grid that are shown
GRID = (*(f"{kind.symbols} of {kind.named}" for kind in KINDS), "perplexity")
LENGTH = 60  # words that are shown if none are named
MOST = 240  # words that a picture can hold
COLUMN = 20  # words below each other
HATCHES = ("", "///", "...")  # repeat what the colours say
Measured = Mapping[ModelName, MemoryRows]


def words_file(name: ModelName, split: str) -> str:
    """Return the file of the words: `ids`; -log p under the `model` and each memory; `nll`, a line for each of `rows`.

    -log p is infinite for a word that the cache does not hold, and NaN while the cache is empty.
    """
    return f"{name.file_prefix}{split}-memory-words.npz"


def keep_words(run: Run, model: ModelName, found: MemoryRows, corpus: Corpus) -> list[str]:
    """Write the losses of all words; return the names of the files."""
    import numpy as np

    files = []
    for split, parts in found.parts.items():
        arrays: dict[str, Any] = {name: (-log_prob).float().numpy() for name, log_prob in parts.items()}
        arrays["nll"] = np.stack([losses.float().numpy() for losses in found.losses(split)])
        arrays["rows"] = np.array([row.memories.name for row in found.rows])
        arrays["ids"] = words_read(corpus, split, parts).numpy()
        arrays["corpus"] = np.array(corpus.fingerprint)
        files.append(words_file(model, split))
        write_atomic(run.path / files[-1], partial(np.savez_compressed, **arrays))
    return files


def keep_view(
    run: Run, model: ModelName, found: MemoryRows, corpus: Corpus, wanted: tuple[int, int] | None
) -> tuple[str, Figure, bytes]:
    """Write the words of a stretch as JSON; return that file's name, and the picture, which is not written yet.

    The stretch is from the test text, or from the validation text if only that was measured.
    """
    split, memories = list(found.parts)[-1], found.rows[-1].memories
    parts = found.parts[split]
    if wanted is None or wanted[1] > len(parts["model"]):  # the reading was stopped before it
        wanted = choose_stretch(parts, memories)
    stretch = wanted
    words = view(parts, memories, words_read(corpus, split, parts), corpus.words, stretch)
    file = f"{model.file_prefix}memory-view.json"
    content = {"split": split, "first": stretch[0], "last": stretch[1], "words": [each.as_plain() for each in words]}
    write_json(run.path / file, content)
    caption = (
        f"{_of(model)}Which part of each word's probability came from where, predictions {stretch[0]:,} to "
        f"{stretch[1] - 1:,} of the {TEXTS[split]} text; beside it the probability without and with memories."
    )
    return file, Figure(f"{model.file_prefix}{PICTURE}", caption), draw(words, memories)


def _of(name: ModelName) -> str:
    return "" if name == ONLY else f"{name.title.capitalize()}. "


def tabulate(measured: Measured, corpus: Corpus) -> list[Table]:
    """Return for each model and split the perplexities by frequency, and for each model the best of its grids."""
    tables = []
    for name, found in measured.items():
        of = "" if name == ONLY else f"{name.title}, "
        for split in found.parts:
            names, scores = [row.memories.name for row in found.rows], [row.scores[split] for row in found.rows]
            read, whole = len(found.parts[split]["model"]), len(text_of(corpus, split)) - 1
            what = TEXTS[split] + " text" if read == whole else f"first {read:,} words of the {TEXTS[split]} text"
            title = f"{TITLE}{of}perplexity on the {what} of {corpus.name}"
            tables.append(score_table(title, names, scores))
        if found.sweep is not None:
            grids = {kind.grid_title: found.sweep.points.get(kind.key, ()) for kind in KINDS}
            grids |= {refined.title: refined.points for refined in found.sweep.refined.values()}
            for what, points in grids.items():
                rows: list[list[Cell]] = [[*describe(each.memories), each.perplexity] for each in points[:BEST]]
                if rows:
                    tables.append(Table(f"{TITLE}{of}{what} the validation text", GRID, rows))
    return tables


def settings_table(measured: Measured) -> Table:
    """Return for the page what `sentences` says to a terminal."""
    said = {name: sentences({name: found}) for name, found in measured.items()}
    rows: list[list[Cell]] = [
        ["this run" if name == ONLY else name.title, line.removeprefix(_of(name))]
        for name in said
        for line in said[name]
    ]
    return Table(f"{TITLE}settings, and how they were chosen", ["model", "settings"], rows)


def describe(memories: Memories) -> list[str]:
    """Return the settings of the memories, a cell for each kind."""
    used = [memories.of(kind) for kind in KINDS]
    return ["–" if each is None else each.describe() for each in used]


def sentences(measured: Measured) -> list[str]:
    """Say which settings each row has, and how they were chosen."""
    lines = []
    for name, found in measured.items():
        said, known = [], Memories()
        for row in found.rows[1:]:
            memory, before = row.memories.used[-1], row.memories.used[:-1]
            beside = [
                f"{each.named.replace('the', 'a')} of λ {each.share:g}" for each in before if each not in known.used
            ]
            said.append(f"{memory.title} ({memory.symbols}): {memory.describe()}")
            said[-1] += f" beside {' and '.join(beside)}" if beside else ""
            known = row.memories
        lines.append(_of(name) + "; ".join(said) + ".")
        lines += found.notes
        if found.sweep is not None:
            lines.append(f"The mean of ‖h‖² is {found.sweep.squared_norm:.3g}.")
            lines += found.sweep.notes
    return lines


def show_on_page(run: Run, tables: Sequence[Table], pictures: Mapping[Figure, bytes]) -> bool:
    """Put tables and pictures into the run's result and page, in place of earlier ones; return whether there is a page.

    A run that is not finished has no result, so only the pictures are written.
    """
    result = load_result(run)
    if result is None:
        for figure, image in pictures.items():
            write_atomic(run.path / figure.file, image)
        return False
    kept_tables = [table for table in result.tables if not table.title.startswith(TITLE)]
    kept_figures = [figure for figure in result.figures if not figure.file.endswith(PICTURE)]
    shown = replace(result, tables=[*kept_tables, *tables], figures=[*kept_figures, *pictures])
    save_result(run, shown, {figure.file: image for figure, image in pictures.items()})
    return refresh_page(run)


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
            axes.text(-0.03, row, printable(word.word)[:18], ha="right", **text)
            axes.text(1.03, row, f"{word.alone:.2g} → {word.mixture:.2g}", ha="left", **text)
    handles, labels = grid[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(names), fontsize=10)
    return as_png(figure)
