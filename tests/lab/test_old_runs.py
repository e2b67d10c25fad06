"""Run folders that older versions left unfinished go on with their rule, and end where that version ended them."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from hebbian_softmax import HebbianSoftmax, InclusiveRate, PaperRate
from hebbian_softmax.lab.base.runs import Run, open_run
from hebbian_softmax.lab.cli import main
from tests import ROOT
from tests.lab.editing import edited

OLD = ROOT / "tests" / "fixtures" / "version-0.1"
FINISHED: dict[str, Any] = json.loads((OLD / "finished.json").read_text())
NEARLY = 1e-4
"""How far a perplexity may be off, as a share. With AVX-512, AVX2 and no vector instructions these perplexities differ
by 2e-8; another seed changes them by several per cent."""


@pytest.fixture
def heads(monkeypatch: pytest.MonkeyPatch) -> list[HebbianSoftmax]:
    """All heads that are made from now on."""
    made: list[HebbianSoftmax] = []
    initialise = HebbianSoftmax.__init__

    def watch(self: HebbianSoftmax, *args: Any, **options: Any) -> None:
        initialise(self, *args, **options)
        made.append(self)

    monkeypatch.setattr(HebbianSoftmax, "__init__", watch)
    return made


def rules(heads: list[HebbianSoftmax]) -> set[tuple[object, ...]]:
    return {(head.write, head.scale, head.start, head.fade, head.rate) for head in heads}


def copy_of(name: str, folder: Path) -> Path:
    path = folder / name
    shutil.copytree(OLD / "runs" / name, path)
    for file in path.rglob("*.json"):  # the folder of the corpus was another one on the machine of that run
        file.write_text(file.read_text().replace("CORPUS", str(OLD / "corpus")))
    return path


def go_on(path: Path) -> tuple[Run, dict[str, Any]]:
    """Finish a copy of an old run folder, and check that it went on from its checkpoint instead of starting anew."""
    run = open_run(path)
    before = run.records()
    assert main([*run.command.split(), "--resume", str(path), "--quiet"]) == 0
    assert run.records()[: len(before)] == before
    result = run.result()
    assert result is not None
    return run, result


@pytest.mark.parametrize(("name", "write"), [("train-zipf", "centred"), ("compare-zipf", "literal")])
def test_a_language_model_goes_on(name: str, write: str, heads: list[HebbianSoftmax], tmp_path: Path) -> None:
    run, result = go_on(copy_of(name, tmp_path))
    assert rules(heads) == {(write, "match", 0, False, InclusiveRate(0.05, 20))}
    scores = {model: found["test"]["perplexity"] for model, found in result["metrics"]["scores"].items()}
    assert scores == pytest.approx(FINISHED[name], rel=NEARLY)
    assert main(["evaluate", str(run.path), "--device", "cpu", "--quiet"]) == 0
    assert main(["report", str(run.path), "--markdown"]) == 0


def test_a_run_with_settings_of_its_own_keeps_them(heads: list[HebbianSoftmax], tmp_path: Path) -> None:
    """Versions after 0.1 had `start` and `fade` before they had `write`."""
    path = copy_of("compare-zipf", tmp_path)
    with edited(path / "config.json") as config:
        config["settings"].update(start="auto", fade=True, center=True, gamma=0.3)
    go_on(path)
    plain, hebbian = heads
    assert rules([hebbian]) == {("centred", "match", "auto", True, InclusiveRate(0.3, 20))}
    assert plain.settling is None


def test_an_image_curriculum_goes_on(heads: list[HebbianSoftmax], tmp_path: Path) -> None:
    _, result = go_on(copy_of("compare-glyphs", tmp_path))
    assert rules(heads) == {("centred", "match", 0, False, PaperRate(0.1, 50))}
    accuracies = {name: result["metrics"][name]["accuracy"] for name in FINISHED["compare-glyphs"]}
    for name, expected in FINISHED["compare-glyphs"].items():
        assert len(accuracies[name]) == len(expected)
        assert accuracies[name][:2] == expected[:2]  # measured before the run was stopped


def test_a_long_tail_goes_on_with_the_rule_it_was_begun_with(heads: list[HebbianSoftmax], tmp_path: Path) -> None:
    """A run of version 0.1 has γ and T, and no other setting of the rule."""
    options = ["--steps", "4", "--classes", "40", "--gamma", "0.1", "--limit", "30", "--quiet"]
    assert main(["compare", "longtail", *options, "--runs", str(tmp_path)]) == 0
    (path,) = tmp_path.iterdir()
    for name in ("checkpoint.pt", "log.jsonl", "result.json"):
        (path / name).unlink()
    with edited(path / "config.json") as config:
        for name in ("write", "rate", "start", "fade"):
            del config["settings"][name]
    heads.clear()
    go_on(path)
    assert rules(heads) == {("centred", "match", 0, False, PaperRate(0.1, 30))}


def test_a_reproduction_goes_on_with_its_finished_trials(heads: list[HebbianSoftmax], tmp_path: Path) -> None:
    name = "reproduce-frequency-table"
    _, result = go_on(copy_of(name, tmp_path))
    _, literal, corrected = heads  # after a plain one
    assert rules([literal]) == {("literal", 1.0, 0, False, PaperRate(0.05, 20))}
    assert rules([corrected]) == {("centred", "match", 0, False, InclusiveRate(0.05, 20))}
    assert {trial["title"] for trial in result["metrics"]["trials"]} == {
        *("plain softmax", "literal rule", "corrected rule")
    }
    found = {trial["name"]: trial for trial in result["metrics"]["trials"]}
    values = {
        key: trial["scores"]["test"]["perplexity"] if trial["scores"] else trial["curve"][-1]["valid_perplexity"]
        for key, trial in found.items()
    }
    assert values == pytest.approx(FINISHED[name], rel=NEARLY)
    for stored in (OLD / "runs" / name / "trials").glob("tuning-*"):  # these were finished and are not made again
        before = json.loads((stored / "result.json").read_text())
        assert found[stored.name]["seconds"] == before["metrics"]["trial"]["seconds"]
