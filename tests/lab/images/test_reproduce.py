"""`hebbian reproduce` on images in miniature: all parts, their tables and figures, stopped and resumed."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from hebbian_softmax.lab.base.json_files import write_json
from hebbian_softmax.lab.base.rule import RULE_BEFORE
from hebbian_softmax.lab.base.runs import open_run
from hebbian_softmax.lab.base.settings import from_values
from hebbian_softmax.lab.images.curriculum import History
from hebbian_softmax.lab.images.fleet import Store, Trial
from hebbian_softmax.lab.images.learner import Method
from hebbian_softmax.lab.images.reproduce import (
    RATES,
    TRIALS,
    Settings,
    best,
    compare,
    hebbian_settings,
    plain_settings,
    report,
    tried_settings,
)
from hebbian_softmax.lab.images.tables import tabulate_milestones, tabulate_writes
from tests import ROOT
from tests.lab.editing import edited
from tests.lab.images import toys  # which offers `reproduce toy`
from tests.lab.test_cli import call, error_line, new_run

SMALL = [
    *("reproduce", toys.TOY.name, "--seeds", "1", "--steps", "25", "--target", "35", "--tuning-seeds", "1"),
    *("--tuning-trials", "2", "--beyond-steps", "25", "--filters", "2", "--device", "cpu", "--quiet"),
]


@pytest.mark.slow
def test_everything_in_miniature(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(*SMALL, "--runs", tmp_path, "--budget", "0.2") == 1  # stops, perhaps with some trials stored
    *_, message, command = capsys.readouterr().err.splitlines()
    assert "error: the budget of 0.2 s is used up" in message
    (run,) = tmp_path.iterdir()
    assert command == f"  hebbian reproduce toy --resume {run}"
    assert not (run / "result.json").exists()
    with edited(run / "config.json") as config:
        config["settings"]["budget"] = 0.0

    stored = {path: path.stat().st_mtime_ns for path in run.glob("trials/*.json")}
    assert call("reproduce", toys.TOY.name, "--quiet", "--resume", run) == 0
    assert all(path.stat().st_mtime_ns == time for path, time in stored.items())
    assert {"levels.png", "classes.png", "rates.png", "page.html", "trials.json"} <= {
        each.name for each in run.iterdir()
    }
    result = open_run(run).result()
    assert result is not None
    titles = [table["title"].partition(",")[0] for table in result["tables"]]
    assert titles == [
        "Tuning",
        "Both heads",
        "Steps to so many classes",
        "What the rule has written",
        "Both at the paper's learning rate",
        "Both with a softmax over the active classes only",
        "Both with classes never seen left out of the softmax",
        "What the rule has written",
        "Plain softmax by learning rate",
        "Beyond the paper",
    ]
    assert len(result["tables"][0]["rows"]) == 4
    assert len(result["tables"][-1]["rows"]) == 18
    trials = json.loads((run / "trials.json").read_bytes())
    assert len(trials) == 4 + 5 * 2 + len(RATES) + 16
    assert "Not every seed reached 35 classes" in result["summary"]
    assert capsys.readouterr().out.count("seeds") >= 5


def test_one_part(tmp_path: Path) -> None:
    run = new_run(tmp_path, *SMALL, "--parts", "main")
    assert not (run / "rates.png").exists()
    result = open_run(run).result()
    assert result is not None
    assert result["tables"][0]["title"] == "Both heads, not tuned, at a learning rate of 0.005"
    assert sorted(path.stem for path in run.glob("trials/*")) == ["main-hebbian-seed0", "main-plain-seed0"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--parts", "main,nothing"], "--parts: must be all or some of tuning,main"),
        (["--steps", "26"], "must be a multiple of 25"),
        (["--tuning-trials", "28"], "from 1 to 27"),
        (["--budget", "-1"], "must be a number from 0 up"),
    ],
)
def test_bad_options(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(*SMALL, *options) == 2
    assert message in error_line(capsys)


def test_equally_many_settings_are_tried() -> None:
    for count in (1, 2, 5, TRIALS):
        plain, hebbian = plain_settings(count), hebbian_settings(Settings().rule, count)
        assert len(set(plain)) == len(set(hebbian)) == count
    assert [plain_settings()[end].learning_rate for end in (0, -1)] == [1e-4, 4e-2]


def test_the_rule_can_be_left_as_it_is_while_both_heads_try_the_same_learning_rates() -> None:
    settings = Settings(tune_rule=False, tuning_trials=5, gamma=0.3)
    tried = tried_settings(settings)
    plain, hebbian = ([each.learning_rate for each in tried[name]] for name in ("plain", "hebbian"))
    assert plain == hebbian
    assert len(set(plain)) == 5
    rate = settings.rule.learning_rate
    assert {replace(each, learning_rate=rate) for each in tried["hebbian"]} == {settings.rule}


def test_the_rule_is_tuned_around_its_default_and_an_older_run_as_it_was_begun() -> None:
    rule = Settings().rule
    assert rule == Method(hebbian=True, learning_rate=5e-3)
    assert Settings(learning_rate=0.01).plain == Method(hebbian=False, learning_rate=0.01)
    assert {each.gamma for each in hebbian_settings(rule)} == {0.2}  # it has no effect at a constant learning rate
    assert len({each.learning_rate for each in hebbian_settings(rule)}) == 9
    assert {each.gamma for each in hebbian_settings(replace(rule, rate="paper"))} == {0.1, 0.2, 0.3}
    assert {each.write for each in hebbian_settings(rule)} == {"across"}
    assert {each.limit for each in hebbian_settings(rule)} == {30, "auto", 300}
    assert {each.limit for each in hebbian_settings(Settings(rate="paper").rule)} == {30, 100, 300}
    stored = json.loads((ROOT / "results" / "omniglot" / "config.json").read_text())["settings"]
    older = from_values(Settings, stored).rule
    assert older == Method(hebbian=True, gamma=0.1, limit=50, **RULE_BEFORE)
    assert {each.gamma for each in hebbian_settings(older)} == {0.05, 0.1, 0.25}
    assert Settings(write="literal", start=0, fade=False).rule.scale == 1.0


def test_the_stored_trials_of_an_older_run_are_found(tmp_path: Path) -> None:
    """All 27 settings of each head, and the variants of the rule, as version 0.1 trained them on Omniglot."""
    folder = ROOT / "results" / "omniglot"
    settings = from_values(Settings, json.loads((folder / "config.json").read_text())["settings"])
    store = Store(tmp_path)
    for record in json.loads((folder / "trials.json").read_text()):
        write_json(tmp_path / f"{record['name']}-seed{record['seed']}.json", record)
    missing: list[str] = []

    def do(part: str, trials: Sequence[Trial]) -> dict[Trial, History]:
        found = {trial: store.load(trial) for trial in trials}
        missing.extend(trial.key for trial, history in found.items() if history is None)
        return {trial: history or History(30, [0.0], [30]) for trial, history in found.items()}

    report(settings, do)
    assert {name.partition("-")[0] for name in missing} == {"seen"}  # a part that came later


def test_what_the_rule_has_written_is_said_where_it_is_known() -> None:
    known = [History(30, [0.7], [40], began=110, written=10), History(30, [0.7], [40], began=130, written=20)]
    older = [History(30, [0.7], [40])]
    (table,) = tabulate_writes({"rule": known, "plain": older})
    assert table.rows == [["rule", "120 ± 28", "38 ± 35 %"]]
    assert tabulate_writes({"plain": older}) == []


def test_the_best_gets_there_first() -> None:
    soon, late, never = Method(True, 1.0), Method(True, 2.0), Method(True, 3.0)
    outcomes = {
        never: [History(30, [0.7, 0.1], [35, 35])],
        late: [History(30, [0.1, 0.7], [30, 40])],
        soon: [History(30, [0.7, 0.1], [40, 40])],
    }
    assert best(outcomes, 40, 50) == soon
    assert best(outcomes, 35, 50) == soon  # as soon as `never`, and further in the end
    assert best({never: outcomes[never], late: outcomes[late]}, 45, 50) == late


def test_the_comparison_of_means_and_ranges() -> None:
    def group(*steps: int) -> list[History]:
        return [History(30, [0.7] * (step // 25), [30] * (step // 25 - 1) + [200]) for step in steps]

    groups = {"plain softmax": group(1000, 1050), "Hebbian softmax": group(500, 500)}
    numbers, words = compare(groups, Settings())
    assert numbers["ratio"] == pytest.approx(500 / 1025)
    assert numbers["apart"]
    assert (
        "500 ± 0 steps, plain softmax 1,025 ± 71 (mean ± 2σ over 2 seeds), a ratio of 0.49; the ranges do not" in words
    )
    rows = tabulate_milestones({**groups, "none": [History(30, [0.1], [30])]}).rows
    assert rows[0] == ["50 classes", "1,025 ± 71", "500 ± 0", "0 of 1 got there"]
    assert rows[-1][0] == "200 classes"
    groups["Hebbian softmax"] = group(500, 1500)
    assert not compare(groups, Settings())[0]["apart"]
