"""The example of several processes: DDP and FSDP2, alone and under torchrun."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist
from examples.distributed import main

from tests import ROOT


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
@pytest.mark.filterwarnings("default")
def test_one_process_trains(
    strategy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_PORT", "0")  # any that is free
    main(["--strategy", strategy, "--quick", "--device", "cpu"])
    shown = capsys.readouterr().out
    assert f"{strategy} on 1 processes with gloo" in shown
    assert "counted 2,560 examples" in shown
    assert "all processes have the same rows" in shown
    assert not dist.is_initialized()


def test_without_torchrun_it_says_how_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    with pytest.raises(SystemExit, match="torchrun --nproc-per-node 2"):
        main([])


@pytest.mark.slow  # two processes import torch; tests/distributed guards training on two ranks
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_torchrun_trains_on_two_processes(strategy: str) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [str(ROOT / "examples" / "distributed.py"), "--quick", "--device", "cpu", "--strategy", strategy]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert f"{strategy} on 2 processes with gloo" in done.stdout
    assert "counted 2,560 examples" in done.stdout
    assert "all processes have the same rows" in done.stdout
