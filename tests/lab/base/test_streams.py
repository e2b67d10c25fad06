"""Streams that are closed, full or without a reader, and signals at any time."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from hebbian_softmax.lab import experiments
from hebbian_softmax.lab.base.runs import Run
from hebbian_softmax.lab.base.settings import integer, setting
from hebbian_softmax.lab.cli import main
from hebbian_softmax.lab.report.recipe import Recipe
from hebbian_softmax.lab.report.result import Result
from tests.lab.processes import run_hebbian
from tests.lab.test_cli import ENVIRONMENT, call, error_line

TINY = ["compare", "longtail", "--classes", "20", "--steps", "3"]


def assert_finished(runs: Path) -> None:
    (run,) = runs.iterdir()
    assert json.loads((run / "result.json").read_text())["title"]
    assert json.loads((run / "config.json").read_text())  # no stream's text went into a file of the run


@pytest.mark.parametrize(
    ("stdout", "stderr"),
    [
        *(("file", "closed"), ("closed", "file"), ("closed", "closed")),
        *(("file", "full"), ("unread", "unread"), ("file", "unread"), ("unread", "file")),
    ],
)
def test_no_stream_keeps_a_run_from_finishing(tmp_path: Path, stdout: str, stderr: str) -> None:
    code, _, errors = run_hebbian([*TINY, "--runs", tmp_path / "runs"], tmp_path, stdout=stdout, stderr=stderr)
    assert "Traceback" not in errors
    assert "Exception" not in errors
    assert code == 0
    assert_finished(tmp_path / "runs")


@pytest.mark.slow  # The test above closes the same streams without a shell, and without the import of torch.
@pytest.mark.parametrize("where", ["2>&-", "2>&1 | head -1"])
def test_the_shell_closes_a_stream_at_first_or_later(tmp_path: Path, where: str) -> None:
    command = shlex.join([sys.executable, "-m", "hebbian_softmax.lab.cli", *TINY, "--runs", str(tmp_path)])
    command = f"set -o pipefail; {command} {where}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, env=ENVIRONMENT)
    assert (done.returncode, done.stderr) == (0, "")
    assert_finished(tmp_path)


def test_output_that_cannot_be_written_is_one_clear_line(tmp_path: Path) -> None:
    found = run_hebbian([*TINY, "--quiet", "--runs", tmp_path / "runs"], tmp_path, stdout="full")
    assert found == (1, "", "hebbian: error: reading or writing failed: No space left on device\n")


def test_a_missing_permission_is_one_clear_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied", str(tmp_path))

    monkeypatch.setattr(Path, "is_file", refuse)
    assert call("report", tmp_path) == 1
    assert "Permission denied" in error_line(capsys)


@dataclass(frozen=True)
class Signal:
    signum: int = setting(0, "signal that the process sends itself", integer(0))


class Stopping(Recipe):
    """Stops itself outside the training loop the first time, and finishes the second time."""

    def perform(self, run: Run, settings: Any, quiet: bool) -> tuple[Result, dict[str, bytes]]:
        if not (run.path / "begun").exists():
            (run.path / "begun").touch()
            os.kill(os.getpid(), settings.signum)
            time.sleep(60)
        return Result("title", "finished", {}, [], [], []), {}


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_outside_the_training_tells_how_to_go_on(
    tmp_path: Path, signum: signal.Signals, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    experiments.add(Stopping("compare", "stopping", "help", "description", Signal))
    assert call("compare", "stopping", "--signum", str(int(signum)), "--quiet", "--runs", tmp_path) == code
    (run,) = tmp_path.iterdir()
    told, hint = capsys.readouterr().err.splitlines()
    assert told == "hebbian: stopped at once; go on with:"
    assert hint == f"  hebbian compare stopping --resume {run}"
    assert call("compare", "stopping", "--quiet", "--resume", run) == 0
    assert "finished" in capsys.readouterr().out


def test_a_signal_before_there_is_a_run_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    class Words(list[str]):
        def __iter__(self):  # type: ignore[no-untyped-def]
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(10)

    assert main(Words(["report"])) == 143
    assert capsys.readouterr().err == "hebbian: stopped\n"
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
