"""A training settles its number of steps once, and writes files for TensorBoard."""

import importlib.util
import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from hebbian_softmax.lab.base.errors import LabError
from hebbian_softmax.lab.base.runs import Run, create_run
from hebbian_softmax.lab.language.experiments.train import (
    BOARD_FOLDER,
    STEPS_FILE,
    Speed,
    affordable_steps,
    board,
    keep_steps,
    measure_speed,
    settle_steps,
)
from hebbian_softmax.lab.language.model import LanguageModel
from hebbian_softmax.lab.language.names import ONLY
from hebbian_softmax.lab.language.settings import Settings
from hebbian_softmax.lab.language.task import WordTask
from tests.lab.language.model.networks import watch_lstm
from tests.lab.language.toy import corpus, device, settings


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return create_run(tmp_path, "toy", "toy", {})


def settle(run: Run, made: list[WordTask] | None = None, **changes: Any) -> int:
    given = settings(Settings, **changes)

    def make(steps: int) -> WordTask:
        task = WordTask(corpus(), given, {ONLY: True}, steps=steps, device=device())
        if made is not None:
            made.append(task)
        return task

    steps = settle_steps(run, corpus(), given, make, time.monotonic())
    keep_steps(run, steps)
    return steps


def test_steps_or_epochs(tmp_path: Path) -> None:
    for changes, expected in (({"steps": 7}, 7), ({"epochs": 2.0}, 78), ({"epochs": 0.0}, 1)):
        made: list[WordTask] = []
        run = create_run(tmp_path, "toy", "toy", {})
        assert settle(run, made, **changes) == expected
        assert not made
        assert json.loads((run.path / STEPS_FILE).read_bytes()) == {"steps": expected}


def test_a_measured_number_is_kept(run: Run) -> None:
    made: list[WordTask] = []
    steps = settle(run, made, max_seconds=15.0, evaluations=1)
    assert steps > 1
    assert len(made) == 1
    plan = json.loads((run.path / STEPS_FILE).read_bytes())
    assert plan["steps"] == steps
    made.clear()
    assert settle(run, made, max_seconds=15.0, evaluations=1) == steps
    assert not made


def test_what_a_device_takes_to_get_warm_is_not_counted_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each way to read a text takes 50 s at first, then 2 s; the first four steps 10 s each, then 1 s."""
    now, warm, steps = 0.0, set(), 0

    def take_time(model: LanguageModel, words: torch.Tensor) -> None:
        nonlocal now, steps
        if model.training:
            now, steps = now + (1.0 if steps >= 4 else 10.0), steps + 1
        else:
            now += 2.0 if words.shape[1] in warm else 50.0
            warm.add(words.shape[1])

    watch_lstm(monkeypatch, take_time)
    monkeypatch.setattr("time.monotonic", lambda: now)
    given = settings(Settings, max_seconds=1000.0)
    task = WordTask(corpus(), given, {ONLY: True}, steps=1, device=device())
    predictions = sum(len(task.corpus.splits[split]) - 1 for split in ("valid", "test"))
    speed = measure_speed(task, given, 0.0, sample=10)
    assert speed == Speed(step=1.0, evaluation=2.0, final=pytest.approx(2.0 / 10 * predictions), spent=now)
    assert now == 40 + 5 + 100 + 2 + 2 * 2


def test_the_time_is_shared_out() -> None:
    speed = Speed(step=0.1, evaluation=2.0, final=7.0, spent=10.0)
    given = settings(Settings, max_seconds=100.0, evaluations=5)
    assert affordable_steps(given, speed) == 700  # 97 s minus 10 s, 7 s and 5 times 2 s, divided by 0.1 s


def test_too_little_time_is_one_clear_line(run: Run) -> None:
    with pytest.raises(LabError, match=r"--max-seconds 0.01 is too short: .* fewer --evaluations"):
        settle(run, max_seconds=0.01)
    assert not (run.path / STEPS_FILE).exists()


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"steps": 0, "measured": null}', '{"steps": "7"}'])
def test_a_damaged_plan_is_one_clear_line(run: Run, text: str) -> None:
    (run.path / STEPS_FILE).write_text(text)
    with pytest.raises(LabError, match=r"plan\.json is damaged .*start a new run"):
        settle(run)


def test_a_plan_of_an_older_version_is_kept(run: Run) -> None:
    speed = {"step": 0.1, "evaluation": 2.0, "final": 7.0, "spent": 10.0}
    (run.path / STEPS_FILE).write_text(json.dumps({"steps": 7, "measured": speed}))
    assert settle(run, max_seconds=15.0) == 7


@pytest.mark.skipif(importlib.util.find_spec("tensorboard") is None, reason="TensorBoard is not installed")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # TensorBoard's protocol buffers give one
def test_tensorboard_has_the_log(run: Run) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for session in ({5: 2.0, 10: 1.0}, {10: 1.25, 15: 0.5}):  # the second resumes from step 5
        with board(run, "auto") as logged:
            assert logged is not None
            for step, loss in session.items():
                logged({"step": step, "loss": loss})
    events = EventAccumulator(str(run.path / BOARD_FOLDER))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(5, 2.0), (10, 1.25), (15, 0.5)]


def test_without_tensorboard(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    with board(run, "no") as logged:
        assert logged is None
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with board(run, "auto") as logged:
        assert logged is None
    with pytest.raises(LabError, match="needs TensorBoard: pip install"), board(run, "yes"):
        pass
    assert not (run.path / BOARD_FOLDER).exists()
