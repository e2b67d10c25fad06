"""The command `hebbian`.

Help must be quick, so only the parser of the chosen command is complete: the modules of the other commands are not
even imported.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import io
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any, NoReturn

from hebbian_softmax import __version__
from hebbian_softmax.lab.base.console import drop_output, open_missing_streams, program, say
from hebbian_softmax.lab.base.errors import LabError, Terminated
from hebbian_softmax.lab.base.extras import PACKAGES, missing

VERBS = {
    "train": "train a language model on a corpus",
    "compare": "train the same network with a plain and with a Hebbian softmax",
    "sweep": "tune a language model on a corpus: the paper's grids, selected on the validation text",
    "reproduce": "re-run an experiment of the paper: tuning, seeds, tables and figures",
}
"""Commands that run an experiment: `hebbian VERB EXPERIMENT`."""

OTHERS = {
    "evaluate": "measure the language models of a run: perplexity, also by word frequency",
    "report": "show the tables of runs and write them to one HTML page",
    "data": "prepare text corpora, list them, or look at one",
    "play": "draw characters on a local page, and see two heads learn them",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. An error that the user can act on is one line, not a traceback."""
    open_missing_streams()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that lacks γ shows a question mark
    try:
        with terminable():
            return run_command(list(sys.argv[1:] if argv is None else argv))
    except (KeyboardInterrupt, Terminated) as stop:
        say("hebbian: stopped")
        return 128 + getattr(stop, "signum", signal.SIGINT)
    finally:
        drop_output()


def run_command(words: list[str]) -> int:
    """Run the command that the words of the command line name; turn errors into a message and an exit code."""
    try:
        words = name_folder(words) or ["--help"]
        arguments = build_parser(words).parse_args(words)
        code: int = arguments.execute(arguments)
        sys.stdout.flush()
        return code
    except LabError as error:
        return fail(str(error), error.command)
    except ModuleNotFoundError as error:
        if error.name not in PACKAGES:
            raise
        return fail(str(missing(error.name)))
    except BrokenPipeError:
        # The reader of the output has gone, as in `hebbian … | head`. All work is done and saved before the output
        # is written, and progress never raises this error, so nothing is wrong.
        return 0
    except OSError as error:
        return fail(f"{error.filename or 'reading or writing failed'}: {error.strerror or error}")


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """Let SIGTERM raise `Terminated`, as Ctrl-C raises KeyboardInterrupt, unless the caller handles or ignores it."""
    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return

    def handle(signum: int, frame: FrameType | None) -> None:
        raise Terminated

    signal.signal(signal.SIGTERM, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def fail(message: str, command: str | None = None) -> int:
    """Say what went wrong, and perhaps a command to type next; return the exit code of an error."""
    say(f"hebbian: error: {message}")
    if command is not None:
        say(f"  {command}", whole=True)
    return 1


def name_folder(words: list[str]) -> list[str]:
    """Turn `hebbian train FOLDER …` into what the parser knows: `hebbian train corpus --corpus FOLDER …`."""
    match words:
        case [verb, text, *rest] if verb in VERBS and not text.startswith("-"):
            from hebbian_softmax.lab.experiments import recipes

            names = {recipe.name for recipe in recipes(verb)}
            if text not in names:
                from hebbian_softmax.lab.language.source import FOLDER, prepared_corpus

                if FOLDER in names and (corpus := prepared_corpus(text)) is not None:
                    return [verb, FOLDER, "--corpus", corpus, *rest]
                if FOLDER in names:
                    refuse_experiment(verb, text, sorted(names - {FOLDER}))
    return words


def refuse_experiment(verb: str, text: str, names: list[str]) -> NoReturn:
    """End as argparse does after a choice that is unknown, but name the prepared corpora of the user's own, too."""
    from hebbian_softmax.lab.data.corpus import prepared

    own = sorted({path.name for path in prepared()} - set(names))
    yours = f"your own corpora: {', '.join(own)}; " if own else ""
    near = difflib.get_close_matches(text, [*names, *own], 1)
    meant = f"; is {near[0]} meant?" if near else ""
    say(
        f"hebbian {verb}: error: argument EXPERIMENT: invalid choice: {text!r} (choose from {', '.join(names)}; {yours}"
        f"or give the folder of a prepared corpus, see hebbian data --help){meant}"
    )
    sys.exit(2)


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line: what is wrong, perhaps what was meant, and what lists the options."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            options = [word for action in self._actions for word in action.option_strings]
            near = [difflib.get_close_matches(word.partition("=")[0], options, 1) for word in unknown]
            names = list(dict.fromkeys(name for some in near for name in some))
            meant = f"; {'is' if len(names) == 1 else 'are'} {' and '.join(names)} meant?" if names else ""
            self.error(f"unrecognized arguments: {' '.join(unknown)}{meant}")
        return found, unknown

    def error(self, message: str) -> NoReturn:
        say(f"{self.prog}: error: {message} (see {program()}{self.prog.removeprefix('hebbian')} --help)")
        sys.exit(2)


def build_parser(words: Sequence[str]) -> argparse.ArgumentParser:
    """Return a parser that knows all commands by name, and all options of the one that `words` choose.

    What the chosen command does is the parser's default `execute`.
    """
    parser: argparse.ArgumentParser = Parser(
        prog="hebbian",
        description="Experiments with softmax layers that memorise.",
        epilog="Start with: hebbian compare glyphs",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"hebbian-softmax {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    chosen = next((word for word in words if not word.startswith("-")), "")
    for name, help in (VERBS | OTHERS).items():
        if name == chosen in OTHERS:
            add_other(commands, name)
        else:
            sentence = f"{help[0].upper()}{help[1:]}."
            command = commands.add_parser(name, help=help, description=sentence, allow_abbrev=False)
            if name == chosen:
                add_experiments(command, name)
    return parser


def add_experiments(command: argparse.ArgumentParser, verb: str) -> None:
    """Add the experiments of a verb with all their options."""
    from hebbian_softmax.lab.experiments import recipes

    names = command.add_subparsers(title="experiments", metavar="EXPERIMENT", required=True)
    for recipe in recipes(verb):
        parser = names.add_parser(
            recipe.name, help=recipe.help.replace("%", "%%"), description=recipe.description, allow_abbrev=False
        )
        recipe.add_options(parser)
        parser.set_defaults(execute=recipe.execute)


def add_other(commands: argparse._SubParsersAction[argparse.ArgumentParser], name: str) -> None:
    """Add a command that runs no experiment, with all its options."""
    from hebbian_softmax.lab import experiments

    if name == "evaluate":
        from hebbian_softmax.lab.language.memories.command import add_command as add_evaluate

        add_evaluate(commands)
    elif name == "report":
        from hebbian_softmax.lab.report.command import add_command as add_report

        add_report(commands, experiments.find_recipe, experiments.compare_runs)
    elif name == "play":
        from hebbian_softmax.lab.play.command import add_command as add_play

        add_play(commands)
    else:
        from hebbian_softmax.lab.data.command import add_data

        add_data(commands, reserved={recipe.name for verb in VERBS for recipe in experiments.recipes(verb)})


if __name__ == "__main__":
    sys.exit(main())
