"""The training loop: what it logs, when it saves, and that a stopped run ends in the same bits."""

import math
import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hebbian_softmax.lab.base.errors import LabError
from hebbian_softmax.lab.base.files import TEMPORARY
from hebbian_softmax.lab.base.runs import Run, create_run, open_run
from hebbian_softmax.lab.base.training import Interrupted, RunningMeans, random_states, set_random_states, train
from tests.lab.base.test_runs import assert_saved
from tests.lab.base.toy import Toy, train_toy
from tests.lab.processes import start, wait_for

STEPS = 150


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return create_run(tmp_path, "toy", "toy", {})


def outcome(run: Run) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return everything that must not depend on where a run was stopped: all but the time it took."""
    checkpoint = run.load_checkpoint()
    assert checkpoint is not None
    records = run.records()
    for timed in (checkpoint, *records):
        assert timed.pop("seconds") > 0
    return checkpoint, records


def assert_same(left: Any, right: Any) -> None:
    assert type(left) is type(right)
    if isinstance(left, dict):
        assert list(left) == list(right)
        for key in left:
            assert_same(left[key], right[key])
    elif isinstance(left, list | tuple):
        assert len(left) == len(right)
        for one, other in zip(left, right, strict=True):
            assert_same(one, other)
    elif isinstance(left, torch.Tensor):
        assert torch.equal(left, right)
    else:
        assert left == right


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    run = create_run(tmp_path_factory.mktemp("runs"), "toy", "toy", {})
    train(Toy(), run, steps=STEPS, evaluate_every=7, quiet=True)
    return outcome(run)


def test_logs_and_saves(run: Run) -> None:
    task, told = Toy(), []
    train(task, run, steps=10, evaluate_every=4, quiet=True, logged=lambda record: told.append(dict(record)))
    records = run.records()
    assert records == told
    assert [record["step"] for record in records] == [4, 8, 10]
    assert set(records[0]) == {"step", "seconds", "loss", "bias", "drawn"}
    checkpoint = run.load_checkpoint()
    assert checkpoint is not None
    assert checkpoint["step"] == 10
    assert_same(checkpoint["task"], task.state_dict())


def test_the_logged_loss_is_the_mean_since_the_last_record(run: Run) -> None:
    class Counting(Toy):
        def train_step(self) -> dict[str, torch.Tensor]:
            self.steps_taken += 1
            return {"loss": torch.tensor(float(self.steps_taken))}

    train(Counting(), run, steps=6, evaluate_every=3, quiet=True)
    assert [record["loss"] for record in run.records()] == [2.0, 5.0]


def test_a_finished_run_takes_no_further_step(run: Run) -> None:
    train(Toy(), run, steps=10, evaluate_every=4, quiet=True)
    before = outcome(run)
    task = Toy()
    train(task, run, steps=10, evaluate_every=4, quiet=True)
    assert task.steps_taken == 0
    assert_same(outcome(run), before)


def test_records_after_the_checkpoint_are_written_anew(run: Run) -> None:
    """The run was killed after the log and before the next checkpoint was written, in the middle of a line."""
    train(Toy(), run, steps=10, evaluate_every=5, quiet=True)
    early = (run.path / "checkpoint.pt").read_bytes()
    train(Toy(), run, steps=20, evaluate_every=5, quiet=True)
    through = outcome(run)
    (run.path / "checkpoint.pt").write_bytes(early)
    with open(run.path / "log.jsonl", "ab") as file:
        file.write(b'{"step": 25, "lo')
    train(Toy(), run, steps=20, evaluate_every=5, quiet=True)
    assert_same(outcome(run), through)


@pytest.mark.parametrize(
    "fatal_write",
    [pytest.param(0, marks=pytest.mark.slow), 4, 5],
    ids=["at any time", "inside a write", "between two names"],
)
def test_a_killed_run_ends_in_the_same_bits(
    tmp_path: Path, uninterrupted: tuple[dict[str, Any], list[dict[str, Any]]], fatal_write: int
) -> None:
    folder = tmp_path / "run"
    killed = start(train_toy, folder, STEPS, 0.02, fatal_write)
    if not fatal_write:
        wait_for(folder, "checkpoint.pt", killed)
        time.sleep(0.2)
        killed.kill()
    killed.join()
    assert killed.exitcode == -signal.SIGKILL
    checkpoint = open_run(folder).load_checkpoint()
    assert checkpoint is not None
    assert 0 < checkpoint["step"] < STEPS
    assert not fatal_write or list(folder.glob(TEMPORARY + "*"))

    resumed = start(train_toy, folder, STEPS, 0)
    resumed.join()
    assert resumed.exitcode == 0
    assert int((tmp_path / "taken").read_text()) == STEPS - checkpoint["step"]
    assert_same(outcome(open_run(folder)), uninterrupted)
    assert not list(folder.glob(TEMPORARY + "*"))


def test_a_terminated_run_saves_and_ends_in_the_same_bits(
    tmp_path: Path, uninterrupted: tuple[dict[str, Any], list[dict[str, Any]]]
) -> None:
    folder = tmp_path / "run"
    stopped = start(train_toy, folder, STEPS, 0.02)
    wait_for(folder, "log.jsonl", stopped)
    stopped.terminate()
    stopped.join()
    assert stopped.exitcode == 128 + signal.SIGTERM
    checkpoint = open_run(folder).load_checkpoint()
    assert checkpoint is not None
    assert checkpoint["step"] == int((tmp_path / "taken").read_text()) < STEPS  # no step was lost

    run = open_run(folder)
    train(Toy(), run, steps=STEPS, evaluate_every=7, quiet=True)
    assert_same(outcome(run), uninterrupted)


def test_a_signal_stops_after_the_step_and_handlers_come_back(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    class Interrupting(Toy):
        def train_step(self) -> dict[str, torch.Tensor]:
            if self.steps_taken == 4:
                os.kill(os.getpid(), signal.SIGINT)
            return super().train_step()

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(Interrupted) as caught:
        train(Interrupting(), run, steps=10, evaluate_every=10)
    assert "5/10 steps" in capsys.readouterr().err
    assert (caught.value.step, caught.value.signum) == (5, signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_a_second_interrupt_does_not_wait(run: Run) -> None:
    class Impatient(Toy):
        def train_step(self) -> dict[str, torch.Tensor]:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
            return super().train_step()

    with pytest.raises(KeyboardInterrupt):
        train(Impatient(), run, steps=10, evaluate_every=10, quiet=True)


def test_trains_in_a_thread_too(run: Run) -> None:
    thread = threading.Thread(target=lambda: train(Toy(), run, steps=3, evaluate_every=1, quiet=True))
    thread.start()
    thread.join()
    assert len(run.records()) == 3


@pytest.mark.parametrize("evaluate_every", [1, 100])
def test_a_loss_that_is_not_finite_stops_and_keeps_the_checkpoint(run: Run, evaluate_every: int) -> None:
    with pytest.raises(
        LabError, match=r"loss became nan at or before step 8: .*lower learning rate.*checkpoint of step 7 is kept"
    ):
        train(Toy(bad_step=8), run, steps=20, evaluate_every=evaluate_every, checkpoint_seconds=0, quiet=True)
    assert_saved(run, 7)
    assert all(record["loss"] is not None for record in run.records())


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_measurement_that_is_not_finite_stops_and_keeps_the_checkpoint(run: Run, value: float) -> None:
    class Lost(Toy):
        def evaluate(self) -> dict[str, float]:
            return {"perplexity": value if self.steps_taken == 8 else 2.0}

    with pytest.raises(LabError, match=rf"perplexity became {value} at or before step 8: .*step 7 is kept"):
        train(Lost(), run, steps=20, evaluate_every=4, checkpoint_seconds=0, quiet=True)
    assert_saved(run, 7)
    assert [record["step"] for record in run.records()] == [4]


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_a_gradient_that_is_not_finite_keeps_the_checkpoint(run: Run, value: float) -> None:
    """The loss of that step is still finite; only the weights after it are not."""

    class Exploding(Toy):
        def train_step(self) -> dict[str, torch.Tensor]:
            losses = super().train_step()
            if self.steps_taken == 8:
                with torch.no_grad():
                    self.model[0].weight[0, 0] = value
            return losses

    with pytest.raises(LabError, match=rf"state became {value} at or before step 8: .*checkpoint of step 7 is kept"):
        train(Exploding(), run, steps=20, evaluate_every=100, checkpoint_seconds=0, quiet=True)
    assert_saved(run, 7)


def test_a_checkpoint_of_another_model_is_one_clear_line(run: Run) -> None:
    train(Toy(), run, steps=2, evaluate_every=2, quiet=True)
    other = Toy()
    other.model[0] = torch.nn.Linear(4, 9)
    with pytest.raises(LabError, match=r"does not fit .*size mismatch for 0\.weight") as caught:
        train(other, run, steps=4, evaluate_every=2, quiet=True)
    assert "\n" not in str(caught.value)


def test_records_that_are_gone_are_noted(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    train(Toy(), run, steps=6, evaluate_every=2, quiet=True)
    lines = (run.path / "log.jsonl").read_bytes().splitlines(keepends=True)
    (run.path / "log.jsonl").write_bytes(lines[0])
    train(Toy(), run, steps=8, evaluate_every=2)
    assert "the log lacks the records of 2 steps from 4 to 6" in capsys.readouterr().err
    assert [record["step"] for record in run.records()] == [2, 8]
    train(Toy(), run, steps=8, evaluate_every=8)
    assert "lacks" not in capsys.readouterr().err


def test_a_finished_run_whose_log_is_gone_still_has_its_seconds(run: Run) -> None:
    seconds = train(Toy(), run, steps=4, evaluate_every=2, quiet=True)
    (run.path / "log.jsonl").unlink()
    assert train(Toy(), run, steps=4, evaluate_every=2, quiet=True) == seconds > 0


def test_all_random_generators_come_back() -> None:
    def draw() -> tuple[float, float, float, float]:
        return random.random(), float(np.random.randn()), float(np.random.rand()), torch.rand(()).item()

    np.random.randn()  # leaves a cached second normal number behind
    states = random_states()
    first = draw()
    assert draw() != first
    set_random_states(states)
    assert draw() == first


def test_means_are_over_the_steps_that_named_them_and_continue_from_their_state() -> None:
    means, whole, values = RunningMeans(), RunningMeans(), torch.rand(10)
    for number, value in enumerate(values):
        for each in (means, whole):
            each.add({"often": value, **({"once": value} if number == 3 else {})})
        state = means.state_dict()
        means = RunningMeans()
        means.load_state_dict(state)
    assert means.read() == whole.read() == {"often": pytest.approx(values.mean().item()), "once": values[3].item()}
