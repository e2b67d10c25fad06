"""The command `hebbian`."""

from __future__ import annotations

import argparse
import contextlib
import io
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from types import FrameType

from hebbian_softmax import __version__
from hebbian_softmax.lab.base.console import drop_output, open_missing_streams, say
from hebbian_softmax.lab.base.errors import LabError, Terminated

EXTRAS = ("numpy", "matplotlib")  # what `pip install 'hebbian-softmax[lab]'` adds

VERBS = {
    "train": "train a language model on a corpus",
    "compare": "train the same network with a plain and with a Hebbian softmax",
    "sweep": "tune a language model on a corpus: the paper's grids, selected on the validation text",
    "reproduce": "re-run an experiment of the paper: tuning, seeds, tables and figures",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the value is the exit code. Errors a user can act on are one line, not a traceback."""
    open_missing_streams()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that lacks γ shows a question mark
    try:
        with terminable():
            return run_command(argv)
    except KeyboardInterrupt:
        say("hebbian: stopped")
        return 128 + signal.SIGINT
    except Terminated:
        say("hebbian: stopped")
        return 128 + signal.SIGTERM
    finally:
        drop_output()


def run_command(argv: Sequence[str] | None) -> int:
    try:
        arguments = build_parser().parse_args(name_folder(sys.argv[1:] if argv is None else argv))
        code: int = arguments.execute(arguments)
        sys.stdout.flush()
        return code
    except LabError as error:
        return fail(str(error))
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in EXTRAS:
            raise
        return fail(f"this command needs {error.name}: pip install 'hebbian-softmax[lab]'")
    except BrokenPipeError:
        # The reader of our output has gone (`hebbian … | head`). Output comes after all work is done and saved, and
        # progress does not raise this, so nothing is wrong.
        return 0
    except OSError as error:
        return fail(f"{error.filename or 'reading or writing failed'}: {error.strerror or error}")


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """SIGTERM raises `Terminated`, as Ctrl-C raises KeyboardInterrupt, unless the caller handles or ignores it."""
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


def fail(message: str) -> int:
    say(f"hebbian: error: {message}")
    return 1


def name_folder(argv: Sequence[str]) -> list[str]:
    """`hebbian train FOLDER ...` as the parser knows it: `hebbian train corpus --corpus FOLDER ...`."""
    from hebbian_softmax.lab.experiments import RECIPES
    from hebbian_softmax.lab.language.source import FOLDER, prepared_corpus

    match list(argv):
        case [verb, text, *rest]:
            names = {recipe.name for recipe in RECIPES if recipe.verb == verb}
            if FOLDER in names and text not in names and (corpus := prepared_corpus(text)) is not None:
                return [verb, FOLDER, "--corpus", corpus, *rest]
    return list(argv)


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands. What a command does is its `execute` default."""
    from hebbian_softmax.lab.data.command import add_data
    from hebbian_softmax.lab.experiments import RECIPES
    from hebbian_softmax.lab.language.memories.command import add_command as add_evaluate
    from hebbian_softmax.lab.report_command import add_command as add_report

    parser = argparse.ArgumentParser(
        prog="hebbian",
        description="Experiments with softmax layers that memorise.",
        epilog="Start with: hebbian compare glyphs",
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
                    recipe.name, help=recipe.help.replace("%", "%%"), description=recipe.description, allow_abbrev=False
                )
                recipe.add_options(command)
                command.set_defaults(execute=recipe.execute)

    add_evaluate(commands)
    add_report(commands)
    add_data(commands, reserved={recipe.name for recipe in RECIPES})
    return parser


def sentence(text: str) -> str:
    return text[0].upper() + text[1:] + "."


if __name__ == "__main__":
    sys.exit(main())
