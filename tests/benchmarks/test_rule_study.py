"""The program that compares forms of the write trains, measures and repeats itself."""

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from benchmarks.rule_study import final
from benchmarks.rule_study.fleet import train_fleet
from benchmarks.rule_study.lstm import BatchedLSTM
from benchmarks.rule_study.plans import CHOSEN
from benchmarks.rule_study.train import Trial, train

from hebbian_softmax import HebbianSoftmax
from hebbian_softmax._triton import kernels_on_cpu
from hebbian_softmax.lab.data.corpus import write_corpus
from hebbian_softmax.lab.language.model.lstm import WordLSTM
from tests.interpreter import interpreted as interpreter
from tests.interpreter import quiet

pytestmark = [*quiet, pytest.mark.slow]  # it trains language models

SMALL = {"corpus": "toy", "hidden": 8, "embedding": 4, "batch": 2, "sequence": 4, "epochs": 2.0}
STRONG = {"recurrent_dropout": 0.4, "locked_dropout": True, "carry": True, "weight_decay": 1e-3}
TRANSFORMER = {"model": "transformer", "heads": 2, "layers": 2, "residual_dropout": 0.1, "momentum": 0.9}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    words = [f"w{i}" for i in range(9)]
    text = torch.randint(9, (600,), generator=torch.Generator().manual_seed(0)).numpy()
    splits = {split: [text] for split in ("train", "valid", "test")}
    write_corpus(tmp_path / "toy", "toy", splits, words, torch.full((9,), 60), {"corpus": "toy"}, [])
    return tmp_path


@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"write": "literal"}, marks=pytest.mark.slow),
        {"write": "across", "start": 0.1, "fade": True, "first": True, "counted": "start"},
        pytest.param(
            {"write": "centred", "rate": "kalman", "gamma": 0.1, "surprise": 1.0, "seen": True}, marks=pytest.mark.slow
        ),
        {"write": "across", "epochs": 0.5, **STRONG},
        {"write": "across", "epochs": 0.5, **TRANSFORMER},
    ],
    ids=["plain", "literal", "across", "centred", "strong", "transformer"],
)
def test_the_same_trial_gives_the_same_numbers(data: Path, options: dict[str, Any]) -> None:
    first, second = (train(Trial.of(SMALL | options), "cpu", data, time.time() + 60) for _ in range(2))
    assert first["test"] == second["test"]
    assert 1 < first["test"]["all"] < 30
    assert first["trial"] == second["trial"]


@pytest.mark.parametrize("carry", [False, True])
def test_models_of_a_fleet_are_those_trained_alone(data: Path, carry: bool) -> None:
    still = SMALL | {"input_dropout": 0.0, "output_dropout": 0.0}
    across = {"write": "across", "limit": 1e9, "start": 0.2, "fade": True, "first": True}
    options = [{}, across | {"seed": 3}, {"write": "centred", "surprise": 1.0, "seen": True, "learning_rate": 0.002}]
    options += [{"library": {"start": 3}}, {"library": {}, "seed": 4}]
    still |= {"carry": carry, "weight_decay": 1e-3 * carry, "momentum": 0.5 * carry}
    trials = [Trial.of(still | each) for each in options]
    together = train_fleet(trials, "cpu", data, time.time() + 60)
    for trial, found in zip(trials, together, strict=True):
        alone = train(trial, "cpu", data, time.time() + 60)
        assert found["trial"] == alone["trial"]
        for split in ("valid", "test"):
            known = {name: value for name, value in alone[split].items() if value is not None}
            assert {name: found[split][name] for name in known} == pytest.approx(known, rel=1e-4)
        assert found["signals"][-1] == pytest.approx(alone["signals"][-1], rel=1e-3)
        assert [step for step, _ in found["curve"]] == [step for step, _ in alone["curve"]]


def test_the_librarys_head_writes_as_the_study_does(data: Path) -> None:
    """The default's rate, line and shorter memories, in both programs."""
    still = SMALL | {"input_dropout": 0.0, "output_dropout": 0.0}
    study = CHOSEN | {"limit": 10**9, "start_step": 60, "fade": False, "caught_up": 0.0}
    library: dict[str, Any] = {"library": {"limit": 10**9, "start": 60, "fade": False}}
    plain, ours, theirs = (
        train(Trial.of(still | each), "cpu", data, time.time() + 60) for each in ({}, study, library)
    )
    # The head's running norms begin with all familiar rows, the study's with those of the batch.
    assert theirs["test"]["all"] == pytest.approx(ours["test"]["all"], rel=1e-4)
    assert theirs["test"]["all"] != pytest.approx(plain["test"]["all"], rel=4e-3)
    assert theirs["began"] is None


def test_words_are_told_apart_by_how_often_training_has_seen_them(data: Path) -> None:
    trials = [Trial.of(SMALL | {"trained_words": 60, "by_seen": True} | head) for head in ({}, {"library": {}})]
    alone = [train(trial, "cpu", data, time.time() + 60) for trial in trials]
    for found in (*alone, *train_fleet(trials, "cpu", data, time.time() + 60)):
        groups = found["by_seen"]
        assert sum(group["classes"] for group in groups) == 9
        assert sum(group["share"] for group in groups) == pytest.approx(1)
        assert sum(group["mass"] for group in groups) == pytest.approx(1)
        nats = sum(group["share"] * group["nats"] for group in groups)
        assert nats == pytest.approx(np.log(found["valid"]["all"]), rel=1e-5)
        assert found["steps"] == 2 * ((59 // 2 - 4) // 4)
        assert [group["classes"] for group in groups] != [9, 0, 0, 0, 0, 0, 0]


def test_dropout_of_a_fleet_and_what_must_be_trained_alone(data: Path) -> None:
    trials = [Trial.of(SMALL | STRONG | {"seed": seed}) for seed in (0, 0, 1)]
    first, second, other = (found["test"]["all"] for found in train_fleet(trials, "cpu", data, time.time() + 60))
    assert len({first, second, other}) == 3  # masks differ, although two trials have the same first weights
    for trial in (TRANSFORMER, {"layers": 2}, {"batch": 3}):
        with pytest.raises(ValueError, match="of one layer and of one shape"):
            train_fleet([Trial.of(SMALL), Trial.of(SMALL | trial)], "cpu", data, time.time() + 60)


@pytest.mark.parametrize("interpreted", [False, pytest.param(True, marks=interpreter)], ids=["torch", "kernels"])
def test_the_lstm_of_several_models_is_torchs(interpreted: bool) -> None:
    dtype = torch.float32 if interpreted else torch.float64
    models, time, batch, inputs, hidden = 3, 4, 5, 6, 7
    shapes = (models, time, batch, inputs), (models, 4 * hidden, inputs), (models, 4 * hidden, hidden)
    x, u, r, b = (torch.randn(s, dtype=dtype, requires_grad=True) for s in (*shapes, (models, 4 * hidden)))
    h0, c0 = torch.randn(2, models, batch, hidden, dtype=dtype)
    upstream = torch.randn(models, time, batch, hidden, dtype=dtype)
    expected = []
    for k in range(models):
        weights = [u[k], r[k], b[k], torch.zeros_like(b[k])]
        output, _, _ = torch.lstm(x[k], (h0[k : k + 1], c0[k : k + 1]), weights, True, 1, 0.0, True, False, False)
        expected.append(output)
    with kernels_on_cpu(interpreted):
        found, _ = BatchedLSTM.apply(x, u, r, b, h0, c0)
        gradients = torch.autograd.grad((found * upstream).sum(), (x, u, r, b))
    tolerance = 1e-5 if interpreted else 1e-12  # sums of some ten numbers of size 1 to 10
    torch.testing.assert_close(found, torch.stack(expected), rtol=0, atol=tolerance)
    right = torch.autograd.grad((torch.stack(expected) * upstream).sum(), (x, u, r, b))
    for ours, theirs in zip(gradients, right, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance)


def test_a_write_changes_the_result_and_time_can_run_out(data: Path) -> None:
    plain, written = (
        train(Trial.of(SMALL | options), "cpu", data, time.time() + 60)["test"]["all"]
        for options in ({}, {"write": "across", "limit": 1e9})
    )
    assert plain != written
    with pytest.raises(TimeoutError, match="when the time was over"):
        train(Trial.of(SMALL), "cpu", data, time.time() - 1)


def test_each_setting_of_the_network_changes_the_result(data: Path) -> None:
    quick = {**SMALL, "epochs": 0.1, "momentum": 0.0}
    options = [{}, *({name: value} for name, value in STRONG.items()), {"momentum": 0.5}, TRANSFORMER]
    found = [train(Trial.of(quick | each), "cpu", data, time.time() + 60)["test"]["all"] for each in options]
    assert len(set(found)) == len(options)


def test_a_carried_state_is_that_of_the_text_before(data: Path) -> None:
    """Without learning, the last loss is that of the last sequence after all words of its epoch."""
    still = {"learning_rate": 0.0, "input_dropout": 0.0, "output_dropout": 0.0, "epochs": 1.0, "seed": 3}
    trial = Trial.of(SMALL | still | {"carry": True})
    found = train(trial, "cpu", data, time.time() + 60)
    torch.manual_seed(3)
    head = HebbianSoftmax(4, 9, gamma=0.0, limit=0)
    model = WordLSTM(head, trial.network, memorizes=False)
    text = torch.randint(9, (600,), generator=torch.Generator().manual_seed(0))
    offset, length = np.random.RandomState(1003).randint(4), 4 * found["steps"]
    columns = [text[first : first + 598].view(2, -1).T[offset : offset + length] for first in (0, 1)]
    logits = model.features(columns[0])[0][-4:] @ head.weight.T
    assert found["loss"] == pytest.approx(
        F.cross_entropy(logits.flatten(0, 1), columns[1][-4:].flatten()).item(), rel=1e-5
    )
    with pytest.raises(ValueError, match="the state of a transformer cannot be carried"):
        train(Trial.of(SMALL | TRANSFORMER | {"carry": True}), "cpu", data, time.time() + 60)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "options", [{}, STRONG, TRANSFORMER, {"library": {}}], ids=["plain", "strong", "transformer", "library"]
)
def test_steps_in_a_graph_learn_on_a_gpu(data: Path, options: dict[str, Any]) -> None:
    sizes = {"hidden": 32, "embedding": 32, "batch": 8, "sequence": 8, "epochs": 20.0, "write": "across"}
    found = train(Trial.of(SMALL | sizes | options), "cuda", data, time.time() + 300)
    assert found["steps"] > 100  # nearly all of them are replays
    assert 1 < found["test"]["all"] < 9.5  # nine words, equally often


def test_a_final_run_trains_both_heads(data: Path, tmp_path: Path) -> None:
    grid = {"learning_rate": (0.004,)}
    task = final.Task(SMALL | {"epochs": 0.5}, grid, range(2), with_memories=1, other_epochs=(0.25,))
    runs = final.Runs(tmp_path / "runs.jsonl")
    for some in final.wanted(task, runs, memories=True):
        final.run([each for each in some if runs.of(each) is None], runs, "cpu", data, time.time() + 60)
    settings, long, short, *memories = final.tables(task, runs)
    assert settings == "settings learning_rate: {'plain': (0.004,), 'rule': (0.004,)}"
    assert long.startswith("0.5 epochs, 2 seeds, test text")
    assert short.startswith("0.25 epochs, 2 seeds, test text")
    assert [each.strip().startswith("+ cache + MbPA") for each in memories if "cache" in each] == [False, True]
    assert len(final.Runs(tmp_path / "runs.jsonl").known) == 2 + 2 * 4  # what memories were tried with is a final run
