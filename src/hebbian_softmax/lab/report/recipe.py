"""The frame of every experiment: its place on the command line, its run folder, and how its result is shown."""

import argparse
import contextlib
import signal
import sys
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

from hebbian_softmax.lab.base import environment
from hebbian_softmax.lab.base.console import columns_of, filled, printable, program, quoted, say
from hebbian_softmax.lab.base.errors import LabError, Terminated
from hebbian_softmax.lab.base.json_files import to_json
from hebbian_softmax.lab.base.runs import Run, create_run, last_unfinished, open_run, typed_command
from hebbian_softmax.lab.base.settings import add_options, from_values, given_options
from hebbian_softmax.lab.base.training import Interrupted
from hebbian_softmax.lab.report.figures import require_extras
from hebbian_softmax.lab.report.page import refresh_page
from hebbian_softmax.lab.report.result import Result, load_result, save_result
from hebbian_softmax.lab.report.tables import Table, for_stream

LATEST = "the newest unfinished run"


@dataclass(frozen=True)
class Recipe(ABC):
    """An experiment as a command: `hebbian VERB NAME`."""

    verb: str
    """The first word of the command, such as `compare`."""
    name: str
    """The second word of the command, such as `glyphs`."""
    help: str
    description: str
    settings: type

    @abstractmethod
    def perform(self, run: Run, settings: Any, quiet: bool) -> tuple[Result, dict[str, bytes]]:
        """Train in the run folder, going on from what is there; return the result and its images by file name."""

    def figures_again(self, run: Run, result: Result) -> dict[str, bytes]:
        """Draw the figures of a finished run from its numbers alone, where the experiment can."""
        return {}

    def tables_so_far(self, run: Run) -> list[Table]:
        """Return the tables of a run that is not finished, where the experiment has any."""
        return []

    def failure(self, result: Result) -> str:
        """Return what is wrong with a result, such as numbers that are not finite; an empty text if nothing is."""
        return ""

    @property
    def command(self) -> str:
        """The words after `hebbian`."""
        return f"{self.verb} {self.name}"

    def folder_name(self, settings: Any) -> str:
        """Return the first part of the names of the recipe's run folders; the date follows it."""
        return self.name

    def identity(self) -> tuple[str, ...]:
        """Return the settings that say, as the command itself does, which experiment a run is of."""
        return ("corpus",) if self.name == "corpus" else ()

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        """Add the recipe's own settings, then the options that every recipe has."""
        add_options(parser.add_argument_group("settings"), self.settings)
        group = parser.add_argument_group("running")
        runs = "folder of run folders (default: runs)"
        latest = f"go on with this run folder (default: {LATEST} in --runs)"
        json = "print the result as JSON on standard output, and everything else on standard error"
        group.add_argument("--runs", metavar="DIR", type=Path, default=Path("runs"), help=runs)
        group.add_argument("--resume", metavar="RUN", nargs="?", const=LATEST, help=latest)
        group.add_argument("--quiet", action="store_true", help="show no progress")
        group.add_argument("--json", action="store_true", help=json)

    def execute(self, arguments: argparse.Namespace) -> int:
        """Start or resume a run, finish it, and show its result; return the exit code."""
        require_extras()
        run, settings = self._open(arguments)
        if not arguments.quiet:
            say(f"Run folder: {run.path}")
        try:
            with run.held():
                result = load_result(run)
                if result is None:
                    result, images = self.perform(run, settings, arguments.quiet)
                    save_result(run, result, images)
                refresh_page(run)
        except LabError:
            run.remove_if_unused()
            raise
        except (Interrupted, KeyboardInterrupt, Terminated) as stop:
            saved = f"at step {stop.step}, all saved" if isinstance(stop, Interrupted) else "at once"
            say(f"hebbian: stopped {saved}; go on with:")
            say(f"  {program()} {run.typed} --resume {quoted(run.path)}", whole=True)
            return 128 + getattr(stop, "signum", signal.SIGINT)
        if arguments.json:
            print(to_json({"run": str(run.path), "settings": run.settings, **asdict(result)}, indent=2))
            with contextlib.suppress(OSError, ValueError):  # nobody may read it any more
                print(as_shown(run, result, sys.stderr), file=sys.stderr, flush=True)
        else:
            print(as_shown(run, result, sys.stdout))
        if failure := self.failure(result):
            raise LabError(failure)
        return 0

    def _open(self, arguments: argparse.Namespace) -> tuple[Run, Any]:
        """Create the run folder, or open the one to resume; return it with its settings."""
        given = given_options(arguments, self.settings)
        if arguments.resume is None:
            settings = self.settings(**given)
            return create_run(arguments.runs, self.folder_name(settings), self.command, asdict(settings)), settings
        alike = {name: given[name] for name in self.identity() if name in given}
        if arguments.resume == LATEST:
            run = last_unfinished(arguments.runs, self.command, alike)
        else:
            run = open_run(Path(arguments.resume))
        if run.command != self.command or any(run.settings.get(name) != value for name, value in alike.items()):
            asked = typed_command(self.command, alike)
            raise LabError(f"{run.path} is a run of 'hebbian {run.typed}', not of 'hebbian {asked}'")
        try:
            settings = from_values(self.settings, run.settings)  # older versions wrote some of them in another form
        except ValueError as error:
            raise LabError(
                f"{run.path} was started by another version of hebbian-softmax ({error}): go on with that version"
            ) from error
        for name, value in given.items():
            if (before := getattr(settings, name)) != value:
                raise LabError(
                    f"{run.path} was started with {name} = {before}, not {value}: "
                    "omit that option to go on with the run, or start a new run without --resume"
                )
        now = environment.versions()
        if any(version != now.get(name, version) for name, version in run.config["versions"].items()):
            say(f"note: {run.path} was started with other versions, so its numbers may differ in the last bits")
        return run, settings


def as_shown(run: Run, result: Result, stream: TextIO) -> str:
    """Return the result for people: the tables, the summary, where the files are, and what to try next."""
    columns = columns_of(stream)
    lines = [filled(result.summary, min(columns or 100, 100)) + "\n"]
    lines += [f"Figure: {run.path / figure.file}" for figure in result.figures]
    if (run.path / "page.html").exists():
        lines.append(f"Page:   {run.path / 'page.html'}")
    if result.next_steps:
        lines.append("Try next:")
        lines += [each for step in result.next_steps for each in as_typed(step, run, columns)]
    tables = [for_stream(table, stream) + "\n" for table in result.tables]
    return "\n".join([*tables, *(printable(line, lines=True) for line in lines)])


def as_typed(step: str, run: Run, columns: int | None = None) -> list[str]:
    """Return a suggested command as it works from here, with its run folder beside that of `run`.

    What it is for stands behind it, or above it where a line of that many columns is too short for both. The command
    itself is not broken, so that it can be copied.
    """
    command, mark, remark = step.rpartition("  # ") if "  # " in step else (step, "", "")
    words = [" ", program(), command.removeprefix("hebbian ")]
    if run.path.parent != Path("runs"):
        words.append(f"--runs {quoted(run.path.parent)}")
    typed = " ".join(words)
    if not remark or columns is None or len(typed + mark + remark) <= columns:
        return [typed + mark + remark]
    return [*filled(f"  # {remark}", columns, "  # ").splitlines(), typed]
