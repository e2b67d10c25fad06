"""Measuring a model with memories that the command line gives: what it will cost, a size for the cache, the texts.

Reading can be stopped at any time: what has been read by then is measured.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from hebbian_softmax.lab.base.progress import format_seconds
from hebbian_softmax.lab.data.corpus import Corpus
from hebbian_softmax.lab.language.evaluation import text_of
from hebbian_softmax.lab.language.memories.cache import CacheSettings
from hebbian_softmax.lab.language.memories.memory import (
    ALONE,
    Memories,
    Stage,
    Stopped,
    layer_of,
    pieces,
    ranked_points,
    read_shown,
    usable,
    usual_piece,
)
from hebbian_softmax.lab.language.memories.settings import Grids
from hebbian_softmax.lab.language.memories.store import Store
from hebbian_softmax.lab.language.memories.sweep import MemoryRows, read_grid, score_rows
from hebbian_softmax.lab.language.model import LanguageModel
from hebbian_softmax.lab.language.names import TEXTS, ModelName

CACHE_SIZES = (500, 1000, 2000, 5000, 10_000)
"""The sizes of the cache to choose from, where none is given."""
FEW, SAMPLE, PATIENCE = 64, 1024, 5.0
"""To find out how long reading takes, a few words are read, then twice as many, then each time four times as many, as
long as these are expected to take no more seconds than the last number."""
T = TypeVar("T")


@dataclass(frozen=True)
class Reading:
    """The texts to read with memories, and how."""

    corpus: Corpus
    splits: Sequence[str]
    max_words: int | None
    """The number of words to predict of each text; None: all."""
    choose_size: bool
    """Whether the size of the cache is chosen on the validation text."""
    quiet: bool

    def text(self, split: str) -> Tensor:
        """Return the part of a text that is read: one word more than are predicted."""
        ids = text_of(self.corpus, split)
        return ids if self.max_words is None else ids[: self.max_words + 1]


def measure_given(model: LanguageModel, memories: Memories, reading: Reading, label: str) -> MemoryRows:
    """Measure a model with the memories given, adding one after the other.

    If the reading is stopped, the rows are of what was read: a note says so, and `stopped` is the signal. Without a
    word read, the signal goes on.
    """
    notes: list[str] = []
    parts: dict[str, Mapping[str, Tensor]] = {}
    stopped: BaseException | None = None
    if reading.choose_size:
        memories, note = with_cache_size(model, memories, reading, label)
        notes.append(note)
    for split in reading.splits:
        title = f"{label} with memories, {TEXTS[split]} text"
        try:
            parts[split] = read_shown(model, reading.text(split), memories, title, reading.quiet, keep=True)
        except Stopped as stop:
            stopped, read, total = stop.signal, len(stop.parts["model"]), len(reading.text(split)) - 1
            notes.append(f"Stopped after {read:,} of {total:,} words of the {TEXTS[split]} text.")
            if read:
                parts[split] = stop.parts
            break
    if stopped is not None and not parts:
        raise stopped
    rows = [Memories(memories.used[:count]) for count in range(len(memories.used) + 1)]
    return MemoryRows(score_rows(reading.corpus, rows, parts), parts, notes=notes, stopped=stopped)


def with_cache_size(
    model: LanguageModel, memories: Memories, reading: Reading, label: str, sizes: Sequence[int] = CACHE_SIZES
) -> tuple[Memories, str]:
    """Return the memories with the size of the cache that is best on the validation text, and a note on the choice."""
    cache = memories.of(CacheSettings)
    assert cache is not None
    grids = Grids(thetas=(cache.theta,), sizes=tuple(sizes), cache_shares=(cache.share,))
    store = Store(None, "", "")
    stage = Stage(model, reading.text("valid"), grids, 0, store, memories.workspace, label, reading.quiet)
    found = read_grid(stage, CacheSettings)
    candidates = CacheSettings.candidates(grids, ALONE)
    log_probs = dict(zip(candidates, found["cache"].flatten(0, -2), strict=True))
    points = ranked_points({"model": found["model"]}, log_probs, ALONE, grids)
    reached = {point.memories.used[0].size: point.perplexity for point in points}
    best = next(iter(reached))
    tried = ", ".join(f"{reached[size]:.4g} with {size:,}" for size in sizes)
    note = f"The cache's n = {best:,} was chosen on the validation text, whose perplexity is {tried}."
    used = tuple(replace(each, size=best) if isinstance(each, CacheSettings) else each for each in memories.used)
    return replace(memories, used=used), note


def cost(models: Mapping[ModelName, LanguageModel], memories: Memories, reading: Reading) -> str:
    """Say how long reading all texts with all models will take."""
    words = sum(len(reading.text(split)) - 1 for split in reading.splits)
    seconds = {name: expected_seconds(model, memories, reading) for name, model in models.items()}
    each = f" ({', '.join(f'{name.title} {format_seconds(long)}' for name, long in seconds.items())})"
    chosen = ", once the size of the cache is chosen," if reading.choose_size else ""
    return (
        f"Reading {words:,} words with memories will take up to about {format_seconds(sum(seconds.values()))}"
        f"{each if len(seconds) > 1 else ''}; --max-words N reads fewer, and Ctrl-C{chosen} measures what was read by "
        "then"
    )


@torch.no_grad()
def expected_seconds(model: LanguageModel, memories: Memories, reading: Reading) -> float:
    """Return how long all texts will take, from the time of some words with memories that are full.

    Many words at once take less time each, because a part of the time is that of each call, however many words it
    reads. So two numbers of words are measured, unless the first one takes too long already.
    """
    ids = reading.text(reading.splits[0])
    by_kind: dict[type, float] = {}
    with usable():
        (h, targets), alone = timed(lambda: next(pieces(model, ids[: SAMPLE + 1], piece=SAMPLE)))
        for each in memories.used:
            many = min(each.size, len(ids) - 1)
            at = torch.arange(many, device=h.device) % len(h)
            # Not the same numbers again and again, whose distances would be 0.
            stored = h[at] + 0.01 * h.float().std() * torch.randn_like(h[at])
            read = each.reader(layer_of(model), memories.workspace, (stored.to(h.dtype), targets[at]))
            points: list[tuple[int, float]] = []
            few = min(len(h), FEW)
            while True:
                points.append((few, timed(partial(_read, read, h[:few], targets[:few]))[1]))
                times = 2 if len(points) == 1 else 4
                if few == len(h) or times * points[-1][1] >= PATIENCE:
                    break
                few = min(len(h), times * few)
            by_kind[type(each)] = seconds_a_word(points, usual_piece(model, memories))
    words = sum(len(reading.text(split)) - 1 for split in reading.splits)
    total = (alone / len(h) + sum(by_kind.values())) * words
    if reading.choose_size:
        total += (alone / len(h) + by_kind[CacheSettings]) * (len(reading.text("valid")) - 1)
    return total


def seconds_a_word(points: Sequence[tuple[int, float]], piece: int) -> float:
    """Return the seconds that each word takes in calls of `piece` words, given numbers of words and their seconds.

    >>> round(4096 * seconds_a_word([(64, 2.0), (256, 3.2)], 4096), 3)  # 1.6 for a call, and 0.00625 for each word
    27.2
    """
    if len(points) == 1:
        return points[0][1] / points[0][0]
    (few, short), (many, long) = points[-2:]
    each = max(0.0, long - short) / (many - few)
    return each + max(0.0, long - each * many) / piece


def timed(function: Callable[[], T]) -> tuple[T, float]:
    """Return what a function returns, and the seconds of its second call: in the first one, kernels are compiled."""
    function()
    began = time.monotonic()
    found = function()
    return found, time.monotonic() - began


def _read(read: Callable[[Tensor, Tensor], Tensor], h: Tensor, targets: Tensor) -> float:
    """Read words with a memory; the number is known only when a device is ready."""
    return float(read(h, targets).sum())
