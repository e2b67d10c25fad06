"""`hebbian report` of language models: one run or several, and the words that gained and lost most."""

import contextlib
import html
import json
import math
import shutil
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hebbian_softmax.lab.base.console import program, quoted
from hebbian_softmax.lab.base.errors import LabError
from hebbian_softmax.lab.base.runs import Run, create_run, open_run
from hebbian_softmax.lab.language.names import ONLY
from hebbian_softmax.lab.language.report.words import (
    SHOWN,
    Beside,
    Model,
    change_by_word,
    changes_of,
    compare_words,
    corpus_of,
    models_of,
    pairs_of,
    tabulate_changes,
)
from tests.lab.editing import edited
from tests.lab.language.commands import FEW, call, only
from tests.lab.language.toy import corpus, prepared

Capture = pytest.CaptureFixture[str]


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


@pytest.fixture
def run(runs: dict[str, Run], tmp_path: Path) -> Run:
    """A copy of the plain run for a test that changes it."""
    return open_run(Path(shutil.copytree(runs["plain"].path, tmp_path / "run")))


def losses(run: Run, file: str) -> tuple[np.ndarray, np.ndarray]:
    with np.load(run.path / file) as words:
        return words["nll"].astype("f8"), words["ids"]


def test_runs_of_different_texts_are_not_compared_without_a_word(
    runs: dict[str, Run], run: Run, tmp_path: Path, capsys: Capture
) -> None:
    page = ["--output", str(tmp_path / "page.html")]
    assert call("report", run.path, runs["both"].path, *page) == 0
    assert "different texts" not in capsys.readouterr().err
    with edited(run.path / "config.json") as config:
        config["settings"]["corpus"] = "another"
    assert call("report", run.path, runs["both"].path, *page) == 0
    assert "perplexities of different texts cannot be compared: these runs are of" in capsys.readouterr().err


def test_a_run_that_is_not_finished_says_how_to_go_on(run: Run, capsys: Capture) -> None:
    (run.path / "result.json").unlink()
    assert call("report", run.path) == 0
    first, second, *_ = capsys.readouterr().out.splitlines()
    state = "not finished: its log ends at step 12, and its last checkpoint may be later"
    assert first == f"{run.path}: {state}; go on with:"
    assert second == f"  {program()} train {quoted(run.settings['corpus'])} --resume {quoted(run.path)}"


def test_two_heads_of_one_run(runs: dict[str, Run], capsys: Capture) -> None:
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


def test_runs_side_by_side(runs: dict[str, Run], tmp_path: Path, capsys: Capture) -> None:
    page = tmp_path / "side.html"
    assert call("report", runs["plain"].path, runs["both"].path, "--output", page) == 0
    output = capsys.readouterr().out
    table = output[output.index("Perplexity on the test text by training occurrences of the word") :].splitlines()
    total, _ = losses(runs["plain"], "test-words.npz")
    labels = ["plain-run", "both-run, plain softmax", "both-run, Hebbian softmax"]
    assert [line.split("  ")[0] for line in table[2:5]] == labels
    assert table[2].split()[-1] == f"{math.exp(total.mean()):.4g}"
    assert table[2].split()[1:] == table[3].split()[3:]  # the same training, alone and in a comparison
    assert "from plain-run to both-run, Hebbian softmax" in output
    assert (tmp_path / "side-curves.png").read_bytes().startswith(b"\x89PNG")
    text = page.read_text()
    assert text.count("<img") == 3
    assert text.index("Words that gained most") < text.index("<section>")


def test_names_of_run_folders_are_shown_as_they_are(runs: dict[str, Run], run: Run, capsys: Capture) -> None:
    name = "_a$b$^{ \udcff *x* <b>"
    named = open_run(run.path.rename(run.path.with_name(name)))
    page = named.path.parent / "side.html"
    assert call("report", named.path, runs["plain"].path, "--output", page) == 0
    shown = name.replace("\udcff", r"\xff")
    assert f"\n{shown} " in capsys.readouterr().out
    assert html.escape(shown) in page.read_text(encoding="utf-8")
    assert (page.parent / "side-curves.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("scores", [7, [], {"model": 7}, {"model": {"test": 7}}, {"model": {"test": {"words": 1}}}])
def test_scores_of_another_kind_are_one_clear_line(run: Run, scores: object) -> None:
    with edited(run.path / "result.json") as result:
        result["metrics"]["scores"] = scores
    with pytest.raises(LabError, match=r"does not hold the scores of its models .*evaluate that run again"):
        models_of([run])[0].score("test")


def test_a_flipped_bit_in_the_losses_of_words_is_noticed(run: Run, tmp_path: Path) -> None:
    """A changed shape or type in an array's own header would make NumPy read too little to notice."""
    (model,), path = models_of([run]), run.path / "test-words.npz"
    whole = path.read_bytes()
    expected = changes_of(model, model, "test", [])
    for position in range(0, len(whole), 13):
        changed = bytearray(whole)
        changed[position] ^= 1 << position % 8
        path.write_bytes(changed)
        with contextlib.suppress(LabError):
            assert changes_of(model, model, "test", []) == expected


def test_which_are_compared(runs: dict[str, Run]) -> None:
    models = models_of([runs["both"], runs["plain"]])
    assert [(one.label, other.label) for one, other in pairs_of(models)] == [
        ("both-run, plain softmax", "both-run, Hebbian softmax"),
        ("both-run, Hebbian softmax", "plain-run"),
    ]
    assert pairs_of([]) == []
    assert [model.label for model in models_of([runs["plain"]])] == ["this run"]


def test_an_unfinished_run_has_its_curve_and_other_kinds_are_let_be(run: Run, tmp_path: Path) -> None:
    for name in ("result.json", "test-words.npz", "valid-words.npz"):
        (run.path / name).unlink()
    found = compare_words([run])
    assert (list(found.images), found.tables) == (["curves.png"], [])
    assert call("report", run.path) == 0
    assert (run.path / "curves.png").exists()
    other = create_run(tmp_path, "longtail", "compare longtail", {})
    assert compare_words([other]) == compare_words([other, other]) == Beside([], {}, [])


def test_texts_that_differ_are_noted_not_compared(runs: dict[str, Run], run: Run, capsys: Capture) -> None:
    for split in ("valid", "test"):
        nll, ids = losses(run, f"{split}-words.npz")
        np.savez(run.path / f"{split}-words.npz", nll=nll, ids=ids, corpus=np.array("another"), streams=np.array(1))
    assert call("report", runs["plain"].path, run.path, "--markdown") == 0
    captured = capsys.readouterr()
    assert "are of different texts" in captured.err
    assert "gained" not in captured.out
    assert "| run |" in captured.out


def test_a_later_evaluation_replaces_the_runs_own(run: Run) -> None:
    score = {"words": 3, "perplexity": 7.5, "bucket_words": {}, "bucket_perplexity": {"<100": 7.5}}
    metrics = json.loads((run.path / "result.json").read_bytes())["metrics"]
    own = {split: {**found, "streams": 1} for split, found in metrics["scores"]["model"].items()}
    (model,) = models_of([run])
    for step, expected in ((metrics["steps"], {**score, "streams": 4}), (5, own["test"])):
        # The evaluation at step 5 is older than the measurement at the end of the run.
        evaluation = {"step": step, "streams": 4, "scores": {"model": {"test": score}}}
        (run.path / "evaluation.json").write_text(json.dumps(evaluation))
        assert model.score("test") == expected
        assert model.score("valid") == own["valid"]


def test_texts_read_in_other_parts_are_said_to_be(runs: dict[str, Run], run: Run, capsys: Capture) -> None:
    assert call("evaluate", run.path, "--streams", "3", "--quiet") == 0
    assert call("report", run.path, runs["plain"].path, "--markdown") == 0
    captured = capsys.readouterr()
    assert "| run (in 3 streams) |" in captured.out
    assert "| plain-run |" in captured.out
    assert "run and plain-run were measured in 3 and 1 streams of the test text" in captured.err


def test_an_evaluation_with_memories_leaves_the_models_own_scores(
    runs: dict[str, Run], run: Run, capsys: Capture
) -> None:
    assert call("evaluate", run.path, "--cache", "--cache-size", "5", "--quiet") == 0
    capsys.readouterr()
    assert call("report", run.path, runs["both"].path, "--markdown") == 0
    total, _ = losses(run, "test-words.npz")
    (row,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| run |")][:1]
    assert row.split("|")[-2].strip() == f"{math.exp(total.mean()):.4g}"


def test_a_damaged_evaluation_is_one_clear_line(run: Run) -> None:
    (run.path / "evaluation.json").write_text("{}")
    with pytest.raises(LabError, match=r"evaluation\.json lacks step, streams, scores: evaluate that run again"):
        models_of([run])[0].score("test")


def model_with(folder: Path, name: str, nll: Any, ids: Any, fingerprint: str = "abc") -> Model:
    """Return a model with these losses on the test text."""
    run = create_run(folder, name, "train corpus", {"corpus": ""})
    np.savez(run.path / "test-words.npz", nll=nll, ids=ids, corpus=np.array(fingerprint), streams=np.array(1))
    return Model(run, ONLY, name)


def test_sums_and_counts_are_those_of_a_loop() -> None:
    draws = np.random.default_rng(0)
    ids = draws.integers(0, 30, 500).astype(np.int32)
    before, after = (draws.exponential(size=500).astype(np.float32) for _ in range(2))
    total: dict[int, float] = defaultdict(float)
    for word, first, second in zip(ids.tolist(), before.tolist(), after.tolist(), strict=True):
        total[word] += second - first
    many = Counter(ids.tolist())
    found = change_by_word("abc", ids, before, after)
    assert found.occurrences == many
    assert found.total == pytest.approx(total)

    made = corpus(30)
    gained, lost = tabulate_changes(found, made, "here")
    best, *_, worst = sorted(total, key=lambda word: total[word])
    of_best = [f"{total[best]:+.2f}", f"{total[best] / many[best]:+.3f}"]
    assert gained.rows[0] == [f"w{best}", many[best], made.counts[best].item(), *of_best]
    assert lost.rows[0][0] == f"w{worst}"
    sums = [float(str(row[3])) for row in gained.rows]
    assert sums == sorted(sums)
    assert all(value <= 0 for value in sums)
    assert all(float(str(row[3])) >= 0 for row in lost.rows)
    assert len(gained.rows) <= SHOWN
    nameless, _ = tabulate_changes(found, None, "here")
    assert nameless.rows[0][:3] == [f"#{best}", many[best], None]


def test_only_the_same_text_is_compared(tmp_path: Path) -> None:
    ids, nll = np.array([1, 2, 1], np.int32), np.ones(3, np.float32)
    first, second = model_with(tmp_path, "a", nll, ids), model_with(tmp_path, "b", nll * 3, ids)
    found = changes_of(first, second, "test", [])
    assert found is not None
    assert found.total == {1: 4.0, 2: 2.0}
    assert changes_of(first, second, "valid", []) is None
    for other in (model_with(tmp_path, "c", nll, ids, "other"), model_with(tmp_path, "d", nll, ids[::-1] + 1)):
        with pytest.raises(LabError, match="are of different texts"):
            changes_of(first, other, "test", [])
    (second.run.path / "test-words.npz").write_bytes(b"PK damaged")
    with pytest.raises(LabError, match="evaluate that run again"):
        changes_of(first, second, "test", [])


def test_a_corpus_is_found_by_its_fingerprint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEBBIAN_CACHE", str(tmp_path / "cache"))
    made = prepared(tmp_path / "cache" / "corpora" / "mine")
    by_name = create_run(tmp_path, "a", "train mine", {"corpus": "somewhere else"})
    found = corpus_of(by_name, made.fingerprint)
    assert found is not None
    assert (list(found.words), found.counts.tolist()) == (list(made.words), made.counts.tolist())
    assert corpus_of(by_name, "another") is None
    elsewhere = prepared(tmp_path / "own")
    monkeypatch.setenv("HEBBIAN_CACHE", str(tmp_path / "empty"))
    by_folder = create_run(tmp_path, "b", "train corpus", {"corpus": str(tmp_path / "own")})
    assert corpus_of(by_folder, elsewhere.fingerprint) is not None
    made_up = create_run(tmp_path, "c", "train zipf", {"vocabulary": 40, "tokens": 800})
    found = corpus_of(made_up, corpus().fingerprint)
    assert found is not None
    assert found.words[3] == "w3"
