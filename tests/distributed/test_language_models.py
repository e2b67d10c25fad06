"""Two processes train as one: the same losses and weights, one writer, one decision when to stop."""

from pathlib import Path
from typing import Any

import pytest
import torch

from hebbian_softmax.lab.base.errors import LabError
from hebbian_softmax.lab.base.ranks import Ranks, current_ranks, joined
from hebbian_softmax.lab.base.runs import create_run, open_run
from tests.distributed.pool import Pool
from tests.lab.language import on_ranks

STEPS = 4


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"accumulate": 2},
        {"optimizer": "adam", "tied": False, "layers": 2},
        {"model": "transformer", "heads": 3, "layers": 2, "locked_dropout": True},
    ],
    ids=["one-pass", "in parts", "untied", "transformer"],
)
def test_two_ranks_are_one_process_on_the_joined_batch(pool: Pool, changes: dict[str, Any]) -> None:
    losses, weights = on_ranks.losses_and_weights(STEPS, **{**changes, "accumulate": 1})
    for found, tensors in pool.run(2, on_ranks.losses_and_weights, STEPS, **changes):
        for one, other in zip(losses, found, strict=True):
            assert one == pytest.approx(other, rel=1e-4)
        assert set(tensors) == set(weights)
        for name, value in weights.items():
            torch.testing.assert_close(
                tensors[name], value, rtol=1e-3, atol=1e-4, msg=lambda text, n=name: f"{n}: {text}"
            )
        assert int(tensors["hebbian_head.counts"].sum()) == STEPS * 20


def test_the_first_rank_writes_alone(pool: Pool, tmp_path: Path) -> None:
    run = create_run(tmp_path, "toy", "toy", {})
    (first, written), (second, nothing) = pool.run(2, on_ranks.train_in, str(run.path))
    assert first == second == 8
    assert written == ["log", "log", "save"]
    assert nothing == []
    assert [record["step"] for record in run.records()] == [4, 8]


@pytest.mark.parametrize("stop_rank", [0, 1])
def test_a_signal_to_one_rank_stops_all_at_the_same_step(pool: Pool, tmp_path: Path, stop_rank: int) -> None:
    run = create_run(tmp_path, "toy", "toy", {})
    (first, written), (second, nothing) = pool.run(2, on_ranks.train_in, str(run.path), stop_rank)
    assert first == second == 3
    assert (written, nothing) == (["save", "stopped"], ["stopped"])
    checkpoint = run.load_checkpoint()
    assert checkpoint is not None
    assert checkpoint["step"] == 3
    assert [each for each, _ in pool.run(2, on_ranks.train_in, str(run.path))] == [8, 8]  # both go on from there


def test_ranks_agree_on_a_measured_number_of_steps(pool: Pool, tmp_path: Path) -> None:
    run = create_run(tmp_path, "toy", "toy", {})
    one, other = pool.run(2, on_ranks.plan_in, str(run.path))
    assert one == other >= 1


def test_the_command_runs_on_every_rank_and_leaves_one_run(pool: Pool, tmp_path: Path) -> None:
    options = "--hidden 8 --embedding 6 --batch 4 --sequence 5 --vocabulary 30 --tokens 500 --steps 6 --evaluations 2"
    words = ["compare", "zipf", *options.split(), "--device", "cpu", "--tensorboard", "no", "--quiet"]
    assert pool.run(2, on_ranks.command, *words, "--runs", str(tmp_path)) == [0, 0]
    (path,) = tmp_path.iterdir()
    result = open_run(path).result()
    assert result is not None
    assert result["metrics"]["processes"] == 2
    assert [record["step"] for record in open_run(path).records()] == [3, 6]
    again = pool.run(2, on_ranks.command, "compare", "zipf", "--resume", str(path), "--quiet")  # shows it again
    assert again == [0, 0]
    refused = pool.run(2, on_ranks.command, "compare", "zipf", "--resume", str(path), "--gamma", "0.9", "--quiet")
    assert refused == [1, 1]  # and nobody waits for the first rank


def test_a_carried_state_is_refused_on_every_rank(pool: Pool, tmp_path: Path) -> None:
    words = "compare zipf --vocabulary 30 --tokens 500 --batch 4 --sequence 5 --steps 2 --carry --device cpu --quiet"
    assert pool.run(2, on_ranks.command, *words.split(), "--runs", str(tmp_path)) == [1, 1]


def test_alone_there_is_nothing_to_agree_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with joined("cpu") as alone:
        assert alone == current_ranks() == Ranks(0, 1)
    assert alone.any(True, False) == (True, False)
    assert alone.shared("text") == "text"
    assert alone.mean(torch.tensor(2.0)) == 2


def test_more_processes_than_gpus_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(LabError, match="process 2 on a machine with 1 GPUs: give --nproc-per-node"), joined("cuda"):
        pass
