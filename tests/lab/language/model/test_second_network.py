"""A network other than the LSTM trains, resumes, is evaluated and uses memories after one line in the registry."""

import json
from pathlib import Path

import pytest
import torch

from hebbian_softmax.lab.base.errors import LabError
from hebbian_softmax.lab.base.runs import Run
from hebbian_softmax.lab.language.model import MODELS
from hebbian_softmax.lab.language.names import HEBBIAN, PLAIN
from hebbian_softmax.lab.language.trained import load_trained
from tests.lab.editing import edited
from tests.lab.language.commands import FEW, call, only
from tests.lab.language.model.networks import Decay
from tests.lab.language.toy import device, folder

__all__ = ["folder"]


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODELS, "decay", Decay)


def weights(run: Run) -> dict[str, torch.Tensor]:
    models = load_trained(run, device=device(), quiet=True).models
    assert all(isinstance(model, Decay) for model in models.values())
    return {f"{name.key} {key}": value for name, model in models.items() for key, value in model.state_dict().items()}


def test_it_trains_resumes_and_is_measured(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["compare", folder, *FEW, "--model", "decay", "--final", "none", "--checkpoint-seconds", "0", "--quiet"]
    assert call(*words, "--runs", tmp_path / "whole") == 0
    calls = 0

    class Stopping(Decay):
        def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            nonlocal calls
            calls += 1
            if calls > 14:  # two models take a step each time, so this is in the eighth step
                raise KeyboardInterrupt
            return super().forward(inputs, targets)

    with monkeypatch.context() as patch:
        patch.setitem(MODELS, "decay", Stopping)
        assert call(*words, "--runs", tmp_path / "stopped") == 130
    stopped, whole = only(tmp_path / "stopped"), only(tmp_path / "whole")
    assert call("compare", "corpus", "--resume", stopped.path, "--quiet") == 0
    found, expected = weights(stopped), weights(whole)
    assert set(found) == set(expected)
    assert all(torch.equal(value, expected[name]) for name, value in found.items())
    assert not torch.equal(expected["plain head.weight"], expected["hebbian head.weight"])
    assert expected["plain decay"] != 0

    capsys.readouterr()
    memories = "--cache --mbpa --cache-size 20 --mbpa-neighbours 5 --words 0:9 --split valid --json --quiet"
    assert call("evaluate", whole.path, *memories.split()) == 0
    rows = json.loads(capsys.readouterr().out)["memories"]
    for name in (PLAIN, HEBBIAN):
        assert [row["name"] for row in rows[name.key]] == ["alone", "+ cache", "+ cache + MbPA"]
        assert len({row["scores"]["valid"]["perplexity"] for row in rows[name.key]}) == 3

    with edited(whole.path / "config.json") as config:
        config["settings"]["model"] = "lstm"
    with pytest.raises(LabError, match="is not of the settings in its config"):
        load_trained(only(tmp_path / "whole"), device=device(), quiet=True)
