"""The result of a finished run in a form that any page or table can show: the content of `result.json`."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hebbian_softmax.lab.base.errors import LabError
from hebbian_softmax.lab.base.files import write_atomic
from hebbian_softmax.lab.base.runs import Run
from hebbian_softmax.lab.report.tables import Table


@dataclass(frozen=True)
class Figure:
    """A PNG file in the run folder. The caption describes it, also for readers who cannot see it."""

    file: str
    caption: str


@dataclass(frozen=True)
class Result:
    """The outcome of a run: `metrics` are the raw numbers by name; everything else is made from them for people.

    `summary` consists of plain sentences about what was seen, and `next_steps` are commands worth trying. `settled` are
    the values of settings that were left to a preset, by their names.
    """

    title: str
    summary: str
    metrics: Mapping[str, Any]
    tables: Sequence[Table]
    figures: Sequence[Figure]
    next_steps: Sequence[str]
    settled: Mapping[str, str | int | float] = field(default_factory=dict)


def save_result(run: Run, result: Result, images: Mapping[str, bytes]) -> None:
    """Write the figures' files, then `result.json`, which marks the run as finished."""
    for name, image in images.items():
        write_atomic(run.path / name, image)
    run.save_result(asdict(result))


def load_result(run: Run) -> Result | None:
    """Return the result of a finished run, or None if the run is not finished."""
    content = run.result()
    if content is None:
        return None
    try:
        tables = [Table(**table) for table in content.pop("tables")]
        figures = [Figure(**figure) for figure in content.pop("figures")]
        result = Result(tables=tables, figures=figures, **content)
        _check(result)
        return result
    except (KeyError, TypeError, ValueError) as error:
        raise LabError(
            f"{run.path / 'result.json'} is not a result ({error}): delete it and resume the run to make it again"
        ) from error


def _check(result: Result) -> None:
    """Raise an error for values that no page could show, wherever the file came from."""
    texts = [result.title, result.summary, *result.next_steps]
    texts += [text for table in result.tables for text in (table.title, *table.columns)]
    texts += [text for figure in result.figures for text in (figure.file, figure.caption)]
    cells = [cell for table in result.tables for row in table.rows for cell in row]
    if not all(isinstance(text, str) for text in texts):
        raise TypeError("a title, a sentence or a name is not text")
    if not all(cell is None or isinstance(cell, str | int | float) for cell in cells):
        raise TypeError("a cell of a table is neither text nor a number")
    if not all(isinstance(each, Mapping) for each in (result.metrics, result.settled)):
        raise TypeError("the metrics or the settled settings are not named values")
    if isinstance(result.next_steps, str):
        raise TypeError("the next steps are of another type")
    if any(figure.file != Path(figure.file).name for figure in result.figures):
        raise ValueError("a figure is outside the run folder")


@dataclass(frozen=True)
class Beside:
    """Tables and figures that set several runs, or several models of one run, beside each other."""

    tables: Sequence[Table]
    images: Mapping[str, tuple[str, bytes]]
    """The caption and the PNG of each figure, by file name."""
    notes: Sequence[str]
