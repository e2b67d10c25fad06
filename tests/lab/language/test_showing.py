"""What is shown and written while a model trains: words, perplexity, TensorBoard files."""

import importlib.util
import io
from pathlib import Path

import pytest

from hebbian_softmax.lab.base.errors import LabError
from hebbian_softmax.lab.base.runs import Run, create_run
from hebbian_softmax.lab.language import board as module
from hebbian_softmax.lab.language.board import board
from hebbian_softmax.lab.language.deterministic import deterministic
from hebbian_softmax.lab.language.progress import WordsProgress


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return create_run(tmp_path, "toy", "toy", {})


def test_progress_is_in_words_and_leaves_the_buckets_out() -> None:
    stream = io.StringIO()
    with WordsProgress("toy", step_words=500, total=10, start=2, stream=stream) as progress:
        assert progress.done == 1000
        progress.update(4, {"loss": 1.5, "valid_perplexity": 30.0, "valid_perplexity_<100": 4000.0, "words": 7})
        progress.update(10)
    assert stream.getvalue() == "toy: 5,000/5,000 words, loss 1.5, valid perplexity 30\n"


def test_a_terminal_is_redrawn_once_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each time waits for the GPU."""
    stream = io.StringIO()
    stream.isatty = lambda: True  # type: ignore[method-assign]
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    with WordsProgress("toy", step_words=5, total=10, stream=stream) as progress:
        assert progress.due()
        progress.update(1, {})
        now += 0.9
        assert not progress.due()
        now += 0.2
        assert progress.due()


@pytest.mark.skipif(importlib.util.find_spec("tensorboard") is None, reason="TensorBoard is not installed")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of its protocol buffers
def test_tensorboard_has_the_log(run: Run) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for session in ({5: 2.0, 10: 1.0}, {10: 1.25, 15: 0.5}):  # the second resumes from step 5
        with board(run, "auto") as logged:
            assert logged is not None
            for step, loss in session.items():
                logged({"step": step, "loss": loss})
    events = EventAccumulator(str(run.path / module.FOLDER))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(5, 2.0), (10, 1.25), (15, 0.5)]


def test_without_tensorboard(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    with board(run, "no") as logged:
        assert logged is None
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    with board(run, "auto") as logged:
        assert logged is None
    with pytest.raises(LabError, match="needs TensorBoard: pip install"), board(run, "yes"):
        pass
    assert not (run.path / module.FOLDER).exists()


def test_deterministic_is_for_the_run_only(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    with deterministic(True):
        assert torch.are_deterministic_algorithms_enabled()
    assert not torch.are_deterministic_algorithms_enabled()
    with deterministic(False):
        assert not torch.are_deterministic_algorithms_enabled()
