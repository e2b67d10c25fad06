"""The commit that a record names."""

import subprocess
from pathlib import Path

import pytest

from hebbian_softmax.lab.base import environment


def test_the_commit_is_that_of_the_checkout_or_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True, check=False
    )
    if asked.returncode:
        pytest.skip("the tests are not in a checkout")
    assert environment.commit().removesuffix("-dirty").startswith(asked.stdout.strip())
    assert environment.commit(tmp_path / "environment.py") == "unknown"  # installed, and in no checkout
    monkeypatch.setenv("PATH", str(tmp_path))  # without git
    assert environment.commit() == "unknown"


def test_the_commit_of_another_checkout_is_not_ours(tmp_path: Path) -> None:
    """The package may be installed into a virtual environment inside somebody's repository."""
    who = ["-c", "user.name=a", "-c", "user.email=a@example.com"]
    try:
        for command in (["init", "-q"], [*who, "commit", "-q", "--allow-empty", "-m", "theirs"]):
            subprocess.run(["git", *command], cwd=tmp_path, check=True)
    except FileNotFoundError:
        pytest.skip("no git on this machine")
    assert environment.commit(tmp_path / "environment.py") == "unknown"


def test_a_commit_that_is_tagged_is_named_by_its_number(tmp_path: Path) -> None:
    who = ["-c", "user.name=a", "-c", "user.email=a@example.com"]
    file = tmp_path / "environment.py"
    file.touch()
    commands = (
        ["init", "-q"],
        ["add", "."],
        [*who, "commit", "-q", "-m", "ours"],
        [*who, "tag", "-a", "-m", "v", "v1"],
    )
    try:
        for command in commands:
            subprocess.run(["git", *command], cwd=tmp_path, check=True)
    except FileNotFoundError:
        pytest.skip("no git on this machine")
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=tmp_path, capture_output=True, text=True, check=True)
    found = environment.commit(file)
    assert len(found) >= 7
    assert head.stdout.startswith(found)
