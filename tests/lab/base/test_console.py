"""The words that start the program, as hints and suggestions give them, work from the current folder."""

import contextlib
import fcntl
import os
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from hebbian_softmax.lab.base.console import columns_of, filled, program, quoted, say, show
from hebbian_softmax.lab.base.progress import Progress


@pytest.mark.parametrize("text", ["\x1b[2J", "\x9b31m", "a\rb", "\u202egpj.exe", "\udcff", "\x00\x07\x7f"])
def test_no_message_moves_the_cursor(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    say(f"before {text} after")
    show(f"before {text} after\nnext line")
    with Progress(text, total=1) as progress:
        progress.note(f"HTTP 500 {text}")
    captured = capsys.readouterr()
    for line in (*captured.out.splitlines(), *captured.err.splitlines()):
        assert line.isprintable()
    assert len(captured.out.splitlines()) == 2


WORDS = "a sentence of which a narrow terminal shows no more than a part in each of its lines"


def shown_on_a_terminal(columns: int, code: str) -> list[str]:
    """Return the lines that a program writes to a terminal of so many columns."""
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    subprocess.run([sys.executable, "-c", code], stdout=theirs, stderr=theirs, stdin=theirs, check=True)
    os.close(theirs)
    found = b""
    with contextlib.suppress(OSError), os.fdopen(ours, "rb", 0) as file:  # Linux ends it with an error
        while more := file.read(1000):
            found += more
    return found.decode().splitlines()


def test_lines_are_broken_between_words_where_a_terminal_is_narrow() -> None:
    code = f"from hebbian_softmax.lab.base.console import say, show; show({WORDS!r}); say({WORDS!r})"
    lines = shown_on_a_terminal(30, code)
    assert all(len(line) <= 30 for line in lines)
    assert " ".join(lines) == f"{WORDS} {WORDS}"
    assert len(lines) > 5
    assert columns_of(sys.stdout) is None
    assert filled(WORDS, 200) == WORDS


def test_commands_to_copy_stay_on_one_line() -> None:
    code = f"""if True:
        from hebbian_softmax.lab.base.console import say, show
        from hebbian_softmax.lab.cli import fail
        say({WORDS!r}, whole=True)
        show({WORDS!r}, whole=True)
        fail("it did not work; go on with:", {WORDS!r})"""
    lines = shown_on_a_terminal(40, code)
    assert lines == [WORDS, WORDS, "hebbian: error: it did not work; go on", "with:", f"  {WORDS}"]


def test_lines_of_files_are_not_broken(capsys: pytest.CaptureFixture[str]) -> None:
    say(3 * WORDS)
    show(3 * WORDS, "  ")
    captured = capsys.readouterr()
    assert captured.out == captured.err == 3 * WORDS + "\n"


@pytest.mark.parametrize("name", ["plain", "two words", "it's", "back\\slash\n", "\udcff'\x1b$HOME"])
def test_a_quoted_name_is_that_name_in_a_shell(name: str) -> None:
    word = quoted(name)
    assert word.isprintable()
    done = subprocess.run(["bash", "-c", f"printf %s {word}"], capture_output=True, check=True)
    assert os.fsdecode(done.stdout) == name


@pytest.mark.parametrize(
    ("started", "path", "folder", "expected"),
    [
        (".venv/bin/hebbian", "/nowhere", ".", ".venv/bin/hebbian"),
        ("{here}/.venv/bin/hebbian", "/nowhere", ".", ".venv/bin/hebbian"),
        ("{here}/.venv/bin/hebbian", "/nowhere", ".venv/bin", "./hebbian"),
        ("{here}/a b/hebbian", "/nowhere", ".", "'a b/hebbian'"),
        ("{here}/.venv/bin/hebbian", "{here}/.venv/bin", ".", "hebbian"),
        ("pytest", "/nowhere", ".", "hebbian"),
    ],
    ids=["relative", "off PATH", "beside it", "a blank", "on PATH", "called from Python"],
)
def test_it_is_the_name_or_off_path_the_shorter_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, started: str, path: str, folder: str, expected: str
) -> None:
    for place in (".venv/bin", "a b"):
        program_file = tmp_path / place / "hebbian"
        program_file.parent.mkdir(parents=True)
        program_file.write_text("#!/bin/sh\n")
        program_file.chmod(0o755)
    monkeypatch.chdir(tmp_path / folder)
    monkeypatch.setenv("PATH", path.format(here=tmp_path))
    monkeypatch.setattr(sys, "argv", [started.format(here=tmp_path)])
    assert program() == expected


def test_as_a_module_it_names_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/somewhere/cli.py"])
    python, *rest = program().split()
    assert os.path.samefile(python, sys.executable)
    assert rest == ["-m", "hebbian_softmax.lab.cli"]
