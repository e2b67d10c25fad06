"""`hebbian report RUN…`: shows the tables of runs on the terminal and writes all runs to one HTML page.

This module knows no experiment: what it needs of them comes as arguments of `add_command`.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hebbian_softmax.lab.base.console import program, quoted, say, show
from hebbian_softmax.lab.base.errors import LabError
from hebbian_softmax.lab.base.files import write_atomic
from hebbian_softmax.lab.base.json_files import to_json
from hebbian_softmax.lab.base.runs import Run, open_run
from hebbian_softmax.lab.report.page import is_whole_png, write_page
from hebbian_softmax.lab.report.recipe import Recipe
from hebbian_softmax.lab.report.result import Beside, Result, load_result
from hebbian_softmax.lab.report.tables import Table, as_markdown, for_stream, side_by_side

FindRecipe = Callable[[str], Recipe | None]
"""Returns the recipe of a command such as `compare glyphs`, or None if this version does not have it."""
CompareRuns = Callable[[Sequence[Run]], Beside]
"""Sets the models of several runs beside each other."""


def add_command(
    commands: "argparse._SubParsersAction[argparse.ArgumentParser]", find_recipe: FindRecipe, compare_runs: CompareRuns
) -> None:
    """Add `hebbian report` to the commands."""
    command = commands.add_parser(
        "report",
        description=(
            "Shows the tables of runs and writes them to one HTML page. Language models are set beside each other: "
            "learning curves, perplexity by frequency, and the words that gained and lost most from one to the other."
        ),
        allow_abbrev=False,
    )
    command.add_argument("runs", metavar="RUN", nargs="+", type=Path, help="run folders, finished or not")
    command.add_argument(
        "--output",
        metavar="FILE",
        type=Path,
        help="the page (default: page.html in the run folder, or report.html here for several runs; "
        "none with --markdown or --json)",
    )
    form = command.add_mutually_exclusive_group()
    form.add_argument("--markdown", action="store_true", help="print the tables as Markdown")
    form.add_argument("--json", action="store_true", help="print each run as one line of JSON: config, numbers, log")
    command.set_defaults(execute=lambda arguments: report(arguments, find_recipe, compare_runs))


@dataclass(frozen=True)
class Shown:
    """A run, its result if it is finished, and its recipe if this version has it."""

    run: Run
    result: Result | None
    recipe: Recipe | None

    def unfinished_tables(self) -> list[Table]:
        """Return the tables of a run that is not finished."""
        return self.recipe.tables_so_far(self.run) if self.recipe is not None and self.result is None else []

    def draw_missing(self) -> None:
        """Draw figures that are damaged, or did not travel with `result.json`, again where its numbers suffice."""
        paths = [self.run.path / figure.file for figure in self.result.figures] if self.result is not None else []
        missing = [path for path in paths if not (path.is_file() and is_whole_png(path.read_bytes()))]
        if self.result is None or not missing:
            return
        images = self.recipe.figures_again(self.run, self.result) if self.recipe is not None else {}
        for path in missing:
            if path.name in images:
                write_atomic(path, images[path.name])
            elif path.exists():
                say(f"note: {path} is damaged and not on the page: put a whole one there, or delete it")


def report(arguments: argparse.Namespace, find_recipe: FindRecipe, compare_runs: CompareRuns) -> int:
    """Carry out `hebbian report`."""
    runs = [open_run(path) for path in arguments.runs]
    shown = [Shown(run, load_result(run), find_recipe(run.command)) for run in runs]
    beside = compare_runs(runs)
    beside = replace(beside, tables=[*beside.tables, *(table for each in shown for table in each.unfinished_tables())])
    for note in beside.notes:
        say(f"note: {note}")
    if arguments.output is not None or not (arguments.json or arguments.markdown):
        write_files(shown, beside, arguments.output)
    if arguments.json:
        for each in shown:
            metrics = each.result.metrics if each.result else None
            record = {"run": each.run.path.name, **each.run.config, "metrics": metrics, "log": each.run.records()}
            print(to_json(record))
        return 0

    def draw(table: Table) -> None:
        print(as_markdown(table) if arguments.markdown else for_stream(table, sys.stdout), end="\n\n")

    joined = shared_tables([each.result for each in shown])
    for number, each in enumerate(shown, 1):
        mark = f"({number}) " if joined else ""
        show(f"{mark}{each.run.path}: {each.result.summary if each.result else unfinished(each.run)}")
        if each.result is None:
            show(f"  {program()} {each.run.typed} --resume {quoted(each.run.path)}", whole=True)
        show()
        for table in each.result.tables if each.result else ():
            if not any(table.title == other.title for other in joined):
                draw(table)
    for table in [*joined, *beside.tables]:
        draw(table)
    return 0


def unfinished(run: Run) -> str:
    """Say how far a run has come that is not finished; the command that goes on with it is to follow."""
    steps = [record["step"] for record in run.records() if isinstance(record.get("step"), int)]
    far = f"its log ends at step {steps[-1]:,}" if steps else "nothing is logged yet"
    return f"not finished: {far}, and its last checkpoint may be later; go on with:"


def shared_tables(results: Sequence[Result | None]) -> list[Table]:
    """Return each table that all of several finished runs have as one table with their columns side by side."""
    if len(results) < 2 or None in results:
        return []
    every = [{table.title: table for table in result.tables} for result in results if result is not None]
    found = [side_by_side([tables[title] for tables in every]) for title in every[0] if all(title in t for t in every)]
    return [table for table in found if table is not None]


def write_files(shown: Sequence[Shown], beside: Beside, output: Path | None) -> None:
    """Write the page and the figures beside it.

    A single run's own page repeats what its folder holds, so failing to write that one is only worth a note.
    """
    alone = output is None and len(shown) == 1
    page = shown[0].run.path / "page.html" if alone else output or Path("report.html")
    try:
        for each in shown:
            each.draw_missing()
        for name, (_, image) in beside.images.items():
            write_atomic(page.with_name(name if alone else f"{page.stem}-{name}"), image)
        write_page([each.run for each in shown], page, beside.tables, list(beside.images.values()))
    except LabError as error:
        if not alone:
            raise
        say(f"note: no new page: {error}")
        return
    say(f"Page: {page}")
    for name in beside.images if not alone else ():
        say(f"Figure: {page.with_name(f'{page.stem}-{name}')}")
