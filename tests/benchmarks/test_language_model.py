"""The benchmark of the language model runs and keeps to its budget, and its parts add up to a step."""

import json
import time
from pathlib import Path

import pytest
import torch

from benchmarks import language_model
from hebbian_softmax.lab.language.learner import CapturedSteps, Learner
from hebbian_softmax.lab.language.task import make_windows
from tests.lab.language.toy import WORDS, corpus, device, settings


@pytest.mark.slow
def test_it_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    began = time.monotonic()
    language_model.main(["--quick", "--budget", "2", "--json", str(tmp_path / "found.json")])
    assert time.monotonic() - began < 30
    found = json.loads((tmp_path / "found.json").read_text())
    assert [result["vocabulary"] for result in found["results"]] == [300, 100]
    for result in found["results"]:
        assert result["hebbian_over_plain"] > 0
        assert result["one_stream_words_per_second"] > 0
        for head in ("plain", "Hebbian"):
            assert result[head]["words_per_second"] > 0
            assert set(result[head]["parts_ms"]) == set(result["floor_ms"]) == set(language_model.PARTS)
    assert found["settings"]["limit"] == 500  # The paper's T: classes past it cost nothing.
    output = capsys.readouterr().out
    assert "Where the time goes" in output
    assert "Measured in one stream" in output


@pytest.mark.parametrize("hebbian", [True, False])
def test_a_step_in_parts_is_a_step(hebbian: bool) -> None:
    given = settings(input_dropout=0.0, learning_rate=language_model.RATE)
    whole, taken_apart = (Learner(given, WORDS, hebbian=hebbian, device=device()) for _ in range(2))
    racer = language_model.Racer(taken_apart, make_windows(corpus(), given, device()))
    for step in range(3):
        assert len(racer.parts()) == len(language_model.PARTS)
        whole.step(racer.windows.at(step), language_model.RATE)
    for one, other in zip(whole.model.state_dict().values(), racer.learner.model.state_dict().values(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("loop", [True, False])
def test_a_loop_captures_nothing(loop: bool) -> None:
    given = settings()
    learner = Learner(given, WORDS, hebbian=True, device=device())
    learner.captured = CapturedSteps()  # As on a GPU.
    racer = language_model.Racer(learner, make_windows(corpus(), given, device()), loop=loop)
    assert (racer.learner.captured is None) == loop
