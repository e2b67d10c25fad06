"""Every option has the effect that it names."""

import dataclasses

import pytest
import torch

from hebbian_softmax import ConstantRate, InclusiveRate, InverseCountRate, PaperRate, RecentRate
from hebbian_softmax.lab.base.settings import as_options, from_values
from hebbian_softmax.lab.language.learner import Learner, choose_precision
from hebbian_softmax.lab.language.names import ONLY
from hebbian_softmax.lab.language.settings import OPTIMIZERS, Settings, TrainSettings
from hebbian_softmax.lab.language.source import CORPORA, settings_type
from hebbian_softmax.lab.language.task import WordTask
from tests.lab.language.model.networks import watch_lstm
from tests.lab.language.toy import WORDS, corpus, device, model, settings


def test_the_rule_is_the_one_that_was_asked_for() -> None:
    head = model(
        rate="paper", gamma=0.1, limit=7, objective="ip", rule_scale="0.5", write="literal", start=3, fade=False
    ).head
    assert head.rate == PaperRate(0.1, 7)
    assert (head.scale, head.write, head.start, head.fade) == (0.5, "literal", 3, False)
    assert type(head.objective).__name__ == "InnerProduct"
    usual = model().head
    assert usual.rate == RecentRate(0.2)
    assert (usual.scale, usual.write, type(usual.objective).__name__) == ("match", "across", "Euclidean")
    assert (Settings().start, usual.fade) == ("auto", True)
    assert [model(hebbian, start="auto").head.settling is None for hebbian in (True, False)] == [False, True]
    assert model(rate="inclusive", gamma=0.3, limit=9).head.rate == InclusiveRate(0.3, 9)
    assert model(rate="constant", gamma=0.3, limit=9).head.rate == ConstantRate(0.3, 9)
    assert model(rate="inverse", limit=9).head.rate == InverseCountRate(9)


def test_the_network_is_the_one_that_was_asked_for() -> None:
    network = model(layers=2, hidden=9, embedding=7, input_dropout=0.1, output_dropout=0.2, precision="bf16")
    assert len(network.layers) == 2
    assert network.projection.shape == (7, 9)
    assert (network.options.input_dropout, network.head.dropout) == (0.1, 0.2)
    assert network.precision == torch.bfloat16
    assert network.embedding is None
    locked = model(output_dropout=0.2, locked_dropout=True, recurrent_dropout=0.4)
    assert (locked.options.output_dropout, locked.head.dropout) == (0.2, 0.0)
    assert locked.layers[0].recurrent_dropout == locked.options.recurrent_dropout == 0.4
    assert model(tied=False).embedding is not None
    assert model(layer_norm="output").norm is not None
    assert type(model(layer_norm="cell").layers[0]).__name__ == "LayerNormLSTM"
    assert not torch.equal(model(seed=1).head.weight, model(seed=2).head.weight)
    assert choose_precision("auto", torch.device("cuda")) == torch.bfloat16
    assert choose_precision("auto", device()) == torch.float32


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_optimizer_is_the_one_that_was_asked_for(name: str) -> None:
    momentum = 0.0 if name == "one-pass-rmsprop" else 0.5
    made = settings(optimizer=name, momentum=momentum, weight_decay=0.25, learning_rate=0.125)
    optimizer = Learner(made, WORDS, hebbian=True, device=device()).optimizer
    assert type(optimizer).__name__.lower() == name.replace("-", "")
    assert type(optimizer).__module__.startswith("hebbian_softmax" if "one-pass" in name else "torch")
    (group,) = optimizer.param_groups
    assert (group["lr"], group["weight_decay"]) == (0.125, 0.25)
    assert (group["betas"] if "adam" in name else group.get("momentum", 0.0)) in ((0.5, 0.999), momentum)


def test_validation_while_training_is_in_streams_of_the_first_words(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[torch.Tensor] = []
    watch_lstm(monkeypatch, lambda model, words: read.append(words))
    made = settings(Settings, valid_streams=3, valid_words=17)
    WordTask(corpus(), made, {ONLY: True}, steps=1, device=device()).evaluate()
    (words,) = read
    assert words.shape == (6, 3)
    assert words.T.flatten()[:17].tolist() == corpus().splits["valid"][:17].tolist()


@pytest.mark.parametrize(("center", "write"), [("yes", "centred"), (False, "literal")])
def test_older_runs_go_on_with_the_rule_that_they_were_begun_with(center: object, write: str) -> None:
    values = dataclasses.asdict(TrainSettings(gamma=0.05, limit=20, rate="inclusive", start=30))
    del values["write"], values["fade"]  # version 0.1; later ones had fade
    found = from_values(TrainSettings, {**values, "center": center})
    assert (found.write, found.start, found.fade) == (write, 30, False)
    assert (found.gamma, found.limit, found.rate) == (0.05, 20, "inclusive")
    timed = from_values(TrainSettings, {**values, "center": center, "start": "auto", "fade": True})
    assert (timed.write, timed.start, timed.fade) == (write, "auto", True)
    with pytest.raises(ValueError, match="center must be yes or no"):
        from_values(TrainSettings, {**values, "center": "perhaps"})


@pytest.mark.parametrize("verb", ["train", "compare"])
@pytest.mark.parametrize("name", CORPORA)
def test_settings_survive_their_files_and_the_command_line(verb: str, name: str) -> None:
    kind = settings_type(verb, name)
    assert issubclass(kind, TrainSettings) == (verb == "train")
    made = kind(tied=False, rule_scale="0.5", learning_rate=0.125, max_seconds=7.5)
    assert from_values(kind, dataclasses.asdict(made)) == made
    assert as_options(made) == ["--no-tied", "--rule-scale", "0.5", "--learning-rate", "0.125", "--max-seconds", "7.5"]
