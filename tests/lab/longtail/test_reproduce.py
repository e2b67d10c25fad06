"""`hebbian reproduce longtail`: equal budgets, what is chosen and said, and a run that goes on."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from hebbian_softmax.lab.base.runs import open_run
from hebbian_softmax.lab.cli import main
from hebbian_softmax.lab.longtail.learner import Method
from hebbian_softmax.lab.longtail.reproduce import (
    KINDS,
    TRIALS,
    Outcome,
    Settings,
    methods_of,
    summarize,
    tables_of,
)
from tests.lab.editing import edited

SMALL = ["reproduce", "longtail", "--classes", "25", "--steps", "3", "--seeds", "2", "--trials", "2", "--quiet"]
TAILS = {tail.name: tail for tail in Settings().tails()}


def run_small(runs: Path) -> Path:
    assert main([*SMALL, "--task", "zipf", "--runs", str(runs)]) == 0
    (run,) = runs.iterdir()
    return run


def accuracies(run: Path) -> dict[str, Any]:
    result = open_run(run).result()
    assert result is not None
    return result["metrics"]["accuracy"]


@pytest.mark.parametrize("tail", TAILS.values(), ids=TAILS)
@pytest.mark.parametrize("count", [1, 4, TRIALS])
def test_every_method_has_the_same_number_of_settings(tail, count) -> None:
    for kind, (_, hebbian, balanced) in KINDS.items():
        for write in ("across", "centred", "literal"):
            methods = methods_of(kind, tail, Settings(trials=count, write=write, start=5, fade=False))
            assert len(set(methods)) == len(methods) == count
            assert all((each.hebbian, each.balanced) == (hebbian, balanced) for each in methods)
            if hebbian:
                assert {(each.write, each.start, each.fade) for each in methods} == {(write, 5, False)}


def test_accuracies_of_groups() -> None:
    counts = torch.tensor([200, 50, 5, 4])
    found = TAILS["zipf"].measure(counts, torch.tensor([1.0, 0.5, 0.25, 0.0], dtype=torch.double))
    weighted = (200 + 25 + 1.25) / 259
    expected = {"all": 0.4375, "rare": 0.125, "frequent": 1.0, "weighted": weighted}
    torch.testing.assert_close(found, expected | {"from_4": 0.125, "from_32": 0.5, "from_128": 1.0})


def outcome_with(**final: list[float]) -> Outcome:
    groups = ("all", "rare", "frequent", "weighted")
    records = {kind: [dict.fromkeys(groups, value / 100) for value in values] for kind, values in final.items()}
    chosen = {kind: Method(0.001) for kind in KINDS}
    return Outcome(TAILS["digits"], {kind: {Method(0.001): records[kind]} for kind in KINDS}, chosen, records)


def test_the_summary_says_who_wins_and_who_loses() -> None:
    outcome = outcome_with(plain=[70.0, 72.0], balanced=[80.0, 82.0], rule=[60.0, 63.0], both=[79.0, 82.4])
    assert summarize(outcome) == (
        "digits: balanced softmax is best over all classes, 81.0 ± 1.4 %. Balanced softmax gains 10.0 ± 0.0 points "
        "against plain softmax; the rule loses 9.5 ± 0.7 against plain softmax and loses 0.3 ± 1.0 (not in all seeds) "
        "on top of balanced softmax."
    )
    tied = outcome_with(plain=[70.0, 70.0], balanced=[70.0 + 1e-12, 71.0], rule=[70.0, 70.0], both=[70.0, 70.0])
    assert [row[-1] for row in tables_of(tied)[0].rows] == [None, "1 of 2", "0 of 2", "0 of 2"]
    assert "Balanced softmax gains 0.5 ± 0.7 (not in all seeds)" in summarize(tied)
    table, tuning = tables_of(outcome)
    assert [row[-1] for row in table.rows] == [None, "2 of 2", "0 of 2", "2 of 2"]
    assert [row[-1] for row in tuning.rows] == ["chosen"] * 4


def test_only_the_recent_rate_has_a_limit_of_its_own() -> None:
    limits = [
        {method.limit for method in methods_of("rule", TAILS["zipf"], Settings(rate=rate))}
        for rate in ("recent", "paper")
    ]
    assert limits == [{"auto", 30, 300}, {100, 30, 300}]


@pytest.mark.slow
def test_a_stopped_run_goes_on_where_it_was(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole, stopped = run_small(tmp_path / "whole"), run_small(tmp_path / "stopped")
    (stopped / "result.json").unlink()
    lines = (stopped / "log.jsonl").read_bytes().splitlines(keepends=True)
    assert len(lines) == len(KINDS) * (2 + 2)
    # One line is lost, and another is not whole.
    (stopped / "log.jsonl").write_bytes(b"".join([*lines[:3], *lines[4:9], lines[9][:20]]))
    assert main(["reproduce", "longtail", "--quiet", "--resume", str(stopped)]) == 0
    assert accuracies(stopped) == accuracies(whole)
    records = [json.loads(line) for line in (stopped / "log.jsonl").read_text().splitlines()]
    assert len(records) == len(lines)
    assert len({record["step"] for record in records}) == len(lines)
    assert "test accuracy in %" in capsys.readouterr().out


def test_an_older_run_goes_on_with_its_rule_and_its_records(tmp_path: Path) -> None:
    """Version 0.1 knew no settings of the rule but γ and T, whose pairs were others."""
    options = ["--task", "zipf", "--write", "centred", "--start", "0", "--no-fade", "--runs", str(tmp_path)]
    assert main([*SMALL, *options]) == 0
    (run,) = tmp_path.iterdir()
    expected = accuracies(run)
    (run / "result.json").unlink()
    with edited(run / "config.json") as config:
        for name in ("write", "start", "fade"):
            del config["settings"][name]
    before = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    assert {(each["gamma"], each["limit"]) for each in before if each["hebbian"]} == {(0.1, 30)}
    older = []
    for record in before[:-1]:  # one training is missing
        kept = {name: value for name, value in record.items() if name not in ("write", "start", "fade", "checksum")}
        older.append(json.dumps(kept if kept["hebbian"] else {**kept, "gamma": 0.1, "limit": 30}) + "\n")
    (run / "log.jsonl").write_text("".join(older))
    assert main(["reproduce", "longtail", "--quiet", "--resume", str(run)]) == 0
    assert accuracies(run) == expected
    after = (run / "log.jsonl").read_text().splitlines(keepends=True)
    assert after[:-1] == older  # nothing else was trained again
    last = json.loads(after[-1])
    assert (last["write"], last["start"], last["fade"], last["gamma"], last["limit"]) == ("centred", 0, False, 0.1, 30)


def test_the_digits_need_scikit_learn_before_anything_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)
    assert main([*SMALL, "--runs", str(tmp_path)]) == 1
    assert "needs scikit-learn" in capsys.readouterr().err
    assert not list(tmp_path.glob("*/log.jsonl"))
