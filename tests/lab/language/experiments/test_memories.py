"""Experiments with memories: the grids given are swept, and runs from before there were memories go on."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hebbian_softmax.lab.base.runs import Run
from hebbian_softmax.lab.data.buckets import BUCKETS
from hebbian_softmax.lab.language.experiments.memories import OPTIONS, WithMemories, grids_of
from hebbian_softmax.lab.language.experiments.tables import chosen_tables, frequency_table, memory_tables, summarize
from hebbian_softmax.lab.language.experiments.trials import Outcome
from hebbian_softmax.lab.language.memories.settings import Grids
from hebbian_softmax.lab.language.report.perplexities import shown
from tests.lab.language.commands import call
from tests.lab.language.experiments.conftest import Refusal, Reproduce, result_of, table, unfinished

pytestmark = pytest.mark.slow  # it reproduces whole experiments in miniature

ONE = ("--trials", "0", "--seeds", "1")
GRID = "--sweep-thetas 0.01,0.02,0.5 --sweep-sizes 10,30 --sweep-cache-shares 0.1,0.2 --sweep-neighbours 4,20 "
GRID += "--sweep-rates 0.1,1 --sweep-l2 0.5,0.7 --sweep-mbpa-shares 0.05,0.3 --two-step-words 3"
ADDED = {"memories", *OPTIONS}
CACHED = {"Cache": {"valid": 20.0, "test": 10.0}}


def test_the_grids_are_those_of_the_paper_unless_given() -> None:
    assert grids_of(WithMemories.settings_type()) == Grids()
    given = grids_of(WithMemories.settings_type(sweep_thetas="0.01,0.3", sweep_sizes="20000000"))
    assert given == Grids(thetas=(0.01, 0.3), sizes=(20_000_000,))


def test_rows_are_those_that_evaluate_finds_with_the_same_grids(
    reproduce: Reproduce, capsys: pytest.CaptureFixture[str]
) -> None:
    run, result = reproduce("frequency-table", *ONE, "--memories", "all", *GRID.split())
    buckets = table(result, "Test perplexity on reuters by training occurrences")
    totals = table(result, "Perplexity on reuters with memories")
    chosen = table(result, "Memories chosen on the validation text")
    assert "paper" not in " ".join(totals["LSTM"])
    assert len(totals) == 3 * 3
    rules = {"plain": ("LSTM", "", "plain softmax")}
    rules["default"] = ("LSTM + Hebbian", " (default rule)", "default rule")
    for short, (head, remark, title) in rules.items():
        capsys.readouterr()
        trial = run.path / "trials" / f"final-{short}-seed0"
        assert call("evaluate", trial, "--sweep", *GRID.split(), "--quiet", "--json") == 0
        alone, *rows = json.loads(capsys.readouterr().out)["memories"]["model"]
        assert totals[head + remark]["change on test by memories"] is None
        for row, more in zip(rows, ("Cache", "Cache + MbPA"), strict=True):
            valid, test = (row["scores"][split] for split in ("valid", "test"))
            change = 100 * (test["perplexity"] / alone["scores"]["test"]["perplexity"] - 1)
            cells = [shown(valid["perplexity"]), shown(test["perplexity"]), f"{change:+.1f} %"]
            assert list(totals[f"{head} + {more}{remark}"].values()) == cells
            by_bucket = {
                name: None if value is None else shown(value) for name, value in test["bucket_perplexity"].items()
            }
            assert buckets[f"{title} + {more}"] == {**by_bucket, "all": cells[1]}
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


def test_reuters_takes_memories_too(reproduce: Reproduce) -> None:
    run, result = reproduce("reuters", *ONE, "--memories", "cache", "--sweep-thetas", "0.030, .04")
    rows = table(result, "Perplexity on reuters with memories")
    assert [name for name in rows if "Cache" in name] == [
        *("LSTM + Cache", "LSTM + Hebbian + Cache (literal rule)", "LSTM + Hebbian + Cache (default rule)")
    ]
    chosen = [row["θ, n, λ of the cache"] for row in table(result, "Memories chosen").values()]
    assert all(row.startswith(("0.03, ", "0.04, ")) for row in chosen)
    # Resuming may name the same grid in other words.
    assert run.settings["sweep_thetas"] == "0.03,0.04"
    assert call("reproduce", "reuters", "--resume", run.path, "--sweep-thetas", "0.03,0.040", "--quiet") == 0


@pytest.mark.parametrize(
    ("command", "added"),
    [
        (("frequency-table", "--trials", "0", "--seeds", "2"), ADDED),
        (("wikitext-table", *ONE, "--memories", "cache"), ADDED - {"memories"}),
    ],
)
def test_a_run_begun_before_there_were_these_settings_goes_on(
    reproduce: Reproduce, command: tuple[str, ...], added: set[str], tmp_path: Path, refusal: Refusal
) -> None:
    finished, result = reproduce(*command)
    run = unfinished(finished, tmp_path, "final-default-seed0")
    assert added <= set(run.settings)
    keep_settings(run, set(run.settings) - added)
    resume = ("reproduce", command[0], "--resume", run.path, "--quiet")
    assert re.search("started with sweep_thetas = .*, not 0.01: ", refusal(*resume, "--sweep-thetas", "0.01"))
    assert call(*resume) == 0
    assert result_of(run)["tables"] == result["tables"]


def test_a_run_without_a_setting_that_was_always_there_is_refused(
    reproduce: Reproduce, tmp_path: Path, refusal: Refusal
) -> None:
    run = unfinished(reproduce("frequency-table", "--trials", "0", "--seeds", "2")[0], tmp_path)
    keep_settings(run, set(run.settings) - {"trials"})
    error = refusal("reproduce", "frequency-table", "--resume", run.path, "--quiet")
    assert "another version of hebbian-softmax (other settings: trials)" in error


def keep_settings(run: Run, names: set[str]) -> None:
    """Remove all other settings from config.json, as if an older version had written it."""
    settings = {name: value for name, value in run.settings.items() if name in names}
    (run.path / "config.json").write_text(json.dumps({**run.config, "settings": settings}), encoding="utf-8")


def outcome(title: str, seed: int, perplexity: float, more: Any = (), kind: str = "gutenberg") -> Outcome:
    score = {"words": 2, "perplexity": perplexity, "bucket_words": dict.fromkeys(BUCKETS, 1)}
    score["bucket_perplexity"] = dict.fromkeys(BUCKETS, perplexity)
    corpus = {"name": "mine", "settings": {"corpus": kind}}
    scores = {"valid": score, "test": score}
    return Outcome("", "final", title, {"seed": seed}, corpus, 1, 1, 1.0, "cpu", False, [], scores, more=dict(more))


def test_a_diverged_seed_and_what_older_runs_kept() -> None:
    """Older runs kept only the totals of models with memories: neither the chosen settings nor the buckets."""
    lost = replace(outcome("plain softmax", 0, 40.0), diverged=True, scores={})
    seeds = [lost, outcome("plain softmax", 1, 40.0, CACHED), outcome("literal rule", 0, 40.0, CACHED)]
    (found,) = memory_tables(seeds)
    assert found.rows == [
        ["LSTM", "not finite", "not finite", None],
        ["LSTM + Cache", "not finite", "not finite", None],
        ["LSTM + Hebbian (literal rule)", "40.00", "40.00", None],
        ["LSTM + Hebbian + Cache (literal rule)", "20.00", "10.00", "-75.0 %"],
    ]
    assert chosen_tables(seeds) == []
    buckets = {row[0]: row[1:] for row in frequency_table(seeds).rows}
    assert not any("Cache" in str(title) and cells[0] != "not finite" for title, cells in buckets.items())
    assert buckets["paper, Gutenberg, softmax"][-1] == "47.9"  # Other books have the paper's numbers for books, too.
    assert memory_tables([replace(each, more={}) for each in seeds]) == []


def test_ranges_are_said_to_meet_only_where_there_are_ranges() -> None:
    """A row that diverged has no range."""
    plain = [outcome("plain softmax", seed, 40.0 + seed) for seed in range(2)]
    near = [outcome("literal rule", seed, 40.5 + seed) for seed in range(2)]
    lost = [replace(each, title="default rule", diverged=True, scores={}) for each in near]
    assert "range" not in summarize({"plain softmax": plain, "default rule": lost})
    assert "range" not in summarize({"plain softmax": [*plain[:1], *lost[:1]], "literal rule": near})
    assert summarize({"plain softmax": plain, "literal rule": near, "default rule": lost}).endswith(
        "default rule not finite. No finite range is separate from that of plain softmax."
    )


@pytest.mark.parametrize("kind", ["wikitext-103", "wikitext-2"])
def test_the_papers_numbers_stand_beside_where_it_has_them(kind: str) -> None:
    (found,) = memory_tables([outcome("plain softmax", 0, 40.0, CACHED, kind)])
    assert ["LSTM + Cache", "20.00", "10.00", "-75.0 %", "34.5", "34.8"] in [list(row) for row in found.rows]
