"""The command `hebbian` from a user's side."""

import io
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hebbian_softmax import __version__
from hebbian_softmax.lab.base.runs import open_run
from hebbian_softmax.lab.cli import main
from tests.lab.processes import hebbian, start, wait_for

SMALL = ["compare", "longtail", "--classes", "20", "--steps", "60"]
LONGER = ["compare", "longtail", "--classes", "20", "--steps", "300"]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def call(*arguments: str | Path) -> int:
    """Run a command in this process and return its exit code, even if argparse exits by itself."""
    try:
        return main([str(argument) for argument in arguments])
    except SystemExit as stop:
        return int(stop.code or 0)


def error_line(capsys: pytest.CaptureFixture[str]) -> str:
    captured = capsys.readouterr()
    assert captured.out == ""
    last = captured.err.splitlines()[-1]
    assert "error: " in last
    assert "Traceback" not in captured.err
    return last


def new_run(runs: Path, *words: str) -> Path:
    """Run a command to its end and return its run folder, the only one in `runs`."""
    assert call(*words, "--runs", runs) == 0
    (run,) = runs.iterdir()
    return run


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return new_run(tmp_path_factory.mktemp("runs"), *SMALL, "--quiet")


@pytest.fixture
def damaged(finished: Path, tmp_path: Path) -> Path:
    """Return a copy of the finished run, for the test to damage."""
    return Path(shutil.copytree(finished, tmp_path / "runs" / finished.name))


def numbers(run: Path) -> dict[str, Any]:
    result = open_run(run).result()
    assert result is not None
    return {**result["metrics"], "seconds": None}


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("--version") == 0
    assert capsys.readouterr().out == f"hebbian-softmax {__version__}\n"
    for arguments in (["--help"], ["compare", "--help"], ["compare", "longtail", "--help"], ["report", "--help"]):
        assert call(*arguments) == 0
    assert "--learning-rate" in capsys.readouterr().out


def test_help_works_where_greek_letters_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    assert call("compare", "longtail", "--help") == 0
    sys.stdout.flush()
    assert b"? of the Hebbian rule" in written.getvalue()


def test_a_comparison_leaves_everything_in_its_run_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = new_run(tmp_path / "runs", *SMALL)
    expected = {"config.json", "log.jsonl", "checkpoint.pt", "result.json", "accuracy.png", "page.html"}
    assert {path.name for path in run.iterdir()} == expected
    captured = capsys.readouterr()
    assert "all classes" in captured.out
    assert str(run / "accuracy.png") in captured.out
    assert "Try next:" in captured.out
    assert "60/60 steps" in captured.err
    assert open_run(run).settings["classes"] == 20


def test_json_alone_is_on_standard_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(*SMALL, "--json", "--runs", tmp_path) == 0
    captured = capsys.readouterr()
    result = json.loads(captured.out)
    assert result["settings"]["classes"] == 20
    assert 0 <= result["metrics"]["accuracy"]["all classes"]["hebbian"] <= 1
    assert Path(result["run"]).is_dir()
    assert "all classes" in captured.err


def test_the_same_seed_gives_the_same_numbers_and_quiet_says_nothing_else(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert numbers(new_run(tmp_path, *SMALL, "--quiet")) == numbers(finished)
    assert capsys.readouterr().err == ""


def test_resuming_a_finished_run_shows_it_again(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (finished / "result.json").read_bytes()
    assert call("compare", "longtail", "--quiet", "--resume", finished, "--classes", "20") == 0
    shown, _, suggested = capsys.readouterr().out.partition("Try next:\n")
    assert "all classes" in shown
    expected = f"  hebbian compare longtail --steps 60 --classes 20 --seed 1 --runs {finished.parent}  # "
    assert suggested.startswith(expected)  # with its runs beside this one
    assert len(suggested.splitlines()) == 3
    assert (finished / "result.json").read_bytes() == before


def test_the_bare_command_shows_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert call() == 0
    assert "Start with: hebbian compare glyphs" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["compare"], 2, "required"),
        (["compare", "nothing"], 2, "invalid choice: 'nothing'"),
        (["compare", "longtail", "--classes", "19"], 2, "--classes: must be a whole number from 20"),
        (["compare", "longtail", "--step", "5"], 2, "unrecognized arguments: --step"),
        (["compare", "longtail", "--runs", "/proc/nowhere"], 1, "cannot write /proc/nowhere"),
        (["compare", "longtail", "--runs", "/dev/null"], 1, "is a file"),
        (["compare", "longtail", "--resume", "/dev"], 1, "not a run folder"),
        (["compare", "longtail", "--resume", "--runs", "/dev"], 1, "no unfinished run"),
        (["report", "/dev"], 1, "not a run folder"),
    ],
)
def test_a_mistake_ends_in_one_clear_line(
    arguments: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(*arguments) == code
    assert message in error_line(capsys)


def test_a_run_in_use_is_not_touched(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with open_run(finished).held():
        assert call("compare", "longtail", "--quiet", "--resume", finished) == 1
    assert "in use" in error_line(capsys)


def test_without_matplotlib_nothing_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert call(*SMALL, "--runs", tmp_path / "runs") == 1
    assert "pip install 'hebbian-softmax[lab]'" in error_line(capsys)
    assert not (tmp_path / "runs").exists()


def test_without_numpy_only_what_needs_it_fails_and_says_so(tmp_path: Path) -> None:
    commands = [[*SMALL, "--runs", str(tmp_path / "runs")], ["report", str(tmp_path)]]
    script = f"""
import sys
sys.modules["numpy"] = None
from hebbian_softmax.lab.cli import main
print(*(main(words) for words in {commands!r}))
main(["--version"])
"""
    command = [sys.executable, "-W", "ignore", "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT)
    assert done.stdout == f"1 1\nhebbian-softmax {__version__}\n"
    assert done.stderr.splitlines() == [
        "hebbian: error: this command needs numpy: pip install 'hebbian-softmax[lab]', "
        "or in a checkout of the project pip install '.[lab]'",
        f"hebbian: error: {tmp_path} is not a run folder: it has no config.json",
    ]
    assert not (tmp_path / "runs").exists()


def test_report_of_one_run(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (finished / "page.html").unlink()
    assert call("report", finished, "--markdown") == 0
    assert "| all classes | 20 |" in capsys.readouterr().out
    assert call("report", finished, "--json") == 0
    assert not (finished / "page.html").exists()  # who prints tables did not ask for a page
    assert call("report", finished) == 0
    assert (finished / "page.html").exists()
    assert call("report", finished, "--markdown", "--output", finished / "other.html") == 0
    (finished / "other.html").unlink()


def test_report_as_json(finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("report", finished, finished, "--json", "--output", tmp_path / "page.html") == 0
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert first == second
    assert first["settings"]["classes"] == 20
    assert first["versions"]
    assert first["log"][-1]["step"] == 60
    assert {**first["metrics"], "seconds": None} == numbers(finished)


def test_report_of_several_runs(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert call("report", finished, finished) == 0
    shown = capsys.readouterr().out
    assert shown.count("seen fewer than 10 times  ") == 1  # one table for both
    assert "plain softmax (1)" in shown
    assert "Hebbian softmax (2)" in shown
    assert (tmp_path / "report.html").exists()
    assert call("report", finished, "--output", tmp_path / "missing" / "page.html") == 1
    assert "cannot write" in capsys.readouterr().err


@pytest.fixture(scope="module")
def through(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run that nobody stopped."""
    return new_run(tmp_path_factory.mktemp("through"), *LONGER, "--quiet")


@pytest.mark.slow
@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_stopped_comparison_is_resumed_to_the_same_numbers(
    tmp_path: Path, through: Path, signum: signal.Signals, code: int
) -> None:
    """Compare a run that was stopped by a signal and then resumed with one that ran through."""
    runs = tmp_path / "runs"
    process = start(hebbian, [*LONGER, "--runs", str(runs)], tmp_path)
    wait_for(runs, "*/log.jsonl", process)
    assert process.pid is not None
    os.kill(process.pid, signum)
    process.join()
    assert process.exitcode == code
    *_, told, hint = (tmp_path / "stderr").read_text().splitlines()
    (run,) = runs.iterdir()
    checkpoint = open_run(run).load_checkpoint()
    assert checkpoint is not None
    assert 0 < checkpoint["step"] < 300
    assert f"stopped at step {checkpoint['step']}" in told
    assert hint == f"  hebbian compare longtail --resume {run}"

    assert call("compare", "longtail", "--resume", "--quiet", "--runs", runs) == 0
    assert numbers(run) == numbers(through)
    steps = [[record["step"] for record in open_run(path).records()] for path in (run, through)]
    assert steps[0] == steps[1]


@pytest.mark.parametrize("name", ["config.json", "result.json"])
@pytest.mark.parametrize("content", ["[]", "{}", "7", "{"])
def test_json_of_another_form_is_named(
    damaged: Path, name: str, content: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (damaged / name).write_text(content)
    for command in (["report", damaged], ["compare", "longtail", "--quiet", "--resume", damaged]):
        assert call(*command) == 1
        assert str(damaged) in error_line(capsys)


def test_a_lost_log_does_not_cost_the_result(damaged: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = json.loads((damaged / "result.json").read_text())["metrics"]
    (damaged / "log.jsonl").unlink()
    (damaged / "result.json").unlink()
    assert call("compare", "longtail", "--resume", damaged) == 0
    assert json.loads((damaged / "result.json").read_text())["metrics"] == before
    assert "the log lacks the records of 30 steps from 2 to 60" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["report"], ["compare", "longtail", "--quiet", "--resume"]])
def test_a_page_that_cannot_be_refreshed_is_a_note(
    damaged: Path, command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    (damaged / "page.html").unlink(missing_ok=True)
    (damaged / "page.html").mkdir()
    assert call(*command, damaged) == 0
    captured = capsys.readouterr()
    assert captured.err == f"note: no new page: cannot write {damaged / 'page.html'}: it is a folder; name a file\n"
    assert "all classes" in captured.out
