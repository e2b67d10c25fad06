"""The paper's experiments on language models in miniature, and the paper's numbers beside ours."""

import math
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from hebbian_softmax.lab.base.runs import open_run
from hebbian_softmax.lab.data.buckets import BUCKETS, bucket_of
from hebbian_softmax.lab.data.corpus import open_corpus
from hebbian_softmax.lab.language.experiments.curves import WikitextCurves
from hebbian_softmax.lab.language.experiments.paper_numbers import ALL, COLUMNS, FREQUENCY_TABLE, WIKITEXT_TABLE
from hebbian_softmax.lab.language.experiments.tables import frequency_table
from hebbian_softmax.lab.language.experiments.trials import Outcome
from hebbian_softmax.lab.language.experiments.tuning import DEFAULT, LITERAL, Row
from hebbian_softmax.lab.language.experiments.wikitext_table import RECIPES
from hebbian_softmax.lab.language.report.perplexities import spread_cell
from hebbian_softmax.lab.language.settings import TrainSettings
from tests import ROOT, SHARED
from tests.lab.language.commands import call
from tests.lab.language.experiments.conftest import Reproduce, result_of, table, unfinished, words_of

PAPER = SHARED / "paper.tex"


@pytest.mark.slow
def test_reuters_has_the_words_of_june_beside_the_total(reproduce: Reproduce) -> None:
    run, result = reproduce("reuters", "--trials", "1")
    rows = table(result, "Perplexity on all words and on words first seen in June 1987; ")
    assert list(rows) == ["plain softmax", "literal rule", "default rule"]
    for title, short in (("plain softmax", "plain"), ("default rule", "default")):
        for split, column in (("valid", "validation"), ("test", "test")):
            seeds = [words_of(run, f"final-{short}-seed{seed}", split) for seed in range(2)]
            fresh = [math.exp(losses[ids % 3 == 0].mean()) for losses, ids in seeds]
            assert rows[title][f"{column}, new in June"] == spread_cell(fresh)
    (first,) = [trial for trial in result["metrics"]["trials"] if trial["name"] == "final-plain-seed0"]
    _, ids = words_of(run, "final-plain-seed0", "test")
    assert first["sets"]["test"]["last month"]["words"] == (ids % 3 == 0).sum()
    assert first["sets"]["test"]["last 90 days"]["words"] == (ids % 3 != 1).sum()
    assert table(result, "Perplexity on all words and on words first seen since 1987-03-20")
    assert "trained on 1987-02-01 to 1987-06-17" in result["summary"]
    assert "tested on 1987-10-19 to 1987-10-20, the days of the stock market crash" in result["summary"]


def test_the_frequency_table_is_that_of_the_saved_losses(reproduce: Reproduce, dated: Path) -> None:
    run, result = reproduce("frequency-table", "--trials", "0", "--seeds", "2")
    rows = table(result, "Test perplexity on reuters by training occurrences")
    of_word = bucket_of(open_corpus(dated).counts).numpy()
    seeds = [words_of(run, f"final-literal-seed{seed}", "test") for seed in range(2)]
    for place, bucket in enumerate(BUCKETS):
        inside = [losses[of_word[ids] == place] for losses, ids in seeds]
        assert rows["literal rule"][bucket] == spread_cell(
            [math.exp(each.mean()) if len(each) else None for each in inside]
        )
    printed = ("39.4", "6.5e3", "3.7e4", "-", "53.5")
    assert rows["paper, GigaWord, softmax"] == dict(zip([*BUCKETS, "all"], printed, strict=True))
    assert rows["paper, GigaWord, Hebbian softmax"]["all"] == "43.7"


def test_wikitext_table_has_memories_below_their_models(reproduce: Reproduce) -> None:
    run, result = reproduce("wikitext-table", "--trials", "0", "--seeds", "1", "--memories", "cache")
    rows = table(result, "Perplexity on reuters; the paper's on WikiText-103")
    assert [name for name in rows if name.startswith("LSTM") and "Graves" not in name] == [
        *("LSTM", "LSTM + Cache"),
        *("LSTM + Hebbian (literal rule)", "LSTM + Hebbian + Cache (literal rule)"),
        *("LSTM + Hebbian (default rule)", "LSTM + Hebbian + Cache (default rule)"),
    ]
    losses, _ = words_of(run, "final-default-seed0", "test")
    alone = rows["LSTM + Hebbian (default rule)"]
    assert alone["test"] == f"{math.exp(losses.mean()):.2f}"
    assert (alone["paper, validation"], alone["paper, test"]) == ("34.1", "34.3")
    cached = rows["LSTM + Hebbian + Cache (default rule)"]
    (kept,) = [trial for trial in result["metrics"]["trials"] if trial["name"] == "final-default-seed0"]
    assert cached["test"] == f"{kept['more']['Cache']['test']:.2f}" != alone["test"]
    assert (cached["paper, validation"], cached["paper, test"]) == ("29.7", "29.9")
    literal = open_run(run.path / "trials" / "final-literal-seed0").settings
    assert (literal["rate"], literal["rule_scale"], literal["write"]) == ("paper", "1", "literal")
    assert (literal["start"], literal["fade"]) == (0, False)


@pytest.mark.parametrize(
    ("given", "literal", "other"),
    [
        ({}, (0, False), ("default", "recent", "across", "auto", True)),
        ({"start": 7, "fade": False}, (0, False), ("default", "recent", "across", 7, False)),
        ({"rule": "corrected"}, (0, False), ("corrected", "inclusive", "centred", 0, False)),
        # As in version 0.1, where both rules had these settings.
        ({"rule": "corrected", "start": 7, "fade": True}, (7, True), ("corrected", "inclusive", "centred", 7, True)),
    ],
)
def test_the_literal_rule_stays_the_papers(given: Any, literal: Any, other: Any) -> None:
    recipe = next(each for each in RECIPES if each.name == "frequency-table")
    first, second = recipe.rules(recipe.settings(**given))
    assert (first.settings["rate"], first.settings["rule_scale"], first.settings["write"]) == ("paper", "1", "literal")
    assert (first.settings["start"], first.settings["fade"]) == literal
    assert (second.short, *(second.settings[name] for name in ("rate", "write", "start", "fade"))) == other
    assert second.settings["rule_scale"] == "match"


def test_curves_of_the_default_rule_have_the_same_limits_and_begin_with_the_default() -> None:
    recipe = WikitextCurves()
    for size in ("paper", "small"):
        grids = [recipe.rule_grid(write, size) for write in ("literal", "centred", "across")]
        assert len({tuple(grid["limit"]) for grid in grids[:2]}) == 1
        assert grids[-1]["limit"] == ("auto", *grids[0]["limit"])
        assert grids[-1]["gamma"][0] == 0.2
        settings = recipe.settings(size=size)
        tuned = [Row("plain", "plain softmax", TrainSettings(head="plain"))]
        tuned += [Row(rule.short, rule.title, TrainSettings(**rule.settings)) for rule in (LITERAL, DEFAULT)]
        limits = [row.settings.limit for row in recipe.rows(tuned, settings)[1:]]
        own = sorted(grids[0]["limit"])
        assert limits == [*own, "auto", *own]


@pytest.mark.parametrize("words", [pytest.param(0, marks=pytest.mark.slow), 3])
def test_two_steps_of_mbpa_are_swept_where_they_are_wanted(reproduce: Reproduce, words: int) -> None:
    run, result = reproduce("wikitext-table", "--trials", "0", "--seeds", "1", "--two-step-words", str(words))
    rows = table(result, "Perplexity on reuters; the paper's on WikiText-103")
    assert rows["LSTM + Hebbian + Cache + MbPA (default rule)"]["paper, test"] == "29.2"
    kept = sorted((run.path / "trials" / "final-plain-seed0" / "memories").glob("valid-two-steps-*"))
    assert bool(kept) == bool(words)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "paper"),
    [
        ("wikitext-curves", [36.4, 34.3]),  # with the T that the head finds by itself beside given ones
        ("gutenberg-curves", [47.9, 45.5]),
        ("gigaword-curves", [53.5, 43.7]),
    ],
)
def test_curves(reproduce: Reproduce, name: str, paper: list[float]) -> None:
    auto = "auto," if name == "wikitext-curves" else ""
    run, result = reproduce(name, "--trials", "1", "--seeds", "1", "--limit", f"{auto}17,3")
    rows = table(result, "The ends of the curves on reuters, after 120 training words")
    endings = [""] if name == "gigaword-curves" else [*([", T = auto"] if auto else []), ", T = 3", ", T = 17"]
    rules = [f"{rule} rule{ending}" for rule in ("literal", "default") for ending in endings]
    assert list(rows)[:-2] == ["plain softmax", *rules]
    assert [row["test"] for row in rows.values()][-2:] == paper
    assert (run.path / "perplexity.png").stat().st_size > 1000
    limits = {trial["title"]: trial["settings"]["limit"] for trial in result["metrics"]["trials"]}
    assert all(title.endswith(f"T = {limit}") for title, limit in limits.items() if "T =" in title)


@pytest.mark.slow
def test_objectives(reproduce: Reproduce) -> None:
    _, result = reproduce("objectives", "--trials", "0", "--seeds", "1", "--steps", "3")
    rows = table(result, "Perplexity on reuters")
    names = [f"{rule} rule, {name}" for rule in ("literal", "default") for name in ("L2", "IP", "SVM", "Smax")]
    assert list(rows) == ["plain softmax", *names]
    used = {trial["title"]: trial["settings"]["objective"] for trial in result["metrics"]["trials"]}
    assert all(used[title] == title.rpartition(" ")[2].lower() for title in names)
    assert len({row["test"] for row in rows.values()}) > 4


@pytest.mark.skipif(not PAPER.exists(), reason=f"no paper at {PAPER}")
def test_the_papers_numbers_are_those_of_its_source() -> None:
    source = PAPER.read_text(encoding="utf-8").replace("\\shortmodel", "Hebbian")
    first = source[source.index("perplexities on WikiText-103.}") : source.index("\\label{tab:wiki}")]
    found = {}
    for line in first.splitlines():
        cells = [re.sub(r"\\cite\s*\{.*?\}|\\textbf\{|\}|\\\\", "", cell).strip() for cell in line.split("&")]
        if len(cells) == 3 and cells[0]:
            found[re.sub(r"\s+", " ", cells[0])] = tuple(None if cell == "-" else float(cell) for cell in cells[1:])
    ours = {re.sub(r" \(.*", "", name): value for name, value in list(WIKITEXT_TABLE.items())[:3]}
    ours |= {"LSTM (ours)" if name == "LSTM" else name: WIKITEXT_TABLE[name] for name in list(WIKITEXT_TABLE)[3:]}
    assert found == ours

    second = source[source.index("versus training word frequency") : source.index("\\label{tab:lm_breakdown}")]
    for rows in FREQUENCY_TABLE.values():
        name = next(iter(rows)).split(", ")[1]
        part = second[second.index(f"\\textbf{{{name}}}") :]
        lines = [line for line in part.splitlines() if line.strip().startswith("\\scriptsize")][:2]
        for line, row in zip(lines, rows.values(), strict=True):
            assert [cell.replace("\\\\", "").strip() for cell in line.split("&")][1:] == list(row.values())


def test_a_bucket_that_the_paper_and_older_runs_lack_has_empty_cells(reproduce: Reproduce) -> None:
    assert set(COLUMNS) == {*BUCKETS, ALL}
    _, result = reproduce("frequency-table", "--trials", "0", "--seeds", "2")
    outcomes = [Outcome(**trial) for trial in result["metrics"]["trials"]]
    known, more = frequency_table(outcomes), frequency_table(outcomes, ["unseen", *BUCKETS])
    assert more.columns == ["", "unseen", *known.columns[1:]]
    assert more.rows == [[row[0], None, *row[1:]] for row in known.rows]


@pytest.mark.parametrize("name", ["wikitext-2", "reuters", "gutenberg-529"])
def test_the_runs_in_results_can_be_shown(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Older versions made these runs. A run without its result.json is shown from its trials."""
    stored = ROOT / "results" / "language" / name
    assert call("report", stored, "--markdown") == 0
    shown = capsys.readouterr().out
    shutil.copytree(stored / "trials", tmp_path / "trials", ignore=shutil.ignore_patterns("*.npz"))
    shutil.copy(stored / "config.json", tmp_path)
    assert call("report", tmp_path, "--markdown") == 0
    tables = re.findall(r"\*\*Not finished: (.*)\*\*", capsys.readouterr().out)
    assert len(tables) > 3
    assert all(f"**{title}**" in shown for title in tables)


def test_trials_that_an_older_version_stored_are_recognised(tmp_path: Path) -> None:
    """Their settings say yes and no where there are booleans now. Training would need a corpus that is not there."""
    stored = open_run(ROOT / "results" / "language" / "reuters")
    run = unfinished(stored, tmp_path)
    assert {trial.settings["tied"] for trial in map(open_run, run.path.glob("trials/*"))} == {"yes"}
    assert call("reproduce", "reuters", "--resume", run.path, "--quiet") == 0
    assert result_of(run)["tables"] == result_of(stored)["tables"]
