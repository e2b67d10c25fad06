"""The paper's experiments on language models in miniature, and the paper's numbers beside ours."""

import math
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from hebbian_softmax.lab.base.runs import open_run
from hebbian_softmax.lab.data.buckets import BUCKETS, bucket_of
from hebbian_softmax.lab.data.corpus import open_corpus, write_corpus
from hebbian_softmax.lab.language.experiments.paper_numbers import (
    ALL,
    COLUMNS,
    FREQUENCY_TABLE,
    WIKITEXT_TABLE,
    paper_corpus,
)
from hebbian_softmax.lab.language.experiments.tables import frequency_table
from hebbian_softmax.lab.language.experiments.trials import Outcome
from hebbian_softmax.lab.language.report.perplexities import spread_cell
from tests import ROOT, SHARED
from tests.lab.language.commands import call, only
from tests.lab.language.experiments.conftest import SMALL, Reproduce, result_of, table, unfinished, words_of
from tests.lab.language.toy import corpus

PAPER = SHARED / "paper.tex"


def test_reuters_has_the_words_of_june_beside_the_total(reproduce: Reproduce) -> None:
    run, result = reproduce("reuters", "--trials", "1")
    rows = table(result, "Perplexity on all words and on words first seen in June 1987; ")
    assert list(rows) == ["plain softmax", "literal rule", "corrected rule"]
    for title, short in (("plain softmax", "plain"), ("corrected rule", "corrected")):
        for split, column in (("valid", "validation"), ("test", "test")):
            fresh = []
            for seed in range(2):
                losses, ids = words_of(run, f"final-{short}-seed{seed}", split)
                june = [loss for loss, word in zip(losses, ids, strict=True) if word % 3 == 0]
                fresh.append(math.exp(sum(june) / len(june)))
            assert rows[title][f"{column}, new in June"] == spread_cell(fresh)
    trials = {trial["name"]: trial for trial in result["metrics"]["trials"]}
    _, ids = words_of(run, "final-plain-seed0", "test")
    assert trials["final-plain-seed0"]["sets"]["test"]["last month"]["words"] == (ids % 3 == 0).sum()
    assert trials["final-plain-seed0"]["sets"]["test"]["last 90 days"]["words"] == (ids % 3 != 1).sum()
    assert table(result, "Perplexity on all words and on words first seen since 1987-03-20")
    assert "the days of the stock market crash" in result["summary"]
    assert "trained on 1987-02-01 to 1987-06-17" in result["summary"]
    assert "tested on 1987-10-19 to 1987-10-20" in result["summary"]


def test_the_frequency_table_is_that_of_the_saved_losses(reproduce: Reproduce, dated: Path) -> None:
    run, result = reproduce("frequency-table", "--trials", "0", "--seeds", "2")
    rows = table(result, "Test perplexity on reuters by training occurrences")
    of_word = bucket_of(open_corpus(dated).counts).tolist()
    for place, bucket in enumerate(BUCKETS):
        values = []
        for seed in range(2):
            losses, ids = words_of(run, f"final-literal-seed{seed}", "test")
            inside = [loss for loss, word in zip(losses, ids, strict=True) if of_word[word] == place]
            values.append(math.exp(sum(inside) / len(inside)) if inside else None)
        assert rows["literal rule"][bucket] == spread_cell(values)
    assert rows["paper, GigaWord, softmax"] == {
        **dict(zip(BUCKETS, ("39.4", "6.5e3", "3.7e4", "-"), strict=True)), "all": "53.5",
    }  # fmt: skip
    assert rows["paper, GigaWord, Hebbian softmax"]["all"] == "43.7"


def test_wikitext_table_has_memories_below_their_models(reproduce: Reproduce) -> None:
    run, result = reproduce("wikitext-table", "--trials", "0", "--seeds", "1", "--memories", "cache")
    rows = table(result, "Perplexity on reuters; the paper's on WikiText-103")
    assert [name for name in rows if name.startswith("LSTM") and "Graves" not in name] == [
        *("LSTM", "LSTM + Cache"),
        *("LSTM + Hebbian (literal rule)", "LSTM + Hebbian + Cache (literal rule)"),
        *("LSTM + Hebbian (corrected rule)", "LSTM + Hebbian + Cache (corrected rule)"),
    ]
    losses, _ = words_of(run, "final-corrected-seed0", "test")
    alone = rows["LSTM + Hebbian (corrected rule)"]
    assert alone["test"] == f"{math.exp(losses.mean()):.2f}"
    assert (alone["paper, validation"], alone["paper, test"]) == ("34.1", "34.3")
    cached = rows["LSTM + Hebbian + Cache (corrected rule)"]
    (kept,) = [trial for trial in result["metrics"]["trials"] if trial["name"] == "final-corrected-seed0"]
    assert cached["test"] == f"{kept['more']['Cache']['test']:.2f}" != alone["test"]
    assert (cached["paper, validation"], cached["paper, test"]) == ("29.7", "29.9")
    literal = open_run(run.path / "trials" / "final-literal-seed0").settings
    assert (literal["rate"], literal["rule_scale"], literal["center"]) == ("paper", "1", False)


@pytest.mark.parametrize("words", [0, 3])
def test_two_steps_of_mbpa_are_swept_where_they_are_wanted(reproduce: Reproduce, words: int) -> None:
    run, result = reproduce("wikitext-table", "--trials", "0", "--seeds", "1", "--two-step-words", str(words))
    rows = table(result, "Perplexity on reuters; the paper's on WikiText-103")
    assert rows["LSTM + Hebbian + Cache + MbPA (corrected rule)"]["paper, test"] == "29.2"
    kept = sorted((run.path / "trials" / "final-plain-seed0" / "memories").glob("valid-two-steps-*"))
    assert bool(kept) == bool(words)


@pytest.mark.parametrize("name", ["wikitext-curves", "gutenberg-curves", "gigaword-curves"])
def test_curves(reproduce: Reproduce, name: str) -> None:
    run, result = reproduce(name, "--trials", "1", "--seeds", "1", "--limit", "7,3")
    rows = table(result, "The ends of the curves on reuters, after 120 training words")
    ours = [title for title in rows if not title.startswith("paper")]
    rules = ["literal rule", "corrected rule"]
    if name != "gigaword-curves":
        rules = [f"{rule}, T = {limit}" for rule in rules for limit in (3, 7)]
    assert ours == ["plain softmax", *rules]
    paper = [row["test"] for title, row in rows.items() if title.startswith("paper")]
    expected = {"wikitext": [36.4, 34.3], "gutenberg": [47.9, 45.5], "gigaword": [53.5, 43.7]}
    assert paper == expected[name.partition("-")[0]]
    assert (run.path / "perplexity.png").stat().st_size > 1000
    limits = {trial["title"]: trial["settings"]["limit"] for trial in result["metrics"]["trials"]}
    assert all(title.endswith(f"T = {limit}") for title, limit in limits.items() if "T =" in title)


def test_objectives(reproduce: Reproduce) -> None:
    _, result = reproduce("objectives", "--trials", "0", "--seeds", "1", "--steps", "3")
    rows = table(result, "Perplexity on reuters")
    names = [f"{rule} rule, {name}" for rule in ("literal", "corrected") for name in ("L2", "IP", "SVM", "Smax")]
    assert list(rows) == ["plain softmax", *names]
    used = {trial["title"]: trial["settings"]["objective"] for trial in result["metrics"]["trials"]}
    assert {title: name for title, name in used.items() if "rule" in title} == {
        title: title.rpartition(" ")[2].lower() for title in names
    }
    assert len({row["test"] for row in rows.values()}) > 4


def test_a_corpus_without_dates_is_refused_before_anything_is_trained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = corpus()
    splits = {name: ids.numpy() for name, ids in made.splits.items()}
    write_corpus(tmp_path / "toy", "toy", splits, made.words, made.counts.tolist(), {}, [])
    arguments = [*SMALL, "--corpus", tmp_path / "toy", "--quiet", "--runs", tmp_path / "runs"]
    assert call("reproduce", "reuters", *arguments) == 1
    assert "has no dates: give --corpus reuters" in capsys.readouterr().err
    assert not list((tmp_path / "runs").iterdir())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["wikitext-table", "--corpus", "no-such"], "--corpus 'no-such' is no corpus"),
        (["gigaword-curves", "--data-root", "/dev/null"], "or give --corpus reuters --size small"),
        (["objectives", "--objective", "l2"], "unrecognized arguments"),
        (["wikitext-table", "--no-center"], "unrecognized arguments"),
        (["objectives", "--memories", "all"], "unrecognized arguments"),
        (["reuters", "--sweep-thetas", "0.1,0"], "--sweep-thetas: must be above 0, not '0'"),
        (["reuters", "--sweep-thetas", "0.01"], "--memories none: omit it, or give --memories cache or all"),
        (["frequency-table", "--memories", "cache", "--sweep-rates", "1"], "or give --memories all"),
        (["wikitext-table", "--sweep-cache-shares", "0.95"], "0.95 and 0.1, sum to 1.05"),
    ],
)
def test_bad_arguments(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setenv("HEBBIAN_CACHE", str(tmp_path / "cache"))
    assert call("reproduce", *arguments, "--quiet", "--runs", tmp_path / "runs") in (1, 2)
    error = capsys.readouterr().err
    assert message in error.splitlines()[-1]
    assert "Traceback" not in error
    assert not list((tmp_path / "runs").glob("*"))


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
        name = rows[0].title.split(", ")[1]
        part = second[second.index(f"\\textbf{{{name}}}") :]
        lines = [line for line in part.splitlines() if line.strip().startswith("\\scriptsize")][:2]
        for line, row in zip(lines, rows, strict=True):
            cells = tuple(cell.replace("\\\\", "").strip() for cell in line.split("&"))[1:]
            assert cells == tuple(row.cells.values())
    assert [row.total for row in rows] == [53.5, 43.7]


def test_a_bucket_that_the_paper_and_older_runs_lack_has_empty_cells(reproduce: Reproduce) -> None:
    assert set(COLUMNS) == {*BUCKETS, ALL}
    _, result = reproduce("frequency-table", "--trials", "0", "--seeds", "2")
    outcomes = [Outcome(**trial) for trial in result["metrics"]["trials"]]
    known, more = frequency_table(outcomes), frequency_table(outcomes, ["unseen", *BUCKETS])
    assert more.columns == ["", "unseen", *known.columns[1:]]
    assert more.rows == [[row[0], None, *row[1:]] for row in known.rows]


def test_other_books_have_the_papers_numbers_for_books_below_them(tmp_path: Path) -> None:
    made = corpus()
    splits = {name: ids.numpy() for name, ids in made.splits.items()}
    folder = tmp_path / "novels"
    write_corpus(folder, "novels", splits, made.words, made.counts.tolist(), {"corpus": "gutenberg"}, [])
    options = [*SMALL, "--trials", "0", "--seeds", "1", "--corpus", folder, "--quiet", "--runs", tmp_path / "runs"]
    assert call("reproduce", "frequency-table", *options) == 0
    rows = table(result_of(only(tmp_path / "runs")), "Test perplexity on novels by training occurrences")
    assert rows["paper, Gutenberg, softmax"]["all"] == "47.9"


def test_stand_ins_have_the_numbers_of_what_they_stand_for() -> None:
    assert paper_corpus("wikitext-2") == paper_corpus("wikitext-103") == "wikitext-103"
    assert paper_corpus("reuters") == "gigaword"
    assert paper_corpus("toy") not in FREQUENCY_TABLE


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
