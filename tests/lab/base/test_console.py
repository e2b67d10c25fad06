"""The words that start the program, as hints and suggestions give them, work from the current folder."""

import os
import sys
from pathlib import Path

import pytest

from hebbian_softmax.lab.base.console import program


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
