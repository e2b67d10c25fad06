"""`hebbian report` shows one run with two heads, several runs, unfinished runs, and runs of other experiments."""

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest

from hebbian_softmax.lab.base.errors import LabError
from hebbian_softmax.lab.base.runs import Run, create_run, open_run
from hebbian_softmax.lab.language.report.words import Beside, compare_words, models_of, pairs_of
from tests.lab.language.commands import FEW, call, only
from tests.lab.language.toy import prepared


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    folder = tmp_path_factory.mktemp("corpora") / "toy"
    prepared(folder)
    found = {}
    for name, arguments in {"plain": ["train", "--head", "plain"], "both": ["compare"]}.items():
        verb, *options = arguments
        place = tmp_path_factory.mktemp(name)
        assert call(verb, folder, *FEW, *options, "--quiet", "--runs", place) == 0
        # Folders are named by the second of their start, so two names could be equal.
        found[name] = open_run(only(place).path.rename(place / f"{name}-run"))
    return found


def losses(run: Run, file: str) -> tuple[np.ndarray, np.ndarray]:
    with np.load(run.path / file) as words:
        return words["nll"].astype("f8"), words["ids"]


def test_two_heads_of_one_run(runs: dict[str, Run], capsys: pytest.CaptureFixture[str]) -> None:
    run = runs["both"]
    assert call("report", run.path) == 0
    output = capsys.readouterr().out
    plain, ids = losses(run, "plain-test-words.npz")
    hebbian, _ = losses(run, "hebbian-test-words.npz")
    change = {word: (hebbian - plain)[ids == word].sum() for word in set(ids.tolist())}
    best = min(change, key=lambda word: change[word])
    gained = output[output.index("Words that gained most on the test text, from plain softmax to Hebbian softmax") :]
    assert gained.splitlines()[2].split()[0] == f"w{best}"
    assert f"{change[best]:+.2f}" in gained.splitlines()[2]
    page = (run.path / "page.html").read_text()
    assert "Words that lost most" in page
    assert page.count("<img") == 1  # its own figure, and no second one with the same content
    assert not (run.path / "curves.png").exists()


def test_runs_side_by_side(runs: dict[str, Run], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "side.html"
    assert call("report", runs["plain"].path, runs["both"].path, "--output", page) == 0
    output = capsys.readouterr().out
    table = output[output.index("Perplexity on the test text by training occurrences of the word") :].splitlines()
    total, _ = losses(runs["plain"], "test-words.npz")
    assert [line.split("  ")[0] for line in table[2:5]] == [
        "plain-run", "both-run, plain softmax", "both-run, Hebbian softmax",
    ]  # fmt: skip
    assert table[2].split()[-1] == f"{math.exp(total.mean()):.4g}"
    assert table[2].split()[1:] == table[3].split()[3:]  # the same training, alone and in a comparison
    assert "from plain-run to both-run, Hebbian softmax" in output
    assert (tmp_path / "side-curves.png").read_bytes().startswith(b"\x89PNG")
    text = page.read_text()
    assert text.count("<img") == 3
    assert text.index("Words that gained most") < text.index("<section>")


def test_which_are_compared(runs: dict[str, Run]) -> None:
    models = models_of([runs["both"], runs["plain"]])
    assert [(one.label, other.label) for one, other in pairs_of(models)] == [
        ("both-run, plain softmax", "both-run, Hebbian softmax"),
        ("both-run, Hebbian softmax", "plain-run"),
    ]
    assert pairs_of([]) == []
    assert [model.label for model in models_of([runs["plain"]])] == ["this run"]


def test_an_unfinished_run_has_its_curve_and_other_kinds_are_let_be(runs: dict[str, Run], tmp_path: Path) -> None:
    unfinished = open_run(Path(shutil.copytree(runs["plain"].path, tmp_path / "unfinished")))
    for name in ("result.json", "test-words.npz", "valid-words.npz"):
        (unfinished.path / name).unlink()
    found = compare_words([unfinished])
    assert (list(found.images), found.tables) == (["curves.png"], [])
    assert call("report", unfinished.path) == 0
    assert (unfinished.path / "curves.png").exists()
    other = create_run(tmp_path, "longtail", "compare longtail", {})
    assert compare_words([other]) == compare_words([other, other]) == Beside([], {}, [])


def test_texts_that_differ_are_noted_not_compared(
    runs: dict[str, Run], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = Path(shutil.copytree(runs["plain"].path, tmp_path / "other"))
    for split in ("valid", "test"):
        nll, ids = losses(open_run(other), f"{split}-words.npz")
        np.savez(other / f"{split}-words.npz", nll=nll, ids=ids, corpus=np.array("another"), streams=np.array(1))
    assert call("report", runs["plain"].path, other, "--markdown") == 0
    captured = capsys.readouterr()
    assert "are of different texts" in captured.err
    assert "gained" not in captured.out
    assert "| other |" in captured.out


def test_a_later_evaluation_replaces_the_runs_own(runs: dict[str, Run], tmp_path: Path) -> None:
    run = open_run(Path(shutil.copytree(runs["plain"].path, tmp_path / "run")))
    score = {"words": 3, "perplexity": 7.5, "bucket_words": {}, "bucket_perplexity": {"<100": 7.5}}
    result = run.result()
    assert result is not None
    own = {split: {**found, "streams": 1} for split, found in result["metrics"]["scores"]["model"].items()}
    (model,) = models_of([run])
    for step, expected in ((result["metrics"]["steps"], {**score, "streams": 4}), (5, own["test"])):
        # The evaluation at step 5 is older than the measurement at the end of the run.
        evaluation = {"step": step, "streams": 4, "scores": {"model": {"test": score}}}
        (run.path / "evaluation.json").write_text(json.dumps(evaluation))
        assert model.score("test") == expected
        assert model.score("valid") == own["valid"]


def test_texts_read_in_other_parts_are_said_to_be(
    runs: dict[str, Run], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = open_run(Path(shutil.copytree(runs["plain"].path, tmp_path / "run")))
    assert call("evaluate", run.path, "--streams", "3", "--quiet") == 0
    assert call("report", run.path, runs["plain"].path, "--markdown") == 0
    captured = capsys.readouterr()
    assert "| run (in 3 streams) |" in captured.out
    assert "| plain-run |" in captured.out
    assert "run and plain-run were measured in 3 and 1 streams of the test text" in captured.err


def test_an_evaluation_with_memories_leaves_the_models_own_scores(
    runs: dict[str, Run], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = open_run(Path(shutil.copytree(runs["plain"].path, tmp_path / "run")))
    assert call("evaluate", run.path, "--cache", "--cache-size", "5", "--quiet") == 0
    capsys.readouterr()
    assert call("report", run.path, runs["both"].path, "--markdown") == 0
    total, _ = losses(run, "test-words.npz")
    (row,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| run |")][:1]
    assert row.split("|")[-2].strip() == f"{math.exp(total.mean()):.4g}"


def test_a_damaged_evaluation_is_one_clear_line(runs: dict[str, Run], tmp_path: Path) -> None:
    run = open_run(Path(shutil.copytree(runs["plain"].path, tmp_path / "run")))
    (run.path / "evaluation.json").write_text("{}")
    with pytest.raises(LabError, match=r"evaluation\.json is damaged .*: evaluate that run again"):
        models_of([run])[0].score("test")
