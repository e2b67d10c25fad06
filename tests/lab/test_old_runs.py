"""Run folders that version 0.1 left unfinished go on, and end where that version ended them."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from hebbian_softmax.lab.base.runs import Run, open_run
from hebbian_softmax.lab.cli import main
from tests import ROOT

OLD = ROOT / "tests" / "fixtures" / "version-0.1"
FINISHED: dict[str, Any] = json.loads((OLD / "finished.json").read_text())
NEARLY = 1e-4
"""How far a perplexity may be off, as a share. With AVX-512, AVX2 and no vector instructions these perplexities differ
by 2e-8; another seed changes them by several per cent."""


def go_on(name: str, folder: Path) -> tuple[Run, dict[str, Any]]:
    """Finish a copy of an old run folder, and check that it went on from its checkpoint instead of starting anew."""
    path = folder / name
    shutil.copytree(OLD / "runs" / name, path)
    for file in path.rglob("*.json"):  # the folder of the corpus was another one on the machine of that run
        file.write_text(file.read_text().replace("CORPUS", str(OLD / "corpus")))
    run = open_run(path)
    before = run.records()
    assert main([*run.command.split(), "--resume", str(path), "--quiet"]) == 0
    assert run.records()[: len(before)] == before
    result = run.result()
    assert result is not None
    return run, result


@pytest.mark.parametrize("name", ["train-zipf", "compare-zipf"])
def test_a_language_model_goes_on(name: str, tmp_path: Path) -> None:
    run, result = go_on(name, tmp_path)
    scores = {model: found["test"]["perplexity"] for model, found in result["metrics"]["scores"].items()}
    assert scores == pytest.approx(FINISHED[name], rel=NEARLY)
    assert main(["evaluate", str(run.path), "--device", "cpu", "--quiet"]) == 0
    assert main(["report", str(run.path), "--markdown"]) == 0


def test_an_image_curriculum_goes_on(tmp_path: Path) -> None:
    _, result = go_on("compare-glyphs", tmp_path)
    accuracies = {name: result["metrics"][name]["accuracy"] for name in FINISHED["compare-glyphs"]}
    for name, expected in FINISHED["compare-glyphs"].items():
        assert len(accuracies[name]) == len(expected)
        assert accuracies[name][:2] == expected[:2]  # measured before the run was stopped


def test_a_reproduction_goes_on_with_its_finished_trials(tmp_path: Path) -> None:
    name = "reproduce-frequency-table"
    _, result = go_on(name, tmp_path)
    found = {trial["name"]: trial for trial in result["metrics"]["trials"]}
    values = {
        key: trial["scores"]["test"]["perplexity"] if trial["scores"] else trial["curve"][-1]["valid_perplexity"]
        for key, trial in found.items()
    }
    assert values == pytest.approx(FINISHED[name], rel=NEARLY)
    for stored in (OLD / "runs" / name / "trials").glob("tuning-*"):  # these were finished and are not made again
        before = json.loads((stored / "result.json").read_text())
        assert found[stored.name]["seconds"] == before["metrics"]["trial"]["seconds"]
