"""A training that is stopped or killed goes on to the same bits, and the processes of torchrun make one run."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from hebbian_softmax.lab.base.runs import Run
from tests import ROOT
from tests.lab.language.commands import FEW, MANY, call, only
from tests.lab.language.toy import folder

__all__ = ["folder"]


def state(run: Run) -> dict[str, Any]:
    checkpoint = run.load_checkpoint()
    assert checkpoint is not None
    assert checkpoint.pop("seconds") > 0
    # Every process begins with other states of Python's and NumPy's generators, which training does not use.
    return {**checkpoint, "random": checkpoint["random"]["torch"]}


def assert_same(one: Any, other: Any) -> None:
    if isinstance(one, dict):
        assert list(one) == list(other)
        one, other = list(one.values()), list(other.values())
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
    elif isinstance(one, list | tuple):
        for first, second in zip(one, other, strict=True):
            assert_same(first, second)
    else:
        assert one == other


def start(pause: float, *arguments: str | Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.lab.language.toy_words", str(pause), *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, cwd=ROOT, text=True, stderr=subprocess.PIPE, env=environment)


def wait_for_checkpoint(runs: Path) -> Run:
    deadline = time.monotonic() + 60
    while not list(runs.glob("*/checkpoint.pt")):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return only(runs)


@pytest.fixture(scope="module")
def whole(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    runs = tmp_path_factory.mktemp("whole")
    assert call("compare", folder, *MANY, "--quiet", "--runs", runs) == 0
    return only(runs)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_stopped_run_ends_in_the_same_bits(folder: Path, whole: Run, tmp_path: Path, how: signal.Signals) -> None:
    with start(0.03, "compare", folder, *MANY, "--runs", tmp_path) as process:
        run = wait_for_checkpoint(tmp_path)
        process.send_signal(how)
        _, errors = process.communicate()
    assert process.returncode == (-9 if how == signal.SIGKILL else 128 + how)
    assert how == signal.SIGKILL or "all saved; go on with" in errors
    checkpoint = run.load_checkpoint()
    assert checkpoint is not None
    assert 0 < checkpoint["step"] < 30

    assert call("compare", "corpus", "--resume", run.path, "--quiet") == 0
    assert_same(state(run), state(whole))
    one, other = run.result(), whole.result()
    assert one is not None
    assert other is not None
    assert one["metrics"]["scores"] == other["metrics"]["scores"]
    timed = ("seconds", "words_per_second")
    logs = [[{k: v for k, v in r.items() if k not in timed} for r in each.records()] for each in (run, whole)]
    assert logs[0] == logs[1]


@pytest.mark.slow  # tests/distributed has the same test without starting three processes
def test_torchrun_trains_with_two_processes(folder: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    command += ["-m", "hebbian_softmax.lab.cli", "train", str(folder), *FEW, "--quiet", "--runs", str(tmp_path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    result = only(tmp_path).result()
    assert result is not None
    assert result["metrics"]["processes"] == 2
    assert [record["step"] for record in only(tmp_path).records()] == [4, 8, 12]
