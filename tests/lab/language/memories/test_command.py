"""`hebbian evaluate --cache --mbpa` and `--sweep`, as a user meets them."""

import json
import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hebbian_softmax.lab.base.errors import Terminated
from hebbian_softmax.lab.base.runs import Run, open_run
from hebbian_softmax.lab.language.memories.cache import CacheSettings
from hebbian_softmax.lab.language.memories.given import Reading, with_cache_size
from hebbian_softmax.lab.language.memories.mbpa import MbpaSettings
from hebbian_softmax.lab.language.memories.memory import ALONE, Memories
from hebbian_softmax.lab.language.names import ONLY
from hebbian_softmax.lab.language.trained import load_trained
from tests.closeness import assert_as_close
from tests.lab.base.test_progress import Terminal
from tests.lab.language.commands import FEW, call, only
from tests.lab.language.memories.oracle import losses_of, parts_of, perplexity_of, tolerance
from tests.lab.language.model.networks import out_of_memory, watch_lstm
from tests.lab.language.toy import device, exactly, folder

pytestmark = pytest.mark.slow  # it evaluates trained models with each memory

__all__ = ["folder"]

SMALL = ["--quiet", "--cache", "--mbpa", "--cache-size", "20", "--cache-theta", "0.4"]
SMALL += ["--mbpa-neighbours", "5", "--mbpa-share", "0.1", "--words", "0:9"]
CACHE = CacheSettings(20, 0.4)
BOTH = Memories((CACHE, MbpaSettings(20, 5, share=0.1)))
SWEEP = "--quiet --sweep --sweep-thetas 0.3,1 --sweep-sizes 10,30 --sweep-cache-shares 0.1,0.2 --sweep-neighbours 4,20"
SWEEP = f"{SWEEP} --sweep-rates 0.1,1 --sweep-l2 0.5 --sweep-mbpa-shares 0.05,0.1 --two-step-words 6".split()


@pytest.fixture(scope="module")
def trained(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    runs = tmp_path_factory.mktemp("runs")
    assert call("train", folder, *FEW, "--final", "none", "--quiet", "--runs", runs) == 0
    return only(runs)


@pytest.fixture
def run(trained: Run, tmp_path: Path) -> Run:
    """A copy of the run for every test."""
    return open_run(Path(shutil.copytree(trained.path, tmp_path / "run")))


def error_of(capsys: pytest.CaptureFixture[str]) -> str:
    error = capsys.readouterr().err
    assert "Traceback" not in error
    return error.splitlines()[-1]


def stopped_at_the_second_call() -> Callable[..., None]:
    calls: list[Any] = []

    def stop(*arguments: Any) -> None:
        calls.append(arguments)
        if len(calls) == 2:
            raise KeyboardInterrupt

    return stop


def test_numbers_and_words_are_those_of_the_literal_loop(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("evaluate", run.path, *SMALL, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["step"] == 12
    assert json.loads((run.path / "evaluation.json").read_bytes())["memories"] == found["memories"]
    there = load_trained(run, device=device(), quiet=True)
    rows = found["memories"]["model"]
    assert [row["name"] for row in rows] == ["alone", "+ cache", "+ cache + MbPA"]
    assert rows[2]["mbpa"] == {"size": 20, "neighbours": 5, "steps": 1, "rate": 0.3, "l2": 0.5, "share": 0.1}
    for split in ("valid", "test"):
        ids, model = there.corpus.splits[split], there.models[ONLY]
        rounded, parts = (parts_of(each, ids, BOTH) for each in (model, exactly(model)))
        allowed = tolerance(model, ids, BOTH)
        literal = [losses_of(parts, each) for each in (ALONE, Memories((CACHE,)), BOTH)]
        with np.load(run.path / f"{split}-memory-words.npz") as words:
            assert words["ids"].tolist() == ids[1:].tolist()
            assert words["rows"].tolist() == ["alone", "+ cache", "+ cache + MbPA"]
            np.testing.assert_allclose(words["nll"], literal, rtol=0, atol=allowed)
            for part in ("model", "cache", "mbpa"):
                assert_as_close(torch.from_numpy(-words[part]), rounded[part], parts[part], part)
            assert str(words["corpus"]) == there.corpus.fingerprint
        for row, losses in zip(rows, literal, strict=True):
            assert row["scores"][split]["perplexity"] == pytest.approx(perplexity_of(losses), rel=allowed)


def test_both_models_of_a_comparison_have_tables_and_a_place_on_the_page(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("compare", folder, *FEW, "--final", "none", "--quiet", "--runs", tmp_path) == 0
    run = only(tmp_path)
    for _ in range(2):  # the second replaces the first
        assert call("evaluate", run.path, *SMALL) == 0
        output = capsys.readouterr().out
    assert "With memories: plain softmax, perplexity on the validation text of toy" in output
    assert "cache (θ, n, λ): 0.4, 20, 0.1; MbPA (K, steps, α, β, λ): 5, 1, 0.3, –, 0.1." in output
    result = run.result()
    titles = [table["title"] for table in result["tables"]]
    assert len(titles) == len(set(titles)) == 5  # two models, two texts, and the settings
    figures = [figure["file"] for figure in result["figures"]]
    assert figures == ["perplexity.png", "plain-memory-view.png", "hebbian-memory-view.png"]
    page = (run.path / "page.html").read_text()
    assert page.count("Which part of each word&#x27;s probability came from where") == 4  # two figures, twice each
    assert page.count("With memories: Hebbian softmax, perplexity on the test text of toy") == 1
    assert "missing" not in page


def test_a_stopped_comparison_names_the_model_that_it_did_not_read(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("compare", folder, *FEW, "--final", "none", "--quiet", "--runs", tmp_path) == 0
    watch_lstm(monkeypatch, stopped_at_the_second_call())
    assert call("evaluate", only(tmp_path).path, *SMALL) == 130
    output = capsys.readouterr().out
    assert "The reading was stopped before Hebbian softmax, so nothing is known of it." in output
    assert "stopped before plain softmax" not in output


@pytest.mark.parametrize(
    ("options", "title"),
    [
        ("--cache --cache-size 20", "cache"),
        ("--mbpa --mbpa-size 30 --mbpa-neighbours 5", "MbPA"),
        ("--sweep --cache --sweep-sizes 10,20", "cache"),
    ],
)
def test_one_memory_alone_and_validation_alone(
    options: str, title: str, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "--split valid --json --quiet --words 0:5"
    assert call("evaluate", run.path, *f"{options} {words}".split()) == 0
    rows = json.loads(capsys.readouterr().out)["memories"]["model"]
    assert [(row["name"], list(row["scores"])) for row in rows] == [("alone", ["valid"]), (f"+ {title}", ["valid"])]
    with np.load(run.path / "valid-memory-words.npz") as found:
        assert set(found.files) == {"ids", "rows", "nll", "corpus", "model", title.lower()}
    assert not (run.path / "test-memory-words.npz").exists()


def test_only_so_many_words(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("evaluate", run.path, *SMALL, "--max-words", "30", "--json") == 0
    rows = json.loads(capsys.readouterr().out)["memories"]["model"]
    assert {score["words"] for row in rows for score in row["scores"].values()} == {30}
    few = rows[2]["scores"]["test"]["perplexity"]
    with np.load(run.path / "test-memory-words.npz") as words:
        assert len(words["ids"]) == len(words["nll"][2]) == 30
        assert few == pytest.approx(math.exp(words["nll"][2].astype(float).mean()), rel=1e-5)
    assert call("evaluate", run.path, *SMALL) == 0
    with np.load(run.path / "test-memory-words.npz") as words:
        assert few == pytest.approx(math.exp(words["nll"][2][:30].astype(float).mean()), rel=1e-5)


def test_the_size_of_the_cache_is_chosen_on_the_validation_text(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    there = load_trained(run, device=device(), quiet=True)
    model, ids = there.models[ONLY], there.corpus.splits["valid"]
    reading = Reading(there.corpus, ["valid"], None, True, True)
    sizes, found = (3, 12, 40), {}
    for size in sizes:
        memories = Memories((CacheSettings(size, 0.4),))
        found[size] = perplexity_of(losses_of(parts_of(exactly(model), ids, memories), memories))
    chosen, note = with_cache_size(model, BOTH, reading, "it", sizes)
    best = min(found, key=found.__getitem__)
    assert chosen.used == (CacheSettings(best, 0.4), BOTH.used[1])
    assert f"n = {best} was chosen" in note
    for size, value in found.items():
        assert f"{value:.3g}" in note
        assert f" with {size}" in note
    options = ["--quiet", "--cache", "--cache-theta", "0.4", "--mbpa", "--mbpa-neighbours", "5", "--words", "0:9"]
    assert call("evaluate", run.path, *options) == 0
    assert "The cache's n = 500 was chosen" in capsys.readouterr().out  # the text is shorter, so all are equally good
    last = json.loads((run.path / "evaluation.json").read_bytes())["memories"]["model"][-1]
    assert (last["cache"]["size"], last["mbpa"]["size"]) == (500, 10_000)


def test_the_cost_is_said_before_anything_is_read(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("evaluate", run.path, *SMALL[1:], "--max-words", "30") == 0
    before, first, *_ = capsys.readouterr().err.splitlines()
    assert before == "Measuring how long the reading will take …"
    page = (run.path / "page.html").read_text()
    assert "perplexity on the first 30 words of the validation text" in page
    assert "settings, and how they were chosen" in page
    assert re.fullmatch(
        r"Reading 60 words with memories will take up to about \d+:\d\d; --max-words N reads fewer, .* read by then",
        first,
    )


@pytest.mark.parametrize("signal", [KeyboardInterrupt, Terminated])
def test_what_was_read_is_kept_when_somebody_stops_it(
    run: Run, signal: type[BaseException], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[Any] = []

    def stop(*arguments: Any) -> None:
        calls.append(arguments)
        if len(calls) == 2:  # the first reads the validation text
            raise signal

    watch_lstm(monkeypatch, stop)
    assert call("evaluate", run.path, *SMALL) == 128 + (2 if signal is KeyboardInterrupt else 15)
    assert "Stopped after 0 of " in capsys.readouterr().out
    report = json.loads((run.path / "evaluation.json").read_bytes())
    assert "words of the test text" in report["notes"][1]
    assert [list(row["scores"]) for row in report["memories"]["model"]] == 3 * [["valid"]]


@pytest.mark.parametrize("finished", [SMALL, ["--quiet"]], ids=["with memories", "alone"])
def test_a_reading_that_is_stopped_replaces_no_finished_one(
    finished: list[str], run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("evaluate", run.path, *finished) == 0
    before = {path.name: path.read_bytes() for path in run.path.iterdir() if path.is_file()}
    with monkeypatch.context() as patch:
        watch_lstm(patch, stopped_at_the_second_call())
        assert call("evaluate", run.path, *SMALL) == 130
    assert "has an earlier evaluation that was finished" in capsys.readouterr().out
    assert {path.name: path.read_bytes() for path in run.path.iterdir() if path.is_file()} == before
    assert call("evaluate", run.path, *SMALL, "--max-words", "30") == 0
    assert (run.path / "evaluation.json").read_bytes() != before["evaluation.json"]


def test_nothing_is_kept_where_nothing_was_read(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    before = sorted(path.name for path in run.path.iterdir())

    def stop(*arguments: Any) -> None:
        raise KeyboardInterrupt

    watch_lstm(monkeypatch, stop)
    assert call("evaluate", run.path, *SMALL) == 130
    assert sorted(path.name for path in run.path.iterdir()) == before


def test_an_unfinished_run_has_no_page_but_all_else(
    run: Run, terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    (run.path / "result.json").unlink()
    (run.path / "page.html").unlink()
    monkeypatch.setattr("sys.stdout", terminal)
    assert call("evaluate", run.path, *SMALL) == 0
    assert "───" in terminal.getvalue()  # tables are drawn
    assert "Page" not in terminal.getvalue()
    assert (run.path / "memory-view.png").exists()
    assert not (run.path / "result.json").exists()


def test_a_sweep_chooses_on_validation_and_keeps_its_grid(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("evaluate", run.path, *SWEEP) == 0
    output = capsys.readouterr().out
    assert "With memories: the best caches on the validation text" in output
    assert "The mean of ‖h‖² is" in output
    content = json.loads((run.path / "memory-sweep.json").read_bytes())
    report = json.loads((run.path / "evaluation.json").read_bytes())
    there = load_trained(run, device=device(), quiet=True)
    grid, rows = content["models"]["model"], report["memories"]["model"]
    assert len(grid["cache"]) == 8
    assert len(grid["mbpa"]) == 16
    assert grid["chosen"]["cache"] == min(grid["cache"], key=lambda point: point["perplexity"])
    assert len(grid["two_steps"]["points"]) == 2 * 2 * 4
    point = grid["mbpa"][-1]  # any point will do
    cache = CacheSettings(point["cache_size"], point["cache_theta"], point["cache_share"])
    mbpa = MbpaSettings(**{key.removeprefix("mbpa_"): value for key, value in point.items() if "mbpa" in key})
    model, ids, memories = there.models[ONLY], there.corpus.splits["valid"], Memories((cache, mbpa))
    expected = perplexity_of(losses_of(parts_of(exactly(model), ids, memories), memories))
    assert point["perplexity"] == pytest.approx(expected, rel=tolerance(model, ids, memories))
    assert rows[1]["cache"]["theta"] == grid["chosen"]["cache"]["cache_theta"]
    assert rows[2]["mbpa"]["share"] == grid["chosen"]["last"]["mbpa_share"]
    assert set(rows[2]["scores"]) == {"valid", "test"}
    assert (run.path / "memories" / "valid-cache-grid.npz").exists()
    before = (run.path / "memory-sweep.json").read_bytes()
    assert call("evaluate", run.path, *SWEEP, "--json") == 0
    assert json.loads(capsys.readouterr().out)["memories"] == report["memories"]
    assert (run.path / "memory-sweep.json").read_bytes() == before


def test_the_words_that_are_asked_for(run: Run) -> None:
    assert call("evaluate", run.path, *SMALL) == 0
    content = json.loads((run.path / "memory-view.json").read_bytes())
    with np.load(run.path / "test-memory-words.npz") as words:
        for at, word in enumerate(content["words"]):
            assert word["position"] == at
            assert word["mixture"] == pytest.approx(math.exp(-words["nll"][2][at]), rel=1e-5)
            assert word["mixture"] == pytest.approx(word["model"] + word["cache"] + word["mbpa"])
    assert (content["split"], content["first"], content["last"]) == ("test", 0, 9)
    assert content["words"][0]["cache"] == 0  # the cache is empty, so its share is the model's
    assert content["words"][0]["model"] == pytest.approx(0.9 * content["words"][0]["alone"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--cache --mbpa --cache-share 0.8 --mbpa-share 0.3", "0.8 and 0.3, sum to 1.1"),
        ("--mbpa --mbpa-size 100 --mbpa-neighbours 101", "cannot find 101 neighbours in a memory of 100 words"),
        ("--cache --cache-size 50 --mbpa --mbpa-neighbours 60", "cannot find 60 neighbours in a memory of 50 words"),
        ("--cache-theta 0.1", "--cache-theta goes with --cache: give --cache, too"),
        ("--cache --mbpa-steps 2", "--mbpa-steps goes with --mbpa"),
        ("--cache --two-step-words 3", "--two-step-words goes with --sweep"),
        ("--sweep --cache --cache-theta 0.1", "--cache-theta is chosen by the sweep"),
        ("--sweep --sweep-cache-shares 0.5,0.9 --sweep-mbpa-shares 0.2", "sum to 1.1"),
        ("--sweep --split test", "--sweep chooses on the validation text"),
        ("--cache --streams 4", "memories read the text in one stream"),
        ("--words 1:5", "--words goes with memories"),
        ("--workspace 5", "--workspace goes with memories"),
        ("--max-words 5", "--max-words goes with memories"),
        ("--sweep --max-words 5", "a sweep measures whole texts"),
        ("--cache --max-words 0", "must be"),
        ("--cache --words 1:5000", "--words 1:5000 is not inside the text: it has "),
        ("--cache --words 5:1", "must be two numbers FIRST:LAST"),
        ("--cache --words five", "must be two numbers FIRST:LAST"),
        ("--cache --cache-theta 0", "must be above 0"),
        ("--mbpa --mbpa-steps 3", "from 1 to 2"),
        ("--sweep --sweep-thetas 0.1,x", "must be a number"),
        ("--sweep --sweep-sizes 10,10", "must be different values"),
    ],
)
def test_bad_options_are_one_clear_line(
    options: str, message: str, trained: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is read before the error."""
    read: list[Any] = []
    watch_lstm(monkeypatch, lambda *arguments: read.append(arguments))
    before = sorted(path.name for path in trained.path.iterdir())
    assert call("evaluate", trained.path, *options.split(), "--quiet") in (1, 2)
    assert message in error_of(capsys)
    assert sorted(path.name for path in trained.path.iterdir()) == before
    assert not read


def test_grids_are_looked_at_before_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shares = ["--sweep-cache-shares", "0.9", "--sweep-mbpa-shares", "0.2"]
    assert call("evaluate", tmp_path / "nowhere", "--sweep", *shares) == 1
    assert "sum to 1.1" in error_of(capsys)


def test_a_device_too_small_leaves_the_run_as_it_was(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(path.name for path in run.path.iterdir())
    watch_lstm(monkeypatch, out_of_memory)
    assert call("evaluate", run.path, *SMALL) == 1
    assert "too small for the model with its memories: give a smaller --workspace" in error_of(capsys)
    assert sorted(path.name for path in run.path.iterdir()) == before
