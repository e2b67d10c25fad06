"""Starting and resuming a recipe: which settings a run goes on with, and which are refused."""

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from hebbian_softmax.lab.base.errors import LabError
from hebbian_softmax.lab.base.runs import Run, create_run
from hebbian_softmax.lab.base.settings import integer, setting
from hebbian_softmax.lab.report.recipe import Recipe
from hebbian_softmax.lab.report.result import Result
from tests.lab.editing import edited


@dataclass(frozen=True)
class Settings:
    steps: int = setting(10, "training steps", integer(1))
    tied: bool = setting(True, "share the weights")


class Toy(Recipe):
    """Does nothing and says with which settings."""

    def perform(self, run: Run, settings: Any, quiet: bool) -> tuple[Result, dict[str, bytes]]:
        return Result("toy", f"{settings}", {}, [], [], []), {}


TOY = Toy("compare", "toy", "help", "description", Settings)


def execute(*words: str | Path) -> int:
    parser = argparse.ArgumentParser()
    TOY.add_options(parser)
    return TOY.execute(parser.parse_args([*map(str, words), "--quiet"]))


def test_settings_are_written_as_they_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert execute("--runs", tmp_path, "--no-tied") == 0
    (run,) = tmp_path.iterdir()
    assert json.loads((run / "config.json").read_text())["settings"] == {"steps": 10, "tied": False}
    assert "tied=False" in capsys.readouterr().out


@pytest.mark.parametrize("tied", [True, "yes"])
def test_a_run_of_either_form_goes_on(tmp_path: Path, tied: bool | str, capsys: pytest.CaptureFixture[str]) -> None:
    """Older versions wrote `yes` and `no` where a setting is now true or false."""
    run = create_run(tmp_path, "toy", "compare toy", {"steps": 10, "tied": tied})
    with pytest.raises(LabError, match="was started with tied = True, not False: omit that option"):
        execute("--resume", run.path, "--no-tied")
    assert execute("--resume", run.path, "--tied", "--steps", "10") == 0
    assert "Settings(steps=10, tied=True)" in capsys.readouterr().out


def test_another_command_or_form_is_refused(tmp_path: Path) -> None:
    other = create_run(tmp_path, "other", "compare omniglot", {})
    with pytest.raises(LabError, match="is a run of 'hebbian compare omniglot', not of 'hebbian compare toy'"):
        execute("--resume", other.path)
    older = create_run(tmp_path, "toy", "compare toy", {"steps": 10})
    with pytest.raises(LabError, match=r"another version of hebbian-softmax .*tied"):
        execute("--resume", older.path)


def test_other_versions_are_noted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = create_run(tmp_path, "toy", "compare toy", {"steps": 10, "tied": True})
    with edited(run.path / "config.json") as config:
        config["versions"] = {"torch": "1.0"}
    assert execute("--resume", run.path) == 0
    assert "was started with other versions" in capsys.readouterr().err
