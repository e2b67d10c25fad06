"""Networks other than the LSTM train, resume, are evaluated and use memories; one line registers a new one."""

import json
from pathlib import Path

import pytest
import torch

from hebbian_softmax.lab.base.errors import LabError
from hebbian_softmax.lab.base.runs import Run
from hebbian_softmax.lab.language.learner import make_model
from hebbian_softmax.lab.language.model import MODELS, LanguageModel
from hebbian_softmax.lab.language.names import HEBBIAN, PLAIN
from hebbian_softmax.lab.language.trained import load_trained
from tests.lab.editing import edited
from tests.lab.language.commands import FEW, call, only
from tests.lab.language.model.networks import Decay
from tests.lab.language.toy import device, folder

__all__ = ["folder"]
OPTIONS = {"decay": "", "transformer": "--heads 3 --layers 1 --residual-dropout 0.1 --locked-dropout"}


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODELS, "decay", Decay)


def weights(run: Run, network: type[LanguageModel]) -> dict[str, torch.Tensor]:
    models = load_trained(run, device=device(), quiet=True).models
    assert all(isinstance(model, network) for model in models.values())
    return {f"{name.key} {key}": value for name, model in models.items() for key, value in model.state_dict().items()}


@pytest.mark.parametrize("name", OPTIONS)
def test_it_trains_resumes_and_is_measured(
    name: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["compare", folder, *FEW, "--model", name, *OPTIONS[name].split()]
    words += ["--final", "none", "--checkpoint-seconds", "0", "--quiet"]
    assert call(*words, "--runs", tmp_path / "whole") == 0
    calls, network = 0, MODELS[name]

    class Stopping(network):
        def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            nonlocal calls
            calls += 1
            if calls > 14:  # two models take a step each time, so this is in the eighth step
                raise KeyboardInterrupt
            return super().forward(inputs, targets)

    with monkeypatch.context() as patch:
        patch.setitem(MODELS, name, Stopping)
        assert call(*words, "--runs", tmp_path / "stopped") == 130
    stopped, whole = only(tmp_path / "stopped"), only(tmp_path / "whole")
    assert call("compare", "corpus", "--resume", stopped.path, "--quiet") == 0
    found, expected = weights(stopped, network), weights(whole, network)
    assert set(found) == set(expected)
    assert all(torch.equal(value, expected[key]) for key, value in found.items())
    assert not torch.equal(expected["plain head.weight"], expected["hebbian head.weight"])
    trained = load_trained(whole, device=device(), quiet=True)
    first = make_model(trained.settings, len(trained.corpus.words), hebbian=False, device=device())
    for key, value in first.named_parameters():
        assert not torch.equal(expected[f"plain {key}"], value), key

    capsys.readouterr()
    memories = "--cache --mbpa --cache-size 20 --mbpa-neighbours 5 --words 0:9 --split valid --json --quiet"
    assert call("evaluate", whole.path, *memories.split()) == 0
    rows = json.loads(capsys.readouterr().out)["memories"]
    for head in (PLAIN, HEBBIAN):
        assert [row["name"] for row in rows[head.key]] == ["alone", "+ cache", "+ cache + MbPA"]
        assert len({row["scores"]["valid"]["perplexity"] for row in rows[head.key]}) == 3

    with edited(whole.path / "config.json") as config:
        config["settings"]["model"] = "lstm"
    with pytest.raises(LabError, match=r"is not of the settings in its config|has no use for --heads 3"):
        load_trained(only(tmp_path / "whole"), device=device(), quiet=True)
