"""The words that start the program, as hints and suggestions give them, work from the current folder."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hebbian_softmax.lab.base.console import program, quoted, say, show
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
