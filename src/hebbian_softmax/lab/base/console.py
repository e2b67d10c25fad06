"""Messages to the user on standard error, which may be gone, and the words that start this program again."""

import contextlib
import os
import re
import shlex
import shutil
import sys
import textwrap
from pathlib import Path
from typing import TextIO

# Characters that a terminal obeys instead of showing them, those that turn the direction of writing, and halves of
# surrogate pairs, which stand for the bytes of a file name that is not UTF-8.
_UNSHOWN = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str, lines: bool = False) -> str:
    r"""Write characters that a terminal would obey as escapes; with `lines`, line feeds stay.

    Words of a corpus, names of files and messages of servers can contain any character.

    >>> print(printable("\x1b[31mred\udcff\n"))
    \x1b[31mred\xff\x0a
    """
    return _UNSHOWN.sub(lambda found: found[0] if lines and found[0] == "\n" else _escape(ord(found[0])), text)


def _escape(number: int) -> str:
    if 0xDC80 <= number <= 0xDCFF:
        number -= 0xDC00  # a byte of a file name
    return f"\\x{number:02x}" if number < 0x100 else f"\\u{number:04x}"


def columns_of(stream: TextIO) -> int | None:
    """Return how many characters fit into a line of the terminal that a stream leads to; None for other streams."""
    try:
        return max(20, os.get_terminal_size(stream.fileno()).columns) if stream.isatty() else None
    except (OSError, ValueError, AttributeError):
        return None


def filled(text: str, columns: int | None, further: str = "") -> str:
    """Break a line between words where it is longer than that many columns; `further` is put before all but the first.

    >>> print(filled("  a few words of a sentence", 20, "    "))
      a few words of a
        sentence
    """
    if columns is None or len(text) <= columns:
        return text
    return textwrap.fill(text, columns, subsequent_indent=further, break_long_words=False, break_on_hyphens=False)


def say(text: str = "", *, whole: bool = False) -> None:
    """Print a line on standard error. If nobody reads it any more, the work still goes on.

    A `whole` line is not broken where it is wider than the terminal: a command that is to be copied.
    """
    with contextlib.suppress(OSError, ValueError):
        columns = None if whole else columns_of(sys.stderr)
        print(filled(printable(text), columns), file=sys.stderr, flush=True)


def show(text: str = "", further: str = "", *, whole: bool = False) -> None:
    """Print lines on standard output, those that are too long for a terminal in parts, with `further` before the later.

    With `whole` they are not broken, as in `say`. Tables are drawn by `report.tables`, which takes care of their cells.
    """
    columns = None if whole else columns_of(sys.stdout)
    print("\n".join(filled(line, columns, further) for line in printable(text, lines=True).split("\n")))


def quoted(text: object) -> str:
    """Quote a word for a shell, also one that cannot be printed as it is.

    >>> quoted("my run"), quoted("it's\\n")
    ("'my run'", "$'it\\\\'s\\\\x0a'")
    """
    word = str(text)
    if printable(word) == word:
        return shlex.quote(word)
    return "$'" + printable(word.replace("\\", "\\\\").replace("'", "\\'")) + "'"


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
    return quoted(path)
