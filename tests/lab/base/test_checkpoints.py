"""A damaged checkpoint is never taken for a whole one, and the one before it takes its place."""

import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from hebbian_softmax.lab.base.errors import LabError
from hebbian_softmax.lab.base.runs import Run, create_run
from hebbian_softmax.lab.base.training import train
from tests.lab.base.test_files import names
from tests.lab.base.test_training import assert_same, outcome
from tests.lab.base.toy import Toy

STRIDE = 17  # bytes between two flipped bits
NEWEST, PREVIOUS = "checkpoint.pt", "checkpoint-previous.pt"


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return create_run(tmp_path, "toy", "toy", {})


def state(step: int) -> dict[str, Any]:
    return {"step": step, "weight": torch.arange(50.0) * step}


def flip(path: Path, position: int, bit: int = 0) -> None:
    """Change one bit of a file."""
    content = bytearray(path.read_bytes())
    content[position] ^= 1 << bit
    path.write_bytes(content)


def step_of(run: Run) -> int:
    loaded = run.load_checkpoint()
    assert loaded is not None
    return int(loaded["step"])


def test_other_programs_read_checkpoints(run: Run) -> None:
    run.save_checkpoint(state(1))
    assert_same(torch.load(run.path / NEWEST, weights_only=True), state(1))
    with zipfile.ZipFile(run.path / NEWEST) as archive:
        assert archive.testzip() is None


@pytest.mark.parametrize("kind", ["ours", "of an older version"])
def test_no_flipped_bit_changes_what_is_read(run: Run, kind: str) -> None:
    """The line with the checksum may be damaged without harm; older versions did not write it."""
    path = run.path / NEWEST
    run.save_checkpoint(state(1))
    if kind != "ours":
        torch.save(state(1), path)
    whole = path.read_bytes()
    refused = 0
    for position in range(0, len(whole), STRIDE):
        flip(path, position, position % 8)
        try:
            loaded = run.load_checkpoint()
        except LabError:
            refused += 1
        else:
            assert_same(loaded, state(1))
        path.write_bytes(whole)
    assert refused >= (len(whole) // STRIDE - 5 if kind == "ours" else 20)
    assert names(run.path) == {"config.json", NEWEST}  # nothing is lost


def test_the_checkpoint_before_a_damaged_one_is_used(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    for step in (1, 2, 3):
        run.save_checkpoint(state(step))
    assert names(run.path) == {"config.json", NEWEST, PREVIOUS}
    assert step_of(run) == 3
    assert capsys.readouterr().err == ""
    flip(run.path / NEWEST, 1000)
    assert step_of(run) == 2
    (note,) = capsys.readouterr().err.splitlines()
    assert f"{NEWEST} cannot be read" in note
    assert f"going on from {PREVIOUS}, which is of step 2" in note


def test_a_damaged_checkpoint_does_not_take_the_place_of_a_good_one(run: Run) -> None:
    for step in (1, 2):
        run.save_checkpoint(state(step))
    flip(run.path / NEWEST, 1000)
    run.save_checkpoint(state(3))
    (run.path / NEWEST).unlink()
    assert step_of(run) == 1


def test_a_process_killed_between_two_names_leaves_the_checkpoint_before(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    run.save_checkpoint(state(1))
    (run.path / NEWEST).rename(run.path / PREVIOUS)
    assert step_of(run) == 1
    assert "is missing: going on from" in capsys.readouterr().err


def test_nothing_is_lost_if_no_checkpoint_is_whole(run: Run) -> None:
    train(Toy(), run, steps=4, evaluate_every=1, checkpoint_seconds=0, quiet=True)
    for name in (NEWEST, PREVIOUS):
        flip(run.path / name, 500)
    before = {path.name: path.read_bytes() for path in run.path.iterdir()}
    with pytest.raises(LabError, match=r"checkpoint\.pt cannot .*nor can checkpoint-previous\.pt .*delete them"):
        train(Toy(), run, steps=8, evaluate_every=1, quiet=True)
    assert {path.name: path.read_bytes() for path in run.path.iterdir()} == before


def test_a_finished_run_is_not_measured_at_an_earlier_step(run: Run) -> None:
    for step in (1, 2):
        run.save_checkpoint(state(step))
    run.save_result({})
    flip(run.path / NEWEST, 1000)
    with pytest.raises(LabError, match=r"not of the end of the run: delete result\.json and resume"):
        run.load_checkpoint()
    (run.path / "result.json").unlink()
    assert step_of(run) == 1


def test_a_run_that_goes_on_from_the_checkpoint_before_ends_in_the_same_bits(run: Run, tmp_path: Path) -> None:
    through = create_run(tmp_path, "through", "toy", {})
    train(Toy(), through, steps=30, evaluate_every=3, quiet=True)
    train(Toy(), run, steps=20, evaluate_every=3, checkpoint_seconds=0, quiet=True)
    flip(run.path / NEWEST, 1000)
    task = Toy()
    train(task, run, steps=30, evaluate_every=3, quiet=True)
    assert task.steps_taken == 11
    # The first part had another last step, whose record is not one of the run that went through.
    assert_same(outcome(run), outcome(through))
