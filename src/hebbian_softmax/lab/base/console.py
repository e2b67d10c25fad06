"""Messages to the user on standard error, which may be gone, and the words that start this program again."""

import contextlib
import os
import shlex
import shutil
import sys
from pathlib import Path


def say(text: str = "") -> None:
    """Print a line on standard error. If nobody reads it any more, the work still goes on."""
    with contextlib.suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)


def open_missing_streams() -> None:
    """Let standard output and error lead nowhere if they were closed (`2>&-`).

    Otherwise their numbers would go to the next files opened, and messages would end up inside these.
    """
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115


def drop_output() -> None:
    """Send the rest of the output nowhere if it cannot be written, so that Python's flush at exit does not fail."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            with contextlib.suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def program() -> str:
    """Return the words that start this program from here: `hebbian`, or its path if the shell does not find it."""
    started = Path(sys.argv[0])
    if started.name == "cli.py":
        return f"{_shorter(sys.executable)} -m hebbian_softmax.lab.cli"
    found = shutil.which("hebbian")
    if started.stem != "hebbian" or not started.exists() or (found and os.path.samefile(found, started)):
        return "hebbian"
    return _shorter(str(started))


def _shorter(path: str) -> str:
    """Return the path as given or relative to the current folder, whichever is shorter, quoted for a shell."""
    with contextlib.suppress(OSError, ValueError):  # there may be no current folder, or one on another drive
        relative = os.path.relpath(path)
        relative = relative if os.path.dirname(relative) else os.path.join(os.curdir, relative)
        path = min(path, relative, key=len) if os.path.dirname(path) else relative
    return shlex.quote(path)
