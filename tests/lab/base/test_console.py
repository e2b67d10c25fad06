"""The words that start the program, as hints and suggestions give them, work from the current folder."""

import os
import sys
from pathlib import Path

import pytest

from hebbian_softmax.lab.base.console import program


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a program in .venv/bin of the current folder, which is not on PATH."""
    path = tmp_path / ".venv" / "bin" / "hebbian"
    path.parent.mkdir(parents=True)
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "/nowhere")
    return path


@pytest.mark.parametrize("absolute", [True, False])
def test_off_path_it_is_the_shorter_path(installed: Path, monkeypatch: pytest.MonkeyPatch, absolute: bool) -> None:
    monkeypatch.setattr(sys, "argv", [str(installed) if absolute else ".venv/bin/hebbian"])
    assert program() == ".venv/bin/hebbian"
    monkeypatch.chdir(installed.parent)
    monkeypatch.setattr(sys, "argv", [str(installed)])
    assert program() == "./hebbian"


def test_a_path_with_a_blank_is_quoted(installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = installed.parent.parent / "a b" / "hebbian"
    other.parent.mkdir()
    installed.rename(other)
    monkeypatch.setattr(sys, "argv", [str(other)])
    assert program() == "'.venv/a b/hebbian'"


def test_on_path_it_is_the_name(installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(installed.parent))
    monkeypatch.setattr(sys, "argv", [str(installed)])
    assert program() == "hebbian"


def test_as_a_module_it_names_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/somewhere/cli.py"])
    python, *rest = program().split()
    assert os.path.samefile(python, sys.executable)
    assert rest == ["-m", "hebbian_softmax.lab.cli"]


def test_called_from_python_it_is_the_name(installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["pytest"])
    assert program() == "hebbian"
