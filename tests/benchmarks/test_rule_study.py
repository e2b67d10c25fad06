"""The program that compares forms of the write trains, measures and repeats itself."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.rule_study.train import Trial, train

from hebbian_softmax.lab.data.corpus import write_corpus

SMALL = {"corpus": "toy", "hidden": 8, "embedding": 4, "batch": 2, "sequence": 4, "epochs": 2.0}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    words = [f"w{i}" for i in range(9)]
    text = torch.randint(9, (600,), generator=torch.Generator().manual_seed(0)).numpy()
    splits = {split: [text] for split in ("train", "valid", "test")}
    write_corpus(tmp_path / "toy", "toy", splits, words, torch.full((9,), 60), {"corpus": "toy"}, [])
    return tmp_path


@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"write": "literal"}, marks=pytest.mark.slow),
        {"write": "across", "start": 0.1, "fade": True, "first": True, "counted": "start"},
        pytest.param(
            {"write": "centred", "rate": "kalman", "gamma": 0.1, "surprise": 1.0, "seen": True}, marks=pytest.mark.slow
        ),
    ],
    ids=lambda options: options.get("write", "plain"),
)
def test_the_same_trial_gives_the_same_numbers(data: Path, options: dict[str, Any]) -> None:
    first, second = (train(Trial.of(SMALL | options), "cpu", data, time.time() + 60) for _ in range(2))
    assert first["test"] == second["test"]
    assert 1 < first["test"]["all"] < 30
    assert first["trial"] == second["trial"]


def test_a_write_changes_the_result_and_time_can_run_out(data: Path) -> None:
    plain, written = (
        train(Trial.of(SMALL | options), "cpu", data, time.time() + 60)["test"]["all"]
        for options in ({}, {"write": "across", "limit": 1e9})
    )
    assert plain != written
    with pytest.raises(TimeoutError, match="when the time was over"):
        train(Trial.of(SMALL), "cpu", data, time.time() - 1)
