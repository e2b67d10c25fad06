"""The command `hebbian`."""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from hebbian_softmax import __version__
from hebbian_softmax.lab.errors import LabError

EXTRAS = ("numpy", "matplotlib")  # what `pip install 'hebbian-softmax[lab]'` adds

VERBS = {
    "compare": "train the same network with a plain and with a Hebbian softmax",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the value is the exit code. Errors a user can act on are one line, not a traceback."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that lacks γ shows a question mark
    try:
        arguments = build_parser().parse_args(argv)
        code: int = arguments.execute(arguments)
        sys.stdout.flush()
        return code
    except LabError as error:
        return fail(str(error))
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in EXTRAS:
            raise
        return fail(f"this command needs {error.name}: pip install 'hebbian-softmax[lab]'")
    except KeyboardInterrupt:
        print("hebbian: stopped", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output has gone (`hebbian … | head`): nothing is wrong
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def fail(message: str) -> int:
    print(f"hebbian: error: {message}", file=sys.stderr)
    return 1


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands. What a command does is its `execute` default."""
    from hebbian_softmax.lab.recipes import RECIPES

    parser = argparse.ArgumentParser(
        prog="hebbian",
        description="Experiments with softmax layers that memorise.",
        epilog="Start with: hebbian compare longtail",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"hebbian-softmax {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    for verb, help in VERBS.items():
        group = commands.add_parser(verb, help=help, description=sentence(help), allow_abbrev=False)
        names = group.add_subparsers(title="experiments", metavar="EXPERIMENT", required=True)
        for recipe in RECIPES:
            if recipe.verb == verb:
                command = names.add_parser(
                    recipe.name, help=recipe.help, description=recipe.description, allow_abbrev=False
                )
                recipe.add_options(command)
                command.set_defaults(execute=recipe.execute)

    add_report(commands)
    return parser


def add_report(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    help = "show the tables of runs and write them to one HTML page"
    command = commands.add_parser("report", help=help, description=sentence(help), allow_abbrev=False)
    command.add_argument("runs", metavar="RUN", nargs="+", type=Path, help="run folders, finished or not")
    command.add_argument(
        "--output",
        metavar="FILE",
        type=Path,
        help="the page (default: page.html in the run folder, or report.html here for several runs)",
    )
    form = command.add_mutually_exclusive_group()
    form.add_argument("--markdown", action="store_true", help="print the tables as Markdown")
    form.add_argument("--json", action="store_true", help="print each run as one line of JSON: config, numbers, log")
    command.set_defaults(execute=report)


def report(arguments: argparse.Namespace) -> int:
    """`hebbian report RUN...`"""
    from hebbian_softmax.lab.report.page import write_page
    from hebbian_softmax.lab.report.result import load_result
    from hebbian_softmax.lab.report.tables import as_markdown, as_text
    from hebbian_softmax.lab.runs import open_run, to_json

    runs = [open_run(path) for path in arguments.runs]
    single = runs[0].path / "page.html" if len(runs) == 1 else Path("report.html")
    output = arguments.output or single
    write_page(runs, output)
    print(f"Page: {output}", file=sys.stderr)
    for run in runs:
        result = load_result(run)
        if arguments.json:
            metrics = result.metrics if result else None
            print(to_json({"run": run.path.name, **run.config, "metrics": metrics, "log": run.records()}))
            continue
        print(f"{run.path}: {result.summary if result else 'not finished'}", end="\n\n")
        for table in result.tables if result else ():
            print((as_markdown if arguments.markdown else as_text)(table), end="\n\n")
    return 0


def sentence(text: str) -> str:
    return text[0].upper() + text[1:] + "."


if __name__ == "__main__":
    sys.exit(main())
