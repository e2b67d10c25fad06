"""`hebbian sweep` in miniature: whole, on a budget, killed and resumed, without its corpus, with divergence."""

import json
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from hebbian_softmax.lab.base import environment
from hebbian_softmax.lab.base.runs import Run, open_run
from tests.lab.editing import edited
from tests.lab.language.commands import SIZES, call, only
from tests.lab.language.experiments.conftest import Refusal, checkpoint_of, result_of, stop_at, unfinished
from tests.lab.language.toy import folder

__all__ = ["folder"]
GRID = f"{SIZES.replace('--hidden 8', '--hidden 8,4')} --layers 1 --layer-norm none --tied yes --input-dropout 0.1"
SMALL = f"{GRID} --evaluations 2 --trials 2 --seeds 1".replace("--tensorboard no", "").split()


@pytest.fixture(scope="module")
def swept(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    runs = tmp_path_factory.mktemp("runs")
    assert call("sweep", folder, *SMALL, "--steps", "12", "--quiet", "--runs", runs) == 0
    return only(runs)


def without_times(trials: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return what a resumed run must have in common with one that was not stopped."""
    for trial in trials:
        trial.pop("seconds")
        trial["settings"].pop("checkpoint_seconds")
        for record in trial["curve"]:
            record.pop("seconds")
            record.pop("words_per_second", None)
    return trials


def test_a_sweep_leaves_its_trials_in_one_result(swept: Run) -> None:
    result = result_of(swept)
    trials = result["metrics"]["trials"]
    assert [trial["name"] for trial in trials] == [
        *("tuning-plain-00-seed1000", "tuning-plain-01-seed1000"),
        *("tuning-hebbian-00-seed1000", "tuning-hebbian-01-seed1000"),
        *("final-plain-seed0", "final-hebbian-seed0"),
    ]
    assert [set(trial["scores"]) for trial in trials] == [set()] * 4 + [{"valid", "test"}] * 2
    for head, first in (("plain", 0), ("hebbian", 2)):
        best = min(trials[first : first + 2], key=lambda trial: trial["curve"][-1]["valid_perplexity"])
        final = trials[4 + (head == "hebbian")]
        differing = {name for name, value in final["settings"].items() if best["settings"][name] != value}
        assert differing == {"seed"}
    assert [len(trial["curve"]) for trial in trials] == [2] * 6
    assert (swept.path / "perplexity.png").exists()
    assert not list(swept.path.glob("trials/tuning-*/checkpoint.pt"))  # Nobody needs these many weights.
    # Every measurement of a text leaves a file with the losses of its words: the test text is for the chosen alone.
    measured = {path.parent.name for path in swept.path.glob("trials/*/test-words.npz")}
    assert measured == {"final-plain-seed0", "final-hebbian-seed0"}
    assert {"Tuning", "Perplexity on toy"} <= {re.split("[:,]", table["title"])[0] for table in result["tables"]}


def test_a_final_trial_is_a_run_of_its_own(swept: Run, capsys: pytest.CaptureFixture[str]) -> None:
    final = swept.path / "trials" / "final-hebbian-seed0"
    assert call("evaluate", final, "--json", "--quiet") == 0
    scores = json.loads(capsys.readouterr().out)["scores"]["model"]
    assert scores == result_of(swept)["metrics"]["trials"][-1]["scores"]


def test_where_there_are_no_weights_those_to_measure_are_named(swept: Run, refusal: Refusal) -> None:
    trials = swept.path / "trials"
    assert f"name one of them, such as {trials / 'final-hebbian-seed0'}" in refusal("evaluate", swept.path)
    tuned = trials / "tuning-plain-00-seed1000"
    message = f"{tuned} is finished and has no weights (a tuning deletes those of its trials): name another run"
    assert message in refusal("evaluate", tuned)


@pytest.mark.slow
def test_a_killed_sweep_goes_on_to_the_same_numbers(swept: Run, folder: Path, tmp_path: Path) -> None:
    """The sweep is killed inside its third trial; finished trials are not repeated, the third one goes on."""
    command = ["sweep", folder, *SMALL, "--steps", "12", "--checkpoint-seconds", "0.1", "--quiet"]
    third = "trials/tuning-hebbian-00-seed1000"
    run, *_ = stop_at(f"{third}/checkpoint.pt", signal.SIGKILL, tmp_path, *command)
    stored = {path: path.stat().st_mtime_ns for path in run.path.glob("trials/*/result.json")}
    assert len(stored) == 2
    assert 0 < checkpoint_of(open_run(run.path / third))["step"] < 12
    assert call("sweep", "corpus", "--resume", "--quiet", "--runs", tmp_path) == 0
    assert {path: path.stat().st_mtime_ns for path in stored} == stored
    one, other = (without_times(result_of(each)["metrics"]["trials"]) for each in (run, swept))
    assert one == other


def test_a_budget_stops_inside_a_trial_and_the_next_call_goes_on(
    folder: Path, tmp_path: Path, refusal: Refusal
) -> None:
    last_line = refusal("sweep", folder, *SMALL, "--steps", "12", "--budget", "1e-9", "--quiet", "--runs", tmp_path)
    run = only(tmp_path)
    assert last_line == f"  hebbian sweep {folder} --resume {run.path}"
    first = open_run(run.path / "trials" / "tuning-plain-00-seed1000")
    assert checkpoint_of(first)["step"] == 1
    refusal("sweep", "corpus", "--resume", run.path, "--quiet")
    assert checkpoint_of(first)["step"] == 2


def test_all_is_made_again_without_corpus_and_device(
    swept: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = unfinished(swept, tmp_path)
    (run.path / "perplexity.png").unlink()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for path in run.path.rglob("*.json"):  # Neither the corpus nor the device that they name exists.
        with edited(path):  # takes out the checksum
            pass
        text = path.read_text().replace(run.settings["corpus"], "/nowhere")
        path.write_text(text.replace('"device": "cpu"', '"device": "cuda"'))
    assert call("sweep", "corpus", "--resume", run.path, "--quiet") == 0
    assert result_of(run)["tables"] == result_of(swept)["tables"]
    drawn = (run.path / "perplexity.png").read_bytes()
    assert len(drawn) > 1000
    # result.json alone is enough to draw the figure again.
    shutil.rmtree(run.path / "trials")
    (run.path / "perplexity.png").unlink()
    assert call("report", run.path) == 0
    assert (run.path / "perplexity.png").read_bytes() == drawn


def test_an_unfinished_sweep_reports_the_seeds_that_all_rows_have(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("sweep", folder, *SMALL, "--steps", "4", "--seeds", "2", "--quiet", "--runs", tmp_path) == 0
    run = only(tmp_path)
    (run.path / "result.json").unlink()

    def rows() -> list[list[str]]:
        capsys.readouterr()
        assert call("report", run.path) == 0
        lines = capsys.readouterr().out.splitlines()
        starts = [number for number, line in enumerate(lines) if "Not finished: Perplexity on toy, mean" in line]
        return [re.split(" {2,}", line) for start in starts for line in lines[start + 2 : start + 4]]

    (_, seeds, *both), other = rows()
    assert (seeds, other[:2]) == ("2", ["Hebbian softmax", "2"])
    shutil.rmtree(run.path / "trials" / "final-hebbian-seed1")
    (title, seeds, valid, test, *_), other = rows()
    assert (title, seeds, other[:2]) == ("plain softmax", "1", ["Hebbian softmax", "1"])
    stored = result_of(open_run(run.path / "trials" / "final-plain-seed0"))["metrics"]["trial"]["scores"]
    assert [valid, test] == [f"{stored[split]['perplexity']:.2f}" for split in ("valid", "test")]
    assert both[:2] != [valid, test]
    assert "Not finished: Perplexity on toy" in (run.path / "page.html").read_text()
    for left in (run.path / "trials").glob("final-*"):
        shutil.rmtree(left)
    assert rows() == []


def test_a_trial_of_other_settings_is_refused(swept: Run, tmp_path: Path, refusal: Refusal) -> None:
    run = unfinished(swept, tmp_path)
    stored = run.path / "trials" / "final-plain-seed0" / "result.json"
    with edited(stored) as content:
        content["metrics"]["trial"]["settings"]["hidden"] = 5
    error = refusal("sweep", "corpus", "--resume", run.path, "--quiet")
    assert re.search(f"{stored.parent} cannot be used .*other settings", error)


def test_an_older_sweep_goes_on_with_its_rule_and_its_grid(folder: Path, tmp_path: Path) -> None:
    """Version 0.1 had the setting `center`, and other values of T and γ, which plain softmax has in its trials, too."""
    rule = ["--write", "centred", "--rate", "inclusive", "--no-fade"]
    assert call("sweep", folder, *SMALL, *rule, "--steps", "4", "--quiet", "--runs", tmp_path) == 0
    run = only(tmp_path)
    expected = result_of(run)["tables"]
    (run.path / "result.json").unlink()
    shutil.rmtree(run.path / "trials" / "final-hebbian-seed0")
    for path in (run.path / "config.json", *run.path.glob("trials/*/*.json")):
        with edited(path) as content:
            settings = content["settings"] if path.name == "config.json" else content["metrics"]["trial"]["settings"]
            del settings["fade"]
            settings["center"] = settings.pop("write") == "centred"
            settings |= {"limit": 20, "gamma": 0.05} if settings.get("head") == "plain" else {}
    stored = {path: path.stat().st_mtime_ns for path in run.path.glob("trials/*/result.json")}
    assert call("sweep", "corpus", "--resume", run.path, "--quiet") == 0
    assert {path: path.stat().st_mtime_ns for path in stored} == stored
    assert result_of(run)["tables"] == expected
    final = open_run(run.path / "trials" / "final-hebbian-seed0").settings
    assert (final["write"], final["start"], final["fade"], final["rate"]) == ("centred", 0, False, "inclusive")
    assert final["limit"] in (5, 20, 100)  # the paper's grid, not that of the default rule


def test_a_trial_says_what_it_was_made_with(swept: Run, tmp_path: Path) -> None:
    """The run itself may have been started on another machine months ago."""
    run = unfinished(swept, tmp_path, "final-hebbian-seed0")
    began = {"started": "2000-01-01T00:00:00+00:00", "versions": {"torch": "1.0"}, "hardware": {"gpus": ["other"]}}
    (run.path / "config.json").write_text(json.dumps({**run.config, **began}))
    assert call("sweep", "corpus", "--resume", run.path, "--quiet") == 0
    made = open_run(run.path / "trials" / "final-hebbian-seed0").config
    one, other = ({**found, "commit": ""} for found in (made["versions"], environment.versions()))
    assert one == other  # The commit may change meanwhile.
    assert made["hardware"] == environment.hardware()
    assert made["started"] >= swept.config["started"]


def test_a_final_model_that_diverges_is_shown_and_is_an_error(folder: Path, tmp_path: Path, capsys: Any) -> None:
    sizes = SIZES.replace("--tensorboard no", "--size tiny --trials 0 --seeds 1 --steps 2 --evaluations 2").split()
    rates = ["--learning-rate", "1e38", "--optimizer", "sgd", "--clip", "0"]
    command = ["reproduce", "frequency-table", "--corpus", folder, *sizes, *rates, "--quiet", "--runs", tmp_path]
    assert call(*command) == 1
    captured = capsys.readouterr()
    assert "not finite" in captured.out
    assert "error: the numbers of final-plain-seed0" in captured.err
    assert all(trial["diverged"] for trial in result_of(only(tmp_path))["metrics"]["trials"])
    assert call("reproduce", "frequency-table", "--resume", only(tmp_path).path, "--quiet") == 1


def test_a_setting_that_diverges_is_one_of_the_outcomes(folder: Path, tmp_path: Path, capsys: Any) -> None:
    options = " ".join(SMALL).replace("8,4", "8").split()
    rates = ["--learning-rate", "1e38,0.01", "--optimizer", "sgd", "--clip", "0", "--steps", "6"]
    assert call("sweep", folder, *options, *rates, "--quiet", "--runs", tmp_path) == 0
    trials = result_of(only(tmp_path))["metrics"]["trials"]
    assert [trial["diverged"] for trial in trials[:2]] == [True, False]
    assert trials[-1]["settings"]["learning_rate"] == 0.01
    assert "not finite" in capsys.readouterr().out
