"""Streams that are closed, full or without a reader, and signals at any time."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hebbian_softmax.lab.cli import main
from tests.lab.test_cli import COMMAND, ENVIRONMENT, SMALL, call, error_line

SHELL = shlex.join([*COMMAND, *SMALL])


def shell(command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["bash", "-c", command], capture_output=True, text=True, env=ENVIRONMENT)


@pytest.mark.parametrize("where", ["2>&-", ">&-", ">&- 2>&-", "2>/dev/full", "2>&1 | true", "2> >(true)"])
def test_no_stream_keeps_a_run_from_finishing(tmp_path: Path, where: str) -> None:
    done = shell(f"set -o pipefail; {SHELL} --runs {tmp_path} {where}")
    assert "Traceback" not in done.stderr
    assert "Exception" not in done.stderr
    assert done.returncode == 0
    (run,) = tmp_path.iterdir()
    assert json.loads((run / "result.json").read_text())["title"]
    assert json.loads((run / "config.json").read_text())  # no stream's text went into a file of the run


def test_progress_without_a_reader_does_not_stop_the_training(tmp_path: Path) -> None:
    """The reader leaves after the first line, long before the last step."""
    done = shell(f"set -o pipefail; {SHELL} --runs {tmp_path} 2>&1 | head -1")
    assert done.returncode == 0
    assert len(list(tmp_path.glob("*/result.json"))) == 1


def test_output_that_cannot_be_written_is_one_clear_line(tmp_path: Path) -> None:
    done = shell(f"{SHELL} --quiet --runs {tmp_path} >/dev/full")
    assert done.returncode == 1
    assert done.stderr == "hebbian: error: reading or writing failed: No space left on device\n"


def test_a_missing_permission_is_one_clear_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied", str(tmp_path))

    monkeypatch.setattr(Path, "is_file", refuse)
    assert call("report", tmp_path) == 1
    assert "Permission denied" in error_line(capsys)


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("place", ["Comparison.__init__", "draw"])
def test_a_signal_outside_the_training_tells_how_to_go_on(
    tmp_path: Path, signum: signal.Signals, code: int, place: str
) -> None:
    script = f"""
import os, sys
from hebbian_softmax.lab.cli import main
from hebbian_softmax.lab import longtail
def stop(*_):
    os.kill(os.getpid(), {int(signum)})
    while True: pass
longtail.{place} = stop
sys.exit(main({[*SMALL, "--quiet", "--runs", str(tmp_path)]!r}))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=ENVIRONMENT, timeout=60)
    (run,) = tmp_path.iterdir()
    assert done.returncode == code
    told, hint = done.stderr.splitlines()
    assert told == "hebbian: stopped at once; go on with:"
    assert hint == f"  hebbian compare longtail --resume {run}"
    assert call("compare", "longtail", "--quiet", "--resume", run) == 0


def test_a_signal_before_there_is_a_run_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Stopping(list[str]):
        def __iter__(self):  # type: ignore[no-untyped-def]
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(10)

    assert main(Stopping(["report"])) == 143
    assert capsys.readouterr().err == "hebbian: stopped\n"
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
