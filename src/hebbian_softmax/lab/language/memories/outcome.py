"""What memories did for the models of a run: tables, files, and their place on the run's page."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from hebbian_softmax.lab.base.files import write_atomic
from hebbian_softmax.lab.base.runs import Run, to_json
from hebbian_softmax.lab.data.buckets import BUCKETS
from hebbian_softmax.lab.data.corpus import Corpus
from hebbian_softmax.lab.language.evaluation import text_of
from hebbian_softmax.lab.language.memories.grid import Point
from hebbian_softmax.lab.language.memories.reading import CacheSettings, MbpaSettings, Memories
from hebbian_softmax.lab.language.memories.rows import MemoryRows
from hebbian_softmax.lab.language.memories.view import as_plain, choose_stretch, draw, view
from hebbian_softmax.lab.language.names import ONLY, TEXTS, ModelName
from hebbian_softmax.lab.report.page import refresh_page
from hebbian_softmax.lab.report.result import Figure, load_result, save_result
from hebbian_softmax.lab.report.tables import Cell, Table

TITLE = "With memories: "  # how all tables here begin
BEST = 5  # points of each grid that are shown
Measured = Mapping[ModelName, MemoryRows]


def words_file(name: ModelName, split: str) -> str:
    """What was thought of every word: `ids`; -log p under `model`, `cache` and `mbpa`; and `nll`, a line for each of
    `rows`, that of the mixture. Infinite where a word is not in the cache, NaN while that is empty."""
    return f"{name.file_prefix}{split}-memory-words.npz"


def keep_words(run: Run, model: ModelName, found: MemoryRows, corpus: Corpus) -> list[str]:
    """Write the words' files; the value is their names."""
    import numpy as np

    files = []
    for split, parts in found.parts.items():
        arrays: dict[str, Any] = {name: (-log_prob).float().numpy() for name, log_prob in parts.items()}
        arrays["nll"] = np.stack([losses.float().numpy() for losses in found.losses(split)])
        arrays["rows"] = np.array([row.memories.name for row in found.rows])
        arrays["ids"] = text_of(corpus, split)[1:].numpy()
        arrays["corpus"] = np.array(corpus.fingerprint)
        files.append(words_file(model, split))
        write_atomic(run.path / files[-1], partial(np.savez_compressed, **arrays))
    return files


def keep_view(
    run: Run, model: ModelName, found: MemoryRows, corpus: Corpus, wanted: tuple[int, int] | None
) -> tuple[str, Figure, bytes]:
    """Write the words of a stretch as JSON; the value is that file, and the picture, which is not written yet.

    It is of the test text, or of the validation text where only that was measured.
    """
    split, memories = list(found.parts)[-1], found.rows[-1].memories
    parts = found.parts[split]
    stretch = choose_stretch(parts, memories) if wanted is None else wanted
    words = view(parts, memories, text_of(corpus, split)[1:], corpus.words, stretch)
    file = f"{model.file_prefix}memory-view.json"
    content = {"split": split, "first": stretch[0], "last": stretch[1], "words": as_plain(words)}
    write_atomic(run.path / file, (to_json(content, indent=2) + "\n").encode())
    caption = (
        f"{_of(model)}Which part of each word's probability came from where, predictions {stretch[0]:,} to "
        f"{stretch[1] - 1:,} of the {TEXTS[split]} text; beside it the probability without and with memories."
    )
    return file, Figure(f"{model.file_prefix}memory-view.png", caption), draw(words, memories)


def _of(name: ModelName) -> str:
    return "" if name == ONLY else f"{name.title.capitalize()}. "


def tabulate(measured: Measured, corpus: Corpus) -> list[Table]:
    """For each model and split its perplexities by frequency, the rows side by side; then the best of its grids."""
    tables = []
    for name, found in measured.items():
        of = "" if name == ONLY else f"{name.title}, "
        for split in found.parts:
            scores = [row.scores[split] for row in found.rows]
            rows: list[list[Cell]] = [["all", scores[0].words, *(each.perplexity for each in scores)]]
            rows += [
                [f"{bucket} times", words, *(each.bucket_perplexity[bucket] for each in scores)]
                for bucket in BUCKETS
                if (words := scores[0].bucket_words[bucket])
            ]
            columns = ["words seen in training", "predictions", *(row.memories.name for row in found.rows)]
            title = f"{TITLE}{of}perplexity on the {TEXTS[split]} text of {corpus.name}"
            tables.append(Table(title, columns, rows))
        if found.sweep is not None:
            two = found.sweep.two_steps
            grids = {
                "the best caches on": found.sweep.cache,
                "the best with MbPA of one step on": found.sweep.mbpa,
                "the best of two steps, on a stretch of": two.points if two else (),
            }
            tables += [
                Table(f"{TITLE}{of}{what} the validation text", GRID, [_line(point) for point in points[:BEST]])
                for what, points in grids.items()
                if points
            ]
    return tables


GRID = ("θ, n, λ of the cache", "K, steps, α, β, λ of MbPA", "perplexity")


def _line(point: Point) -> list[Cell]:
    return [describe_cache(point.cache), "–" if point.mbpa is None else describe_mbpa(point.mbpa), point.perplexity]


def describe_cache(cache: CacheSettings) -> str:
    return f"{cache.theta:g}, {cache.size:,}, {cache.share:g}"


def describe_mbpa(mbpa: MbpaSettings) -> str:
    """β has no effect at one step."""
    pull = f"{mbpa.l2:g}" if mbpa.steps > 1 else "–"
    return f"{mbpa.neighbours:,}, {mbpa.steps}, {mbpa.rate:g}, {pull}, {mbpa.share:g}"


def sentences(measured: Measured) -> list[str]:
    """The settings of each row, and what is to be known about how they were chosen."""
    lines = []
    for name, found in measured.items():
        last: Memories = found.rows[-1].memories
        cached = [row.memories.cache for row in found.rows if row.memories.cache is not None]
        said = [f"cache (θ, n, λ): {describe_cache(cached[0])}"] if cached else []
        if last.mbpa is not None:
            beside = f" beside a cache of λ {last.cache.share:g}" if last.cache and last.cache != cached[0] else ""
            said.append(f"MbPA (K, steps, α, β, λ): {describe_mbpa(last.mbpa)}{beside}")
        lines.append(_of(name) + "; ".join(said) + ".")
        if found.sweep is not None:
            lines.append(f"The mean of ‖h‖² is {found.sweep.squared_norm:.3g}.")
            lines += found.sweep.notes
    return lines


def show_on_page(run: Run, tables: Sequence[Table], pictures: Mapping[Figure, bytes]) -> bool:
    """Put tables and pictures into the run's result and page, in place of earlier ones.

    A run that is not finished has no result; then the pictures alone are written.
    """
    result = load_result(run)
    if result is None:
        for figure, image in pictures.items():
            write_atomic(run.path / figure.file, image)
        return False
    names = {figure.file for figure in pictures}
    kept_tables = [table for table in result.tables if not table.title.startswith(TITLE)]
    kept_figures = [figure for figure in result.figures if figure.file not in names]
    shown = replace(result, tables=[*kept_tables, *tables], figures=[*kept_figures, *pictures])
    save_result(run, shown, {figure.file: image for figure, image in pictures.items()})
    return refresh_page(run)


def as_json(measured: Measured) -> dict[str, Any]:
    """The rows, by model."""
    return {name.key: [row.as_plain() for row in found.rows] for name, found in measured.items()}
