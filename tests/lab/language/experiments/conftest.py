"""Miniature experiments for tests: a corpus of dated words, small models, and each experiment performed only once."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hebbian_softmax.lab.base.runs import Run, open_run
from hebbian_softmax.lab.data.corpus import write_corpus
from tests import ROOT
from tests.lab.language.commands import SIZES, call, only
from tests.lab.language.toy import corpus

SMALL = f"{SIZES} --size tiny --evaluations 2 --steps 6".replace("--tensorboard no", "").split()
DAYS = {"train": "1987-02-01..1987-06-17", "valid": "1987-06-18..1987-06-29", "test": "1987-10-19..1987-10-20"}
JUNE, LAST = date(1987, 6, 1).toordinal(), date(1987, 6, 17).toordinal()
Reproduce = Callable[..., tuple[Run, dict[str, Any]]]
Refusal = Callable[..., str]


@pytest.fixture
def refusal(capsys: pytest.CaptureFixture[str]) -> Refusal:
    """Call `hebbian` with arguments that it refuses, and return the last line of its error."""

    def refuse(*arguments: str | Path) -> str:
        capsys.readouterr()
        assert call(*arguments) in (1, 2)
        error = capsys.readouterr().err
        assert "Traceback" not in error
        return str(error.splitlines()[-1])

    return refuse


@pytest.fixture(scope="session")
def dated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus in which every third word was first seen in June, the others around 90 days before training ends."""
    made = corpus()
    path = tmp_path_factory.mktemp("corpora") / "dated"
    splits = {name: ids.numpy() for name, ids in made.splits.items()}
    days = (JUNE, LAST - 90, LAST - 89)  # The second is one day too early.
    first_days = np.array([days[word % 3] for word in range(len(made.words))], np.int32)
    write_corpus(path, "reuters", splits, made.words, made.counts.tolist(), DAYS, [], {"first_days": first_days})
    return path


@pytest.fixture(scope="session")
def reproduce(dated: Path, tmp_path_factory: pytest.TempPathFactory) -> Reproduce:
    """Return the run and the result of `hebbian reproduce`, the same for the same options. Do not change the run."""
    done: dict[tuple[str, ...], Run] = {}

    def run(*command: str) -> tuple[Run, dict[str, Any]]:
        if command not in done:
            runs = tmp_path_factory.mktemp("runs")
            assert call("reproduce", *command, *SMALL, "--corpus", dated, "--quiet", "--runs", runs) == 0
            done[command] = only(runs)
        return done[command], result_of(done[command])

    return run


def unfinished(run: Run, folder: Path, *trials: str) -> Run:
    """Return a copy of a finished run without its result, and without some of its trials."""
    copy = Path(shutil.copytree(run.path, folder / "copy"))
    (copy / "result.json").unlink()
    for trial in trials:
        shutil.rmtree(copy / "trials" / trial)
    return open_run(copy)


def stop_at(file: str, how: signal.Signals, runs: Path, *arguments: str | Path) -> tuple[Run, int, str]:
    """Start `hebbian` with slow steps, and send it a signal once its run folder has a file that matches `file`.

    Returns the run, the exit code, and what was written to standard error.
    """
    command = [sys.executable, "-m", "tests.lab.language.toy_words", "0.05", *map(str, arguments), "--runs", str(runs)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, cwd=ROOT, text=True, stderr=subprocess.PIPE, env=environment) as process:
        deadline = time.monotonic() + 120
        while not list(runs.glob(f"*/{file}")):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        process.send_signal(how)
        _, errors = process.communicate()
    return only(runs), process.returncode, errors


def checkpoint_of(run: Run) -> dict[str, Any]:
    checkpoint = run.load_checkpoint()
    assert checkpoint is not None
    return checkpoint


def result_of(run: Run) -> dict[str, Any]:
    result = run.result()
    assert result is not None
    return result


def table(result: dict[str, Any], title: str) -> dict[str, dict[str, Any]]:
    """Return the rows of the table whose title begins so, by their first cell."""
    (found,) = [each for each in result["tables"] if each["title"].startswith(title)]
    return {row[0]: dict(zip(found["columns"][1:], row[1:], strict=True)) for row in found["rows"]}


def words_of(run: Run, trial: str, split: str) -> tuple[Any, Any]:
    """Return the stored losses and ids of the words that a trial's model predicted."""
    with np.load(run.path / "trials" / trial / f"{split}-words.npz") as words:
        return words["nll"].astype("f8"), words["ids"]
