"""`hebbian report RUN…`: the tables of runs on the terminal, and all of them on one HTML page."""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from hebbian_softmax.lab.base.console import say
from hebbian_softmax.lab.base.errors import LabError
from hebbian_softmax.lab.base.files import write_atomic
from hebbian_softmax.lab.base.runs import Run, open_run, to_json
from hebbian_softmax.lab.language.report.words import compare_words
from hebbian_softmax.lab.recipe import Recipe
from hebbian_softmax.lab.report.page import write_page
from hebbian_softmax.lab.report.result import Beside, Result, load_result
from hebbian_softmax.lab.report.tables import Table, as_markdown, as_text, side_by_side


def add_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    help = "show the tables of runs and write them to one HTML page"
    description = (
        "Shows the tables of runs and writes them to one HTML page. Language models are set beside each other: "
        "learning curves, perplexity by frequency, and the words that gained and lost most from one to the other."
    )
    command = commands.add_parser("report", help=help, description=description, allow_abbrev=False)
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
    command.set_defaults(execute=report)


def report(arguments: argparse.Namespace) -> int:
    runs = [open_run(path) for path in arguments.runs]
    results = [load_result(run) for run in runs]
    beside = compare_words(runs)
    unfinished = [table for run, result in zip(runs, results, strict=True) if not result for table in so_far(run)]
    beside = replace(beside, tables=[*beside.tables, *unfinished])
    for note in beside.notes:
        say(f"note: {note}")
    if arguments.output is not None or not (arguments.json or arguments.markdown):
        write_files(runs, results, beside, arguments.output)
    if arguments.json:
        for run, result in zip(runs, results, strict=True):
            metrics = result.metrics if result else None
            print(to_json({"run": run.path.name, **run.config, "metrics": metrics, "log": run.records()}))
        return 0
    show = as_markdown if arguments.markdown else as_text
    joined = shared_tables(results)
    for number, (run, result) in enumerate(zip(runs, results, strict=True), 1):
        mark = f"({number}) " if joined else ""
        print(f"{mark}{run.path}: {result.summary if result else 'not finished'}", end="\n\n")
        for table in result.tables if result else ():
            if not any(table.title == each.title for each in joined):
                print(show(table), end="\n\n")
    for table in [*joined, *beside.tables]:
        print(show(table), end="\n\n")
    return 0


def shared_tables(results: Sequence[Result | None]) -> list[Table]:
    """The tables that all of several runs have, each as one."""
    if len(results) < 2 or None in results:
        return []
    every = [{table.title: table for table in result.tables} for result in results if result is not None]
    found = [side_by_side([tables[title] for tables in every]) for title in every[0] if all(title in t for t in every)]
    return [table for table in found if table is not None]


def write_files(runs: Sequence[Run], results: Sequence[Result | None], beside: Beside, output: Path | None) -> None:
    """The page, and the figures beside it. In a run folder all is saved already, so failing there is worth a note."""
    alone = output is None and len(runs) == 1
    page = runs[0].path / "page.html" if alone else output or Path("report.html")
    try:
        for run, result in zip(runs, results, strict=True):
            draw_missing(run, result)
        for name, (_, image) in beside.images.items():
            write_atomic(page.with_name(name if alone else f"{page.stem}-{name}"), image)
        write_page(runs, page, beside.tables, list(beside.images.values()))
    except LabError as error:
        if not alone:
            raise
        say(f"note: no new page: {error}")
        return
    say(f"Page: {page}")


def recipe_of(run: Run) -> Recipe | None:
    """Return the experiment that a run is of, if this version has it."""
    from hebbian_softmax.lab.experiments import RECIPES

    return next((each for each in RECIPES if each.command == run.command), None)


def so_far(run: Run) -> list[Table]:
    """Return the tables of a run that is not finished."""
    recipe = recipe_of(run)
    return [] if recipe is None else recipe.tables_so_far(run)


def draw_missing(run: Run, result: Result | None) -> None:
    """Figures that did not travel with result.json are drawn again from its numbers, where it has them all."""
    recipe = recipe_of(run)
    if result is None or recipe is None:
        return
    if missing := [figure.file for figure in result.figures if not (run.path / figure.file).exists()]:
        images = recipe.figures_again(run, result)
        for name in missing:
            if name in images:
                write_atomic(run.path / name, images[name])
