"""`hebbian train`, `compare` and `evaluate` on a corpus, as a user meets them."""

import json
import re
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hebbian_softmax.lab.base.runs import Run, open_run
from hebbian_softmax.lab.language.experiments.train import suggest
from hebbian_softmax.lab.language.model import MODELS
from hebbian_softmax.lab.language.model.lstm import WordLSTM
from hebbian_softmax.lab.language.settings import Settings, TrainSettings
from hebbian_softmax.lab.language.source import prepared_corpus
from tests import ROOT
from tests.lab.language.commands import FEW, SIZES, call, only
from tests.lab.language.model.networks import out_of_memory, watch_lstm
from tests.lab.language.toy import folder, prepared

__all__ = ["folder"]


def error_of(capsys: pytest.CaptureFixture[str]) -> str:
    error = capsys.readouterr().err
    assert "Traceback" not in error
    return error.splitlines()[-1]


@pytest.fixture(scope="module")
def trained(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    runs = tmp_path_factory.mktemp("runs")
    assert call("train", folder, *FEW, "--quiet", "--runs", runs) == 0
    return only(runs)


@pytest.fixture
def copied(trained: Run, tmp_path: Path) -> Run:
    """A copy of the run, for a test that damages it."""
    return open_run(Path(shutil.copytree(trained.path, tmp_path / "copied")))


def test_a_run_has_the_name_of_its_corpus(trained: Run, folder: Path) -> None:
    assert re.fullmatch(rf"{folder.name}-\d{{8}}-\d{{6}}", trained.path.name)


def test_training_leaves_everything_in_its_run_folder(trained: Run) -> None:
    kept = {"valid-words.npz", "test-words.npz", "perplexity.png", "plan.json", "page.html"}
    assert {path.name for path in trained.path.iterdir()} == kept | {
        "config.json", "log.jsonl", "checkpoint.pt", "result.json",
    }  # fmt: skip
    records = trained.records()
    assert [record["step"] for record in records] == [4, 8, 12]
    assert [record["words"] for record in records] == [80, 160, 240]
    assert all(record["words_per_second"] > 0 and record["valid_perplexity"] > 1 for record in records)
    result = trained.result()
    assert result is not None
    scores = result["metrics"]["scores"]["model"]
    for split in ("valid", "test"):
        with np.load(trained.path / f"{split}-words.npz") as words:
            assert scores[split]["words"] == len(words["nll"]) == len(words["ids"])
            assert scores[split]["perplexity"] == pytest.approx(np.exp(words["nll"].astype("f8").mean()))
            assert str(words["corpus"]) == result["metrics"]["corpus"]["fingerprint"]


def test_evaluating_gives_the_numbers_of_the_training(trained: Run, capsys: pytest.CaptureFixture[str]) -> None:
    result = trained.result()
    assert result is not None
    assert call("evaluate", trained.path, "--json", "--quiet") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["scores"] == result["metrics"]["scores"]
    assert found["step"] == 12
    assert json.loads((trained.path / "evaluation.json").read_bytes())["scores"] == found["scores"]
    assert call("evaluate", trained.path, "--split", "test", "--streams", "5", "--quiet") == 0
    output = capsys.readouterr().out
    assert "Perplexity on the test text of toy" in output
    assert "validation" not in output
    near = json.loads((trained.path / "evaluation.json").read_bytes())["scores"]["model"]["test"]["perplexity"]
    exact = result["metrics"]["scores"]["model"]["test"]["perplexity"]
    assert near != exact
    assert near == pytest.approx(exact, rel=0.1)


def test_the_page_shows_how_to_get_at_activations(trained: Run) -> None:
    page = ROOT / "docs" / "language-models.md"
    (code,) = re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL)
    namespace: dict[str, Any] = {}
    exec(compile(code, str(page), "exec"), namespace)
    found = list(namespace["activations_of"](trained.path))
    with np.load(trained.path / "valid-words.npz") as words:
        assert torch.cat([targets for _, targets in found]).tolist() == words["ids"].tolist()
    assert {h.shape[1] for h, _ in found} == {6}


def test_a_comparison_has_both_beside_each_other(
    folder: Path, trained: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("compare", folder, *FEW, "--runs", tmp_path) == 0
    captured = capsys.readouterr()
    assert "plain softmax" in captured.out
    assert "Hebbian softmax" in captured.out
    assert "240/240 words" in captured.err
    run = only(tmp_path)
    result, alone = run.result(), trained.result()
    assert result is not None
    assert alone is not None
    # The Hebbian half of a comparison is the same training as that of `hebbian train`.
    assert result["metrics"]["scores"]["hebbian"] == alone["metrics"]["scores"]["model"]
    assert result["metrics"]["scores"]["plain"] != result["metrics"]["scores"]["hebbian"]
    assert (run.path / "plain-valid-words.npz").exists()
    assert call("evaluate", run.path, "--split", "valid", "--json", "--quiet") == 0
    again = json.loads(capsys.readouterr().out)["scores"]
    assert again["plain"]["valid"] == result["metrics"]["scores"]["plain"]["valid"]


def test_suggestions_change_what_is_trained() -> None:
    steps = {steps: suggest("stdlib", Settings(), steps) for steps in (3, 30, 9000)}
    assert [sum("--start" in each for each in found) for found in steps.values()] == [0, 1, 1]
    assert "--start 7 " in steps[30][-1]  # the run is over before step 500
    assert "--start 500 " in steps[9000][-1]
    assert not any("--rate" in each or "--start" in each for each in suggest("stdlib", TrainSettings(head="plain"), 30))


def test_a_prepared_corpus_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HEBBIAN_CACHE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").symlink_to(tmp_path)  # this folder holds no corpus and must not matter
    prepared(tmp_path / "corpora" / "mine")
    options = ["--steps", "11", "--final", "none", "--quiet", "--runs", tmp_path / "runs"]
    assert call("train", "mine", *FEW, *options) == 0
    run = only(tmp_path / "runs")
    assert [record["step"] for record in run.records()] == [4, 8, 11]  # as many evaluations as --evaluations asks for
    assert (run.command, run.settings["corpus"]) == ("train corpus", "mine")
    assert run.path.name.startswith("mine-")
    assert call("train", "yours", *FEW) == 2
    assert "invalid choice: 'yours'" in error_of(capsys)
    assert call("reproduce", "objectives", "--corpus", "yours", "--runs", tmp_path / "runs") == 1
    assert "'yours' is no corpus: name one of wikitext-2, " in (error := error_of(capsys))
    assert "stdlib, mine, or the folder" in error


def test_a_folder_of_texts_does_not_hide_the_corpus_of_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEBBIAN_CACHE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    assert prepared_corpus("mine") == str(tmp_path / "mine")  # opening it will say what is missing
    prepared(tmp_path / "corpora" / "mine")
    assert prepared_corpus("mine") == "mine"
    prepared(tmp_path / "new" / "mine")
    monkeypatch.chdir(tmp_path / "new")
    assert prepared_corpus("mine") == str(tmp_path / "new" / "mine")


def test_made_up_words_with_a_time_limit(tmp_path: Path) -> None:
    options = f"{SIZES} --vocabulary 30 --tokens 500 --max-seconds 5 --evaluations 2 --final none --head plain"
    began = time.monotonic()
    assert call("train", "zipf", *options.split(), "--quiet", "--runs", tmp_path) == 0
    assert time.monotonic() - began < 10
    run = only(tmp_path)
    plan = json.loads((run.path / "plan.json").read_bytes())
    assert run.records()[-1]["step"] == plan["steps"] > 10
    assert not list(run.path.glob("*.npz"))
    result = run.result()
    assert result is not None
    last = run.records()[-1]
    assert result["metrics"]["last_record"] == last
    assert f"in the last record of the log: {last['valid_perplexity']:.2f}." in result["summary"]
    assert [step.rpartition("  # ")[2] for step in result["next_steps"]] == [
        "other first weights, another order",
        "the same with a Hebbian softmax",
    ]
    assert len(run.records()) == 2


def test_a_changed_corpus_is_refused_and_the_checkpoint_stays(
    folder: Path, trained: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "toy"
    prepared(other)
    assert call("train", other, *FEW, "--final", "none", "--quiet", "--runs", tmp_path / "runs") == 0
    run = only(tmp_path / "runs")
    (run.path / "result.json").unlink()
    before = (run.path / "checkpoint.pt").read_bytes()
    prepared(other, test=torch.zeros(50, dtype=torch.int32))
    capsys.readouterr()
    for command in (["train", "corpus", "--resume", run.path], ["evaluate", run.path]):
        assert call(*command, "--quiet") == 1
        assert re.search(f"{run.path} cannot .*: the checkpoint is of a model of other words", error_of(capsys))
    assert (run.path / "checkpoint.pt").read_bytes() == before


@pytest.mark.parametrize("value", [3, 2**30])
def test_a_damaged_id_is_found_before_it_is_trained_on(
    value: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = prepared(tmp_path / "toy")
    ids = np.fromfile(made.path / "ids.bin", "<i4")
    ids[int(np.argmax(ids != value))] = value  # the id of another word, or of no word
    ids.tofile(made.path / "ids.bin")
    assert call("train", tmp_path / "toy", *FEW, "--quiet", "--runs", tmp_path / "runs") == 1
    assert re.search(r"toy/ids\.bin is damaged .*: delete the folder", error_of(capsys))
    assert not list((tmp_path / "runs").iterdir())


def test_a_checkpoint_of_other_settings_is_refused(copied: Run, capsys: pytest.CaptureFixture[str]) -> None:
    config = json.loads((copied.path / "config.json").read_bytes())
    config["settings"]["hidden"] = 9
    (copied.path / "config.json").write_text(json.dumps(config))
    (copied.path / "result.json").unlink()
    assert call("train", "corpus", "--resume", copied.path, "--quiet") == 1
    assert "does not fit" in error_of(capsys)
    assert call("evaluate", copied.path, "--quiet") == 1
    assert re.search("is not of the settings in its config.json .*: restore the config.json", error_of(capsys))


def test_a_loss_that_is_not_a_number_keeps_the_checkpoint(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Breaking(WordLSTM):
        def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            steps_taken.append(1)
            return super().forward(inputs, targets) * (float("nan") if len(steps_taken) == 6 else 1.0)

    steps_taken: list[int] = []
    monkeypatch.setitem(MODELS, "lstm", Breaking)
    assert call("train", folder, *FEW, "--checkpoint-seconds", "0", "--quiet", "--runs", tmp_path) == 1
    error = error_of(capsys)
    assert "loss became nan at or before step 6: start a new run with a lower learning rate" in error
    assert "the checkpoint of step 5 is kept" in error
    checkpoint = only(tmp_path).load_checkpoint()
    assert checkpoint is not None
    assert checkpoint["step"] == checkpoint["task"]["step"] == 5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "no-such-corpus"], "invalid choice"),
        (["train", "corpus"], "which corpus?"),
        (["train", "zipf", "--model", "perhaps"], "must be one of lstm"),
        (["train", "zipf", "--input-dropout", "1"], "below 1"),
        (["train", "zipf", "--epochs", "0"], "above 0"),
        (["train", "zipf", "--rule-scale", "much"], "must be a number"),
        (["train", "zipf", "--steps", "3", "--max-seconds", "5"], "give one of them"),
        (["train", "zipf", "--batch", "100000"], "too few for a batch"),
        (["evaluate", "nowhere"], "is not a run folder"),
    ],
)
def test_bad_arguments_are_one_clear_line(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    assert call(*arguments) in (1, 2)
    assert message in error_of(capsys)
    assert not list(tmp_path.glob("runs/*"))


def test_evaluate_on_a_device_too_small(
    trained: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    watch_lstm(monkeypatch, out_of_memory)
    assert call("evaluate", trained.path, "--quiet") == 1
    message = "too small for reading a text: hebbian evaluate takes less with fewer --streams or --device cpu"
    assert message in error_of(capsys)


def test_evaluate_wants_a_language_model_with_a_checkpoint(
    copied: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (copied.path / "checkpoint.pt").unlink()
    assert call("evaluate", copied.path) == 1
    assert "is finished and has no weights" in error_of(capsys)  # resuming it would not give any
    (copied.path / "result.json").unlink()
    assert call("evaluate", copied.path) == 1
    assert "has no checkpoint yet: resume it" in error_of(capsys)
    config = json.loads((copied.path / "config.json").read_bytes())
    config["command"] = "compare longtail"
    (copied.path / "config.json").write_text(json.dumps(config))
    assert call("evaluate", copied.path) == 1
    assert "which has no language model" in error_of(capsys)


@pytest.mark.parametrize("short", [{"train": 20}, {"valid": 1}, {"test": 1}])
def test_a_text_that_is_too_short_is_one_clear_line(
    short: dict[str, int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ((split, length),) = short.items()
    prepared(tmp_path / "short", **{split: torch.zeros(length, dtype=torch.int32)})
    assert call("train", tmp_path / "short", *FEW, "--quiet", "--runs", tmp_path / "runs") == 1
    error = error_of(capsys)
    assert str(tmp_path / "short") in error
    assert f"has {length} words" in error
    assert not list((tmp_path / "runs").iterdir())
