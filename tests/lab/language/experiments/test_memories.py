"""Memories in the recipes of language models: the grids given are swept, and old runs go on without them."""

import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from hebbian_softmax.lab.data.buckets import BUCKETS
from hebbian_softmax.lab.language.experiments.memories import GRIDS, MemorySettings, grids_of
from hebbian_softmax.lab.language.experiments.memory_tables import chosen_tables, memory_tables
from hebbian_softmax.lab.language.experiments.presentation import summarize
from hebbian_softmax.lab.language.experiments.tables import frequency_table
from hebbian_softmax.lab.language.experiments.trials import Outcome
from hebbian_softmax.lab.language.memories.settings import Grids
from hebbian_softmax.lab.language.report.perplexities import shown
from tests.lab.language.commands import call
from tests.lab.language.experiments.miniature import folder, reproduce, table
from tests.lab.language.experiments.quick import quick

__all__ = ["folder", "quick", "reproduce"]
ONE = ("--trials", "0", "--seeds", "1")
GRID = "--sweep-thetas 0.01,0.02,0.5 --sweep-sizes 10,30 --sweep-cache-shares 0.1,0.2 --sweep-neighbours 4,20 "
GRID += "--sweep-rates 0.1,1 --sweep-l2 0.5,0.7 --sweep-mbpa-shares 0.05,0.3 --two-step-words 3"
ADDED = {"memories", "two_step_words", *GRIDS}


def test_the_grids_are_those_of_the_paper_unless_given() -> None:
    assert grids_of(MemorySettings()) == Grids()
    given = grids_of(replace(MemorySettings(), sweep_thetas="0.01,0.3", sweep_sizes="20000000"))
    assert given == Grids(thetas=(0.01, 0.3), sizes=(20_000_000,))


def test_rows_are_those_that_evaluate_finds_with_the_same_grids(
    reproduce: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    run, result = reproduce("frequency-table", *ONE, "--memories", "all", *GRID.split())
    buckets = table(result, "Test perplexity on reuters by training occurrences")
    totals = table(result, "Perplexity on reuters with memories")
    chosen = table(result, "Memories chosen on the validation text")
    assert "paper" not in " ".join(totals["LSTM"])
    assert len(totals) == 3 * 3
    rules = {"plain": ("LSTM", "", "plain softmax")}
    rules["corrected"] = ("LSTM + Hebbian", " (corrected rule)", "corrected rule")
    for short, (head, remark, title) in rules.items():
        capsys.readouterr()
        trial = run.path / "trials" / f"final-{short}-seed0"
        assert call("evaluate", trial, "--sweep", *GRID.split(), "--quiet", "--json") == 0
        alone, *rows = json.loads(capsys.readouterr().out)["memories"]["model"]
        assert totals[head + remark]["change on test by memories"] is None
        for row, more in zip(rows, ("Cache", "Cache + MbPA"), strict=True):
            scores = row["scores"]
            found = totals[f"{head} + {more}{remark}"]
            assert found["validation"] == shown(scores["valid"]["perplexity"])
            assert found["test"] == shown(scores["test"]["perplexity"])
            change = 100 * (scores["test"]["perplexity"] / alone["scores"]["test"]["perplexity"] - 1)
            assert found["change on test by memories"] == f"{change:+.1f} %"
            of_buckets = scores["test"]["bucket_perplexity"]
            expected = {name: None if of_buckets[name] is None else shown(of_buckets[name]) for name in BUCKETS}
            assert buckets[f"{title} + {more}"] == {**expected, "all": found["test"]}
            cache = chosen[f"{title} + {more}"]["θ, n, λ of the cache"]
            assert cache == f"{row['cache']['theta']:g}, {row['cache']['size']:,}, {row['cache']['share']:g}"
        k, steps, rate, *_, share = chosen[f"{title} + {more}"]["K, steps, α, β, λ of MbPA"].split(", ")
        mbpa = row["mbpa"]
        assert [k, steps, rate, share] == [f"{mbpa[name]:g}" for name in ("neighbours", "steps", "rate", "share")]
        for name, values in (("rate", (0.1, 1)), ("share", (0.05, 0.3))):
            assert mbpa[name] in values
            ends = chosen[f"{title} + {more}"]["at the end of its grid: the best may lie beyond"]
            assert f"{mbpa[name]:g} ({'lowest' if mbpa[name] == values[0] else 'highest'})" in ends
        assert "α" not in chosen[f"{title} + Cache"]["at the end of its grid: the best may lie beyond"]


def test_reuters_takes_memories_too(reproduce: Any) -> None:
    _, result = reproduce("reuters", *ONE, "--memories", "cache", "--sweep-thetas", "0.03")
    rows = table(result, "Perplexity on reuters with memories")
    assert [name for name in rows if "Cache" in name] == [
        *("LSTM + Cache", "LSTM + Hebbian + Cache (literal rule)", "LSTM + Hebbian + Cache (corrected rule)")
    ]
    assert all(row["θ, n, λ of the cache"].startswith("0.03, ") for row in table(result, "Memories chosen").values())


@pytest.mark.parametrize(("name", "added"), [("frequency-table", ADDED), ("wikitext-table", ADDED - {"memories"})])
def test_a_run_begun_before_there_were_these_settings_goes_on(
    reproduce: Any, name: str, added: set[str], capsys: pytest.CaptureFixture[str]
) -> None:
    options = [] if name == "frequency-table" else ["--memories", "cache"]
    run, result = reproduce(name, *ONE, *options)
    config = json.loads((run.path / "config.json").read_bytes())
    assert added <= set(config["settings"])
    config["settings"] = {key: value for key, value in config["settings"].items() if key not in added}
    (run.path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (run.path / "result.json").unlink()
    shutil.rmtree(run.path / "trials" / "final-corrected-seed0")
    assert call("reproduce", name, "--resume", run.path, "--sweep-thetas", "0.01", "--quiet") == 1
    assert "started with sweep_thetas = nothing, not 0.01: leave the option away" in capsys.readouterr().err
    assert call("reproduce", name, "--resume", run.path, "--quiet") == 0
    again = run.result()
    assert again is not None
    assert again["tables"] == result["tables"]


def test_a_run_without_a_setting_that_was_always_there_is_refused(
    reproduce: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    run, _ = reproduce("frequency-table", *ONE)
    config = json.loads((run.path / "config.json").read_bytes())
    del config["settings"]["trials"]
    (run.path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (run.path / "result.json").unlink()
    assert call("reproduce", "frequency-table", "--resume", run.path, "--quiet") == 1
    assert "another version of hebbian-softmax (other settings: trials)" in capsys.readouterr().err


def outcome(title: str, seed: int, perplexity: float, more: dict[str, Any], **changes: Any) -> Outcome:
    score = {"words": 2, "perplexity": perplexity, "bucket_words": dict.fromkeys(BUCKETS, 1)}
    score["bucket_perplexity"] = dict.fromkeys(BUCKETS, perplexity)
    corpus = {"name": "mine", "settings": {"corpus": "gutenberg"}}
    made = Outcome("", "final", title, {"seed": seed}, corpus, 1, 1, 1.0, "cpu", False, [])
    return replace(made, scores={"valid": score, "test": score}, more=more, **changes)


def test_a_diverged_seed_and_what_older_runs_kept() -> None:
    """Older ones kept the totals alone: no table of the settings chosen, no buckets of mixtures."""
    cached = {"Cache": {"valid": 20.0, "test": 10.0}}
    seeds = [
        outcome("plain softmax", 0, 40.0, {}, diverged=True),
        outcome("plain softmax", 1, 40.0, cached),
        outcome("literal rule", 0, 40.0, cached),
    ]
    seeds[0] = replace(seeds[0], scores={})
    (found,) = memory_tables(seeds)
    assert found.rows == [
        ["LSTM", "not finite", "not finite", None],
        ["LSTM + Cache", "not finite", "not finite", None],
        ["LSTM + Hebbian (literal rule)", "40.00", "40.00", None],
        ["LSTM + Hebbian + Cache (literal rule)", "20.00", "10.00", "-75.0 %"],
    ]
    assert chosen_tables(seeds) == []
    assert not any("Cache" in str(row[0]) and row[1] != "not finite" for row in frequency_table(seeds).rows)
    assert memory_tables([replace(each, more={}) for each in seeds]) == []


def test_ranges_are_said_to_meet_only_where_there_are_ranges() -> None:
    """What diverged has none."""
    plain = [outcome("plain softmax", seed, 40.0 + seed, {}) for seed in range(2)]
    near = [outcome("literal rule", seed, 40.5 + seed, {}) for seed in range(2)]
    lost = [replace(each, title="corrected rule", diverged=True, scores={}) for each in near]
    assert "range" not in summarize({"plain softmax": plain, "corrected rule": lost})
    assert "range" not in summarize({"plain softmax": [*plain[:1], *lost[:1]], "literal rule": near})
    assert summarize({"plain softmax": plain, "literal rule": near, "corrected rule": lost}).endswith(
        "corrected rule not finite. Of those that are finite no range is apart from that of plain softmax."
    )


@pytest.mark.parametrize("kind", ["wikitext-103", "wikitext-2"])
def test_the_papers_numbers_stand_beside_where_it_has_them(kind: str) -> None:
    cached = {"Cache": {"valid": 20.0, "test": 10.0}}
    of_kind = {"corpus": {"name": "mine", "settings": {"corpus": kind}}}
    models = [Outcome(**{**asdict(outcome("plain softmax", 0, 40.0, cached)), **of_kind})]
    (found,) = memory_tables(models)
    assert ["LSTM + Cache", "20.00", "10.00", "-75.0 %", "34.5", "34.8"] in [list(row) for row in found.rows]


def test_settings_of_grids_come_back_from_config(folder: Path, tmp_path: Path) -> None:
    """Resuming names the same grid in other words."""
    options = [*ONE, "--memories", "cache", "--corpus", folder, "--quiet", "--size", "tiny", "--device", "cpu"]
    options += ["--steps", "2", "--hidden", "8", "--embedding", "6", "--batch", "4", "--sequence", "5"]
    assert call("reproduce", "reuters", *options, "--sweep-thetas", "0.10, .2", "--runs", tmp_path) == 0
    (run,) = tmp_path.iterdir()
    assert json.loads((run / "config.json").read_bytes())["settings"]["sweep_thetas"] == "0.1,0.2"
    assert call("reproduce", "reuters", "--resume", run, "--sweep-thetas", "0.1,0.20", "--quiet") == 0
