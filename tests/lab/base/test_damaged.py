"""Run folders that are damaged or cannot be written: one clear line, or the work goes on without the lost part."""

import json
import shutil
from pathlib import Path

import pytest

from tests.lab.test_cli import SMALL, call, error_line


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    runs = tmp_path_factory.mktemp("runs")
    assert call(*SMALL, "--quiet", "--runs", runs) == 0
    (run,) = runs.iterdir()
    return run


@pytest.fixture
def finished(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "runs" / original.name))


@pytest.mark.parametrize("output", [".", "", "/", ".."])
def test_a_page_needs_a_file_name(finished: Path, output: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("report", finished, "--output", output) == 1
    assert "it is a folder; name a file" in error_line(capsys)


@pytest.mark.parametrize("name", ["config.json", "result.json"])
@pytest.mark.parametrize("content", ["[]", "{}", "7", "{"])
def test_json_of_another_form_is_named(
    finished: Path, name: str, content: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (finished / name).write_text(content)
    for command in (["report", finished], ["compare", "longtail", "--quiet", "--resume", finished]):
        assert call(*command) == 1
        assert str(finished) in error_line(capsys)


@pytest.mark.parametrize(("name", "value"), [("steps", "many"), ("steps", None), ("gamma", 7), ("seed", [])])
def test_settings_of_another_form_are_named(
    finished: Path, name: str, value: object, capsys: pytest.CaptureFixture[str]
) -> None:
    config = json.loads((finished / "config.json").read_text())
    config["settings"][name] = value
    (finished / "config.json").write_text(json.dumps(config))
    assert call("compare", "longtail", "--quiet", "--resume", finished) == 1
    assert f"({name} must be" in error_line(capsys)


def test_a_lost_log_does_not_cost_the_result(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = json.loads((finished / "result.json").read_text())["metrics"]
    (finished / "log.jsonl").unlink()
    (finished / "result.json").unlink()
    assert call("compare", "longtail", "--resume", finished) == 0
    assert json.loads((finished / "result.json").read_text())["metrics"] == before
    assert "the log lacks the records of 30 steps from 2 to 60" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["report"], ["compare", "longtail", "--quiet", "--resume"]])
def test_a_page_that_cannot_be_refreshed_is_a_note(
    finished: Path, command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    (finished / "page.html").unlink()
    (finished / "page.html").mkdir()
    assert call(*command, finished) == 0
    captured = capsys.readouterr()
    assert captured.err == f"note: no new page: cannot write {finished / 'page.html'}: it is a folder; name a file\n"
    assert "all classes" in captured.out


def test_the_suggestions_put_their_runs_beside_this_one(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("compare", "longtail", "--quiet", "--resume", finished) == 0
    steps = capsys.readouterr().out.partition("Try next:\n")[2].splitlines()
    expected = f"  hebbian compare longtail --steps 60 --classes 20 --seed 1 --runs {finished.parent}  # "
    assert steps[0].startswith(expected)
    assert len(steps) == 3
