"""What a record says of where it was made."""

import subprocess
from pathlib import Path

import pytest

from hebbian_softmax.lab import environment


def test_the_commit_is_that_of_the_checkout(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True, check=False
    )
    if asked.returncode:
        pytest.skip("the tests are not in a checkout")
    found = environment.commit()
    assert found.removesuffix("-dirty").startswith(asked.stdout.strip())
    monkeypatch.setattr(environment, "__file__", str(tmp_path / "environment.py"))
    assert environment.commit() == "unknown"  # installed, and in no checkout


def test_without_git_it_is_unknown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert environment.commit() == "unknown"
