"""`hebbian compare` on images: what it leaves behind, how it goes on after a kill, what it says."""

import random
import time
from pathlib import Path

import pytest
import torch

from hebbian_softmax.lab.base.runs import open_run
from hebbian_softmax.lab.images.compare import NAMES, Comparison, CurriculumProgress, suggest, summarize
from hebbian_softmax.lab.images.curriculum import CurriculumSettings, History
from hebbian_softmax.lab.images.fleet import Threads
from hebbian_softmax.lab.images.omniglot import OmniglotSettings
from tests.lab.base.test_progress import Terminal, plain_text
from tests.lab.images.toys import compare_toys, toy_set
from tests.lab.processes import start, wait_for
from tests.lab.test_cli import call, error_line, new_run, numbers

SMALL = ["compare", "toy", "--steps", "50", "--filters", "4", "--device", "cpu"]
FILES = {"config.json", "log.jsonl", "checkpoint.pt", "result.json", "curriculum.png", "answers.png", "page.html"}


def test_a_comparison_leaves_everything_in_its_run_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = new_run(tmp_path, *SMALL)
    assert {path.name for path in run.iterdir()} == FILES
    captured = capsys.readouterr()
    assert "In 50 steps of 32 images neither got beyond the 30 classes it began with" in " ".join(captured.out.split())
    assert str(run / "curriculum.png") in captured.out
    assert "Try next:" in captured.out
    assert "50/50 steps; plain softmax 30 classes" in captured.err
    assert [record["step"] for record in open_run(run).records()] == [25, 50]
    assert len(numbers(run)["hebbian"]["classes"]) == 2


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["--steps", "30"], 2, "--steps: must be a multiple of 25"),
        (["--device", "tpu"], 2, "--device: must be one of auto, cpu, cuda"),
        (["--classes", "61"], 1, "toy has 60 classes, not 61"),
    ],
)
def test_bad_options_end_in_one_line(
    options: list[str], code: int, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(*SMALL, "--quiet", "--runs", tmp_path, *options) == code
    assert message in error_line(capsys)
    assert not list(tmp_path.iterdir())  # nothing is left of it


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_cuda_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(*SMALL[:-1], "cuda", "--quiet", "--runs", tmp_path) == 1
    assert "torch finds no CUDA device: use --device cpu" in error_line(capsys)
    assert not list(tmp_path.iterdir())


def test_data_that_cannot_be_read_leave_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("images_background.zip", "images_evaluation.zip"):
        (tmp_path / name).write_bytes(b"not an archive")
    command = ["compare", "omniglot", *SMALL[2:], "--quiet", "--data-root", tmp_path, "--runs", tmp_path / "runs"]
    assert call(*command) == 1
    assert "images_background.zip cannot be read" in error_line(capsys)
    assert not list((tmp_path / "runs").iterdir())


@pytest.mark.slow
def test_killed_at_any_moment_it_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    longer = [*SMALL[:2], "--steps", "75", *SMALL[4:], "--quiet"]
    whole = new_run(tmp_path / "whole", *longer)
    process = start(compare_toys, [*longer, "--runs", str(tmp_path / "killed")])
    wait_for(tmp_path / "killed", "*/checkpoint.pt", process)
    time.sleep(random.Random(5).uniform(0, 0.2))
    process.kill()
    process.join()
    (killed,) = (tmp_path / "killed").iterdir()
    checkpoint = open_run(killed).load_checkpoint()
    assert checkpoint is not None
    assert 0 < checkpoint["step"] < 75
    assert call("compare", "toy", "--quiet", "--resume", killed) == 0
    assert numbers(killed) == numbers(whole)
    ends = [open_run(run).load_checkpoint()["task"] for run in (killed, whole)]  # type: ignore[index]
    for name in NAMES:
        for part in ("network", "head"):
            one, other = (end[name]["learner"][part] for end in ends)
            assert all(torch.equal(one[key], other[key]) for key in one)
    records = [[{**each, "seconds": 0} for each in open_run(run).records()] for run in (killed, whole)]
    assert records[0] == records[1]


def test_threads_change_nothing() -> None:
    settings = CurriculumSettings(filters=4, device="cpu", softmax="active")
    outcomes = []
    for most in (1, 2):
        with Threads("cpu", most) as threads:
            comparison = Comparison(toy_set(), settings, threads)
            assert all(each.method.active_only for each in comparison.learners.values())
            losses = [comparison.train_step() for _ in range(5)]
            outcomes.append((losses, comparison.evaluate()))
    assert outcomes[0] == outcomes[1]


def test_the_summary_is_honest() -> None:
    slow, fast = History(30, [0.5, 0.7], [30, 35]), History(30, [0.7, 0.7], [35, 40])
    settings = CurriculumSettings(steps=50)
    words = summarize({"plain": slow, "hebbian": fast}, settings)
    assert "plain softmax learned its way up to 35 classes, Hebbian softmax to 40" in words
    assert "Hebbian softmax had 35 classes after 25 steps, plain softmax after 50." in words
    assert "Both chose among all classes, including those that had not come yet. This is one seed." in words
    words = summarize({"plain": fast, "hebbian": slow}, settings)
    assert "Plain softmax had 35 classes after 25 steps, Hebbian softmax after 50." in words
    assert "no difference" in summarize({"plain": slow, "hebbian": slow}, settings)
    short = History(30, [0.5], [30])
    assert "neither got beyond the 30 classes it began with" in summarize({"plain": short, "hebbian": short}, settings)
    assert "Hebbian softmax to 30" in summarize({"plain": slow, "hebbian": short}, settings)
    active = CurriculumSettings(steps=50, softmax="active")
    assert "Both chose among the classes that have come so far." in summarize({"plain": fast, "hebbian": slow}, active)
    seen = summarize({"plain": fast, "hebbian": slow}, CurriculumSettings(steps=50, softmax="seen"))
    assert "In training, the softmax of both was over the classes seen so far. Both chose among all classes" in seen
    masked = CurriculumSettings(steps=50, softmax="seen", checks="seen")
    assert "Both chose among the classes seen in training." in summarize({"plain": fast, "hebbian": slow}, masked)


def test_every_setting_of_the_rule_and_the_softmax_reaches_the_learners() -> None:
    given = {"write": "centred", "fade": False, "start": 7, "gamma": 0.3, "softmax": "seen", "checks": "seen"}
    settings = CurriculumSettings(filters=4, device="cpu", **given)  # type: ignore[arg-type]
    with Threads("cpu", 1) as threads:
        for learner in Comparison(toy_set(), settings, threads).learners.values():
            method, head = learner.method, learner.head
            assert (method.seen_only, method.checks_seen_only, method.active_only) == (True, True, False)
            assert (head.write, head.fade, head.gamma, head.memorizing) == ("centred", False, 0.3, method.hebbian)
            assert head.attachment is not None
            assert head.start == (7 if method.hebbian else 0)
        literal = CurriculumSettings(filters=4, device="cpu", write="literal")
        assert Comparison(toy_set(), literal, threads).learners["hebbian"].head.scale == 1.0


@pytest.mark.slow
def test_the_log_and_the_summary_say_once_when_writing_began(tmp_path: Path) -> None:
    run = new_run(tmp_path, "compare", "toy", "--steps", "200", "--filters", "16", "--device", "cpu", "--quiet")
    told = [(each["step"], each.get("hebbian_write_began")) for each in open_run(run).records()]
    ((step, began),) = [each for each in told if each[1] is not None]
    assert step - 25 < began <= step
    result = open_run(run).result()
    assert result is not None
    assert result["metrics"]["write_began"] == began
    assert f"began to write after {began:,} steps" in result["summary"]


def test_suggestions_keep_what_they_do_not_vary() -> None:
    first, second, *_ = suggest("omniglot", OmniglotSettings(data_root="here", gamma=0.3))
    assert first.startswith("hebbian compare omniglot --gamma 0.3 --seed 1 --data-root here  #")
    assert second.startswith("hebbian compare omniglot --steps 6000 --gamma 0.3 --data-root here  #")


def test_bars_on_a_terminal(terminal: Terminal) -> None:
    with CurriculumProgress("glyphs", total=100, stream=terminal) as progress:
        progress.update(25, {"plain_loss": 1.0})
        both = {"plain_classes": 35, "plain_accuracy": 0.61, "hebbian_classes": 60, "hebbian_accuracy": 0.5}
        progress.update(50, {**both, "hebbian_level_steps": 25})
    first, plain, hebbian = plain_text(terminal)[-3:]
    assert first.split() == ["glyphs", "━" * 8, "50/100", "steps"]
    assert plain.startswith("  plain softmax   ━")
    assert plain.endswith(" 35 classes, 61 % right")
    assert hebbian.startswith("  Hebbian softmax ━")
    assert hebbian.endswith(" 60 classes, 50 % right, 25 steps a level")
    assert hebbian.count("━") > plain.count("━")  # on one scale
