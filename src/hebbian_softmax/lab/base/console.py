"""Talking to whoever started the program: standard error that may be gone, and the name it was started by."""

import contextlib
import os
import shlex
import shutil
import sys
from pathlib import Path


def say(text: str = "") -> None:
    """A line on standard error. That nobody reads it any more is no reason to stop working."""
    with contextlib.suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)


def open_missing_streams() -> None:
    """Standard output or error that were closed (`2>&-`) lead nowhere, instead of into the next file opened."""
    if sys.stdout is None or sys.stderr is None:
        while (handle := os.open(os.devnull, os.O_RDWR)) <= 2:
            pass
        os.close(handle)
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115


def drop_output() -> None:
    """Send the rest of standard output and error nowhere, so that Python's own flush at exit does not fail."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            with contextlib.suppress(OSError, ValueError):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, stream.fileno())
                os.close(nowhere)


def program() -> str:
    """The words that start this program again from here: `hebbian`, or its path where the shell does not find it."""
    started = Path(sys.argv[0])
    if started.name == "cli.py":
        return f"{_shorter(sys.executable)} -m hebbian_softmax.lab.cli"
    found = shutil.which("hebbian")
    if started.stem != "hebbian" or not started.exists() or (found and os.path.samefile(found, started)):
        return "hebbian"
    return _shorter(str(started))


def _shorter(path: str) -> str:
    """The path as it is or from the current folder, whichever is shorter, quoted for a shell."""
    with contextlib.suppress(OSError, ValueError):  # no current folder, another drive
        relative = os.path.relpath(path)
        relative = relative if os.path.dirname(relative) else os.path.join(os.curdir, relative)
        path = min(path, relative, key=len) if os.path.dirname(path) else relative
    return shlex.quote(path)
