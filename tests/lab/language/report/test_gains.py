"""The words that gained and lost most are those of a literal loop over the text."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hebbian_softmax.lab.base.errors import LabError
from hebbian_softmax.lab.base.runs import Run, create_run
from hebbian_softmax.lab.language.names import ONLY
from hebbian_softmax.lab.language.report.words import (
    SHOWN,
    Words,
    change_by_word,
    changes_of,
    tabulate_changes,
    vocabulary_of,
)
from tests.lab.language.toy import corpus, prepared


def run_with(folder: Path, name: str, nll: Any, ids: Any, fingerprint: str = "abc") -> Run:
    run = create_run(folder, name, "train corpus", {"corpus": ""})
    np.savez(run.path / "test-words.npz", nll=nll, ids=ids, corpus=np.array(fingerprint), streams=np.array(1))
    return run


def test_sums_and_counts_are_those_of_a_loop() -> None:
    draws = np.random.default_rng(0)
    ids = draws.integers(0, 30, 500).astype(np.int32)
    before, after = (draws.exponential(size=500).astype(np.float32) for _ in range(2))
    total: dict[int, float] = {}
    many: dict[int, int] = {}
    for word, first, second in zip(ids.tolist(), before.tolist(), after.tolist(), strict=True):
        total[word] = total.get(word, 0.0) + (second - first)
        many[word] = many.get(word, 0) + 1
    found = change_by_word("abc", ids, before, after)
    assert found.occurrences == many
    assert found.total == pytest.approx(total)

    words = Words([f"w{number}" for number in range(30)], [100 - number for number in range(30)])
    gained, lost = tabulate_changes(found, words, "here")
    best = min(total, key=lambda word: total[word])
    worst = max(total, key=lambda word: total[word])
    assert gained.rows[0] == [
        f"w{best}",
        many[best],
        100 - best,
        f"{total[best]:+.2f}",
        f"{total[best] / many[best]:+.3f}",
    ]
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
    first = run_with(tmp_path, "a", nll, ids)
    found = changes_of(first, ONLY, run_with(tmp_path, "b", nll * 3, ids), ONLY, "test")
    assert found is not None
    assert found.total == {1: 4.0, 2: 2.0}
    assert changes_of(first, ONLY, run_with(tmp_path, "b", nll, ids), ONLY, "valid") is None
    for other in (run_with(tmp_path, "c", nll, ids, "other"), run_with(tmp_path, "d", nll, ids[::-1] + 1)):
        with pytest.raises(LabError, match="are of different texts"):
            changes_of(first, ONLY, other, ONLY, "test")
    damaged = run_with(tmp_path, "e", nll, ids)
    (damaged.path / "test-words.npz").write_bytes(b"PK damaged")
    with pytest.raises(LabError, match="evaluate that run again"):
        changes_of(first, ONLY, damaged, ONLY, "test")


def test_the_vocabulary_is_found_by_its_fingerprint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEBBIAN_CACHE", str(tmp_path / "cache"))
    made = prepared(tmp_path / "cache" / "corpora" / "mine")
    by_name = create_run(tmp_path, "a", "train mine", {"corpus": "somewhere else"})
    words = vocabulary_of(by_name, made.fingerprint)
    assert words is not None
    assert (list(words.names), list(words.counts)) == (list(made.words), made.counts.tolist())
    assert vocabulary_of(by_name, "another") is None
    elsewhere = prepared(tmp_path / "own")
    monkeypatch.setenv("HEBBIAN_CACHE", str(tmp_path / "empty"))
    by_folder = create_run(tmp_path, "b", "train corpus", {"corpus": str(tmp_path / "own")})
    assert vocabulary_of(by_folder, elsewhere.fingerprint) is not None
    made_up = create_run(tmp_path, "c", "train zipf", {"vocabulary": 40, "tokens": 800})
    found = vocabulary_of(made_up, corpus().fingerprint)
    assert found is not None
    assert found.names[3] == "w3"
