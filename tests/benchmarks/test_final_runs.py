"""Final runs are planned alike for both heads, from the validation text alone."""

from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benchmarks.rule_study import final


def fake_result(trial: Any) -> dict[str, Any]:
    """A result whose perplexity is lowest at a learning rate of 0.01 and a dropout of 0.5; the rule is 5 % better."""
    own = trial["learning_rate"], trial["output_dropout"]
    value = 50 + abs(np.log(own[0] / 0.01)) + 10 * abs(own[1] - 0.5) + trial["seed"] / 100
    value *= 1.0 if trial.get("library") is None else 0.95
    return {"valid": {"all": value}, "test": {"all": value, "<10": None}, "began": 120}


def test_final_runs_grow_the_grid_for_both_heads_and_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    axes = {"learning_rate": (0.0025, 0.005), "output_dropout": (0.3, 0.4)}
    task = final.Task({"corpus": "toy"}, axes, range(3))
    monkeypatch.setattr(final, "TASKS", {"wikitext": task})
    made: list[str] = []

    def run(some: list[dict[str, Any]], runs: final.Runs, *rest: Any) -> None:
        if len(made) >= 21:
            raise TimeoutError("over")
        for each in some:
            made.append(each["name"])
            runs.add(each, fake_result(each))

    monkeypatch.setattr(final, "run", run)
    file = tmp_path / "runs.jsonl"
    monkeypatch.setattr("sys.argv", ["final", "wikitext", "--json", str(file), "--fleet", "1"])
    final.main()
    assert "stopped: over" in capsys.readouterr().out
    first, made = made, []
    final.main()
    printed = capsys.readouterr().out
    assert "3 seeds, test text" in printed
    assert "-5.00 ± 0.00 %" in printed
    assert len(set(first + made)) == len(first + made)  # nothing was run twice
    finals = [name for name in made if name.endswith(("seed 0", "seed 1", "seed 2"))]
    assert finals[:2] == [f"{head}, learning_rate 0.01, output_dropout 0.5, seed 0" for head in ("plain", "rule")]
    # Each axis has grown to one value beyond the best.
    rates = {f"learning_rate {rate:g}" for rate in (0.0025, 0.005, 0.01, 0.02)}
    assert {name.split(", ")[1] for name in first + made} == rates
    assert {name.split(", ")[2] for name in first + made} == {f"output_dropout {p:g}" for p in (0.3, 0.4, 0.5, 0.6)}


def test_the_best_points_are_tried_with_further_seeds(tmp_path: Path) -> None:
    task = final.asked(final.Task({"corpus": "toy"}, {"output_dropout": (0.1, 0.2, 0.3)}, range(2)), 2, 10)
    perplexities = {(0.1, 100): 9.0, (0.2, 100): 7.0, (0.3, 100): 8.0}  # 0.2 was lucky with the first seed
    perplexities |= {(0.2, 101): 9.0, (0.2, 102): 9.0, (0.3, 101): 8.0, (0.3, 102): 8.0}
    runs, made = final.Runs(tmp_path / "runs.jsonl"), []
    for trials in final.wanted(task, runs):
        for trial in trials:
            if runs.of(trial) is None:
                made.append((trial["output_dropout"], trial["seed"]))
                value = perplexities.get(made[-1], 8.5)
                runs.add(trial, {"valid": {"all": value}})
    assert final.best_points(task, runs) == {"plain": (0.3,), "rule": (0.3,)}
    further = [(point, seed) for point in (0.2, 0.3) for seed in (101, 102)]
    assert sorted(made[6:-4]) == sorted(2 * further)
    assert sorted(made[-4:]) == [(0.3, 10), (0.3, 10), (0.3, 11), (0.3, 11)]
    with pytest.raises(SystemExit, match="must not be tuning seeds"):
        final.asked(task, 2, 99)


def test_a_grid_grows_to_its_most_points_and_no_further(tmp_path: Path) -> None:
    axes = {"learning_rate": (0.0025, 0.005), "output_dropout": (0.3, 0.4)}
    task = final.Task({"corpus": "toy"}, axes, range(1), most_points=7)
    runs, sizes = final.Runs(tmp_path / "runs.jsonl"), []
    for grid in final.tuned(task, runs):
        sizes.append([len(values) for values in grid.values()])
        for head, point in product(final.HEADS, product(*grid.values())):
            trial = final.given(task, head, point, final.TUNING_SEED)
            if runs.of(trial) is None:
                runs.add(trial, fake_result(trial))
    assert sizes == [[2, 2], [3, 2]]  # one more on either axis would make eight or nine
