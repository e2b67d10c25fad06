"""The number of steps is settled once: from the options, or from a measurement."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from hebbian_softmax.lab.base.errors import LabError
from hebbian_softmax.lab.base.runs import Run, create_run
from hebbian_softmax.lab.language.names import ONLY
from hebbian_softmax.lab.language.plan import FILE, Speed, affordable_steps, make_plan, measure_speed
from hebbian_softmax.lab.language.settings import Settings
from hebbian_softmax.lab.language.task import WordTask
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

    windows = WordTask(corpus(), given, {}, steps=1, device=device()).windows
    assert windows.epoch_steps == 39
    plan = make_plan(run, given, windows, make, time.monotonic())
    plan.keep(run)
    return plan.steps


def test_steps_or_epochs(tmp_path: Path) -> None:
    for changes, expected in (({"steps": 7}, 7), ({"epochs": 2.0}, 78), ({"epochs": 0.0}, 1)):
        made: list[WordTask] = []
        run = create_run(tmp_path, "toy", "toy", {})
        assert settle(run, made, **changes) == expected
        assert not made
        assert json.loads((run.path / FILE).read_bytes()) == {"steps": expected, "measured": None}


def test_a_measured_number_is_kept(run: Run) -> None:
    made: list[WordTask] = []
    steps = settle(run, made, max_seconds=15.0, evaluations=1)
    assert steps > 1
    assert len(made) == 1
    plan = json.loads((run.path / FILE).read_bytes())
    assert plan["steps"] == steps
    assert plan["measured"]["step"] > 0
    made.clear()
    assert settle(run, made, max_seconds=15.0, evaluations=1) == steps
    assert not made


def test_what_a_device_takes_to_get_warm_is_not_counted_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each way to read a text takes 50 s at first, then 2 s; the first four steps 10 s each, then 1 s."""
    now, warm, steps = 0.0, set(), 0
    train_step = WordTask.train_step

    def read(model: Any, ids: torch.Tensor, *, streams: int, **_: Any) -> torch.Tensor:
        nonlocal now
        now += 2.0 if streams in warm else 50.0
        warm.add(streams)
        return torch.ones(len(ids) - 1)

    def step(self: WordTask) -> Any:
        nonlocal now, steps
        now, steps = now + (1.0 if steps >= 4 else 10.0), steps + 1
        return train_step(self)

    monkeypatch.setattr("hebbian_softmax.lab.language.plan.time.monotonic", lambda: now)
    for module in ("plan", "evaluation"):
        monkeypatch.setattr(f"hebbian_softmax.lab.language.{module}.word_losses", read)
    monkeypatch.setattr(WordTask, "train_step", step)
    monkeypatch.setattr("hebbian_softmax.lab.language.plan.SAMPLE", 10)
    given = settings(Settings, max_seconds=1000.0)
    task = WordTask(corpus(), given, {ONLY: True}, steps=1, device=device())
    predictions = sum(len(task.corpus.splits[split]) - 1 for split in ("valid", "test"))
    speed = measure_speed(task, given, 0.0)
    assert speed == Speed(step=1.0, evaluation=2.0, final=pytest.approx(2.0 / 10 * predictions), spent=now)
    assert now == 40 + 5 + 100 + 2 + 2 * 2


def test_the_time_is_shared_out() -> None:
    speed = Speed(step=0.1, evaluation=2.0, final=7.0, spent=10.0)
    given = settings(Settings, max_seconds=100.0, evaluations=5)
    assert affordable_steps(given, speed) == 700  # 97 s less 10, 7 and 10


def test_too_little_time_is_one_clear_line(run: Run) -> None:
    with pytest.raises(LabError, match=r"--max-seconds 0.01 is too short: .* fewer --evaluations"):
        settle(run, max_seconds=0.01)
    assert not (run.path / FILE).exists()


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"steps": 7}', '{"steps": 0, "measured": null}', '{"steps": "7"}'])
def test_a_damaged_plan_is_one_clear_line(run: Run, text: str) -> None:
    (run.path / FILE).write_text(text)
    with pytest.raises(LabError, match=r"plan\.json is damaged .*start a new run"):
        settle(run)
