"""What every recipe shares: its place on the command line, its run folder, how its result is shown."""

import argparse
import shlex
import signal
import sys
import textwrap
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TextIO

from hebbian_softmax.lab import environment
from hebbian_softmax.lab.errors import LabError
from hebbian_softmax.lab.report.figures import require_matplotlib
from hebbian_softmax.lab.report.page import write_page
from hebbian_softmax.lab.report.result import Result, load_result, save_result
from hebbian_softmax.lab.report.tables import as_text
from hebbian_softmax.lab.runs import Run, check_same, create_run, last_unfinished, open_run, to_json
from hebbian_softmax.lab.settings import add_options, given_options
from hebbian_softmax.lab.training import Interrupted

LATEST = "the newest unfinished run"


@dataclass(frozen=True)
class Recipe:
    """An experiment. `carry_out(run, settings, quiet)` trains in the run folder, resuming what it finds there,
    and returns the result and the images of its figures by file name."""

    verb: str  # the first word of the command: compare, train, …
    name: str  # the second
    help: str
    description: str
    settings: type
    carry_out: Callable[[Run, Any, bool], tuple[Result, dict[str, bytes]]]

    @property
    def command(self) -> str:
        return f"{self.verb} {self.name}"

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        """The recipe's own settings, then the options that every recipe has."""
        add_options(parser.add_argument_group("settings"), self.settings)
        group = parser.add_argument_group("running")
        group.add_argument(
            "--runs", metavar="DIR", type=Path, default=Path("runs"), help="folder of run folders (default: runs)"
        )
        group.add_argument(
            "--resume",
            metavar="RUN",
            nargs="?",
            const=LATEST,
            help=f"go on with this run folder (default: {LATEST} in --runs)",
        )
        group.add_argument("--quiet", action="store_true", help="no progress")
        group.add_argument(
            "--json", action="store_true", help="print the result as JSON on standard output, the rest elsewhere"
        )

    def execute(self, arguments: argparse.Namespace) -> int:
        """Start or resume a run, finish it, show its result."""
        require_matplotlib()
        run, settings = self._open(arguments)
        if not arguments.quiet:
            print(f"Run folder: {run.path}", file=sys.stderr)
        try:
            with run.held():
                result = load_result(run)
                if result is None:
                    result, images = self.carry_out(run, settings, arguments.quiet)
                    save_result(run, result, images)
                write_page([run], run.path / "page.html")
        except (Interrupted, KeyboardInterrupt) as stop:
            signum = stop.signum if isinstance(stop, Interrupted) else signal.SIGINT
            saved = f"at step {stop.step}, all saved" if isinstance(stop, Interrupted) else "at once"
            print(f"hebbian: stopped {saved}; go on with:", file=sys.stderr)
            print(f"  hebbian {self.command} --resume {shlex.quote(str(run.path))}", file=sys.stderr)
            return 128 + signum
        if arguments.json:
            print(to_json({"run": str(run.path), "settings": run.settings, **asdict(result)}, indent=2))
        show(run, result, file=sys.stderr if arguments.json else sys.stdout)
        return 0

    def _open(self, arguments: argparse.Namespace) -> tuple[Run, Any]:
        given = given_options(arguments, self.settings)
        if arguments.resume is None:
            settings = self.settings(**given)
            return create_run(arguments.runs, self.name, self.command, asdict(settings)), settings
        if arguments.resume == LATEST:
            run = last_unfinished(arguments.runs, self.command)
        else:
            run = open_run(Path(arguments.resume))
        check_same(run, self.command, given)
        if set(run.settings) != {field.name for field in fields(self.settings)}:
            raise LabError(f"{run.path} was started by another version of hebbian-softmax: go on with that one")
        if run.config["versions"] != environment.versions():
            print(f"note: {run.path} was started with other versions; its bits may differ", file=sys.stderr)
        return run, self.settings(**run.settings)


def show(run: Run, result: Result, file: TextIO) -> None:
    """The result for people: tables, the sentences, where the files are, what to try."""
    for table in result.tables:
        print(as_text(table), end="\n\n", file=file)
    print(textwrap.fill(result.summary, width=100), end="\n\n", file=file)
    for figure in result.figures:
        print(f"Figure: {run.path / figure.file}", file=file)
    print(f"Page:   {run.path / 'page.html'}", file=file)
    if result.next_steps:
        print("Try next:", file=file)
        for step in result.next_steps:
            print(f"  {step}", file=file)
