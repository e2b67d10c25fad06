"""The program that compares forms of the write trains, measures and repeats itself."""

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from benchmarks.rule_study.train import Trial, train

from hebbian_softmax import HebbianSoftmax
from hebbian_softmax.lab.data.corpus import write_corpus
from hebbian_softmax.lab.language.model.lstm import WordLSTM

SMALL = {"corpus": "toy", "hidden": 8, "embedding": 4, "batch": 2, "sequence": 4, "epochs": 2.0}
STRONG = {"recurrent_dropout": 0.4, "locked_dropout": True, "carry": True, "weight_decay": 1e-3}
TRANSFORMER = {"model": "transformer", "heads": 2, "layers": 2, "residual_dropout": 0.1, "momentum": 0.9}


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
        {"write": "across", "epochs": 0.5, **STRONG},
        {"write": "across", "epochs": 0.5, **TRANSFORMER},
    ],
    ids=["plain", "literal", "across", "centred", "strong", "transformer"],
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


def test_each_setting_of_the_network_changes_the_result(data: Path) -> None:
    quick = {**SMALL, "epochs": 0.1, "momentum": 0.0}
    options = [{}, *({name: value} for name, value in STRONG.items()), {"momentum": 0.5}, TRANSFORMER]
    found = [train(Trial.of(quick | each), "cpu", data, time.time() + 60)["test"]["all"] for each in options]
    assert len(set(found)) == len(options)


def test_a_carried_state_is_that_of_the_text_before(data: Path) -> None:
    """Without learning, the last loss is that of the last sequence after all words of its epoch."""
    still = {"learning_rate": 0.0, "input_dropout": 0.0, "output_dropout": 0.0, "epochs": 1.0, "seed": 3}
    trial = Trial.of(SMALL | still | {"carry": True})
    found = train(trial, "cpu", data, time.time() + 60)
    torch.manual_seed(3)
    head = HebbianSoftmax(4, 9, gamma=0.0, limit=0)
    model = WordLSTM(head, trial.network, memorizes=False)
    text = torch.randint(9, (600,), generator=torch.Generator().manual_seed(0))
    offset, length = np.random.RandomState(1003).randint(4), 4 * found["steps"]
    columns = [text[first : first + 598].view(2, -1).T[offset : offset + length] for first in (0, 1)]
    logits = model.features(columns[0])[0][-4:] @ head.weight.T
    assert found["loss"] == pytest.approx(
        F.cross_entropy(logits.flatten(0, 1), columns[1][-4:].flatten()).item(), rel=1e-5
    )
    with pytest.raises(ValueError, match="the state of a transformer cannot be carried"):
        train(Trial.of(SMALL | TRANSFORMER | {"carry": True}), "cpu", data, time.time() + 60)


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, STRONG, TRANSFORMER], ids=["plain", "strong", "transformer"])
def test_steps_in_a_graph_learn_on_a_gpu(data: Path, options: dict[str, Any]) -> None:
    sizes = {"hidden": 32, "embedding": 32, "batch": 8, "sequence": 8, "epochs": 20.0, "write": "across"}
    found = train(Trial.of(SMALL | sizes | options), "cuda", data, time.time() + 300)
    assert found["steps"] > 100  # nearly all of them are replays
    assert 1 < found["test"]["all"] < 9.5  # nine words, equally often
