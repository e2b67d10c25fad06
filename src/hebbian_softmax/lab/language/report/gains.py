"""Which words one model predicts better than another: the change of their losses, summed over occurrences."""

import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hebbian_softmax.lab.base.errors import LabError, reason
from hebbian_softmax.lab.base.runs import Run
from hebbian_softmax.lab.data.corpus import MANIFEST, open_corpus, prepared
from hebbian_softmax.lab.language.evaluation import words_file
from hebbian_softmax.lab.language.names import ModelName
from hebbian_softmax.lab.language.zipf import zipf_corpus
from hebbian_softmax.lab.report.tables import Cell, Table

SHOWN = 15  # words in a table


@dataclass(frozen=True)
class Changes:
    """Of each word of a text: how often it was predicted, and how much its losses changed in all (nats)."""

    corpus: str
    occurrences: Mapping[int, int]
    total: Mapping[int, float]
    streams: tuple[int, int] = (1, 1)
    """In how many parts side by side the text was read, before and after."""


@dataclass(frozen=True)
class Words:
    """The words of a vocabulary and their occurrences in training, by id."""

    names: Sequence[str]
    counts: Sequence[int]


def changes_of(before: Run, before_name: ModelName, after: Run, after_name: ModelName, split: str) -> Changes | None:
    """From one model to another on the same text; None where one of them was not measured on it."""
    paths = [before.path / words_file(before_name, split), after.path / words_file(after_name, split)]
    if not all(path.exists() for path in paths):
        return None
    first, second = (_read(path) for path in paths)
    if first["corpus"] != second["corpus"] or first["ids"].tolist() != second["ids"].tolist():
        raise LabError(f"{paths[0]} and {paths[1]} are of different texts: their words cannot be compared")
    found = change_by_word(str(first["corpus"]), first["ids"], first["nll"], second["nll"])
    return replace(found, streams=(int(first["streams"]), int(second["streams"])))


def change_by_word(corpus: str, ids: Any, before: Any, after: Any) -> Changes:
    """Sums over the occurrences of each word."""
    import numpy as np

    difference = after.astype("f8") - before.astype("f8")
    found, place, occurrences = np.unique(ids, return_inverse=True, return_counts=True)
    totals = np.bincount(place.reshape(-1), weights=difference, minlength=len(found))
    words = found.tolist()
    return Changes(
        corpus,
        dict(zip(words, occurrences.tolist(), strict=True)),
        dict(zip(words, totals.tolist(), strict=True)),
    )


def tabulate_changes(changes: Changes, words: Words | None, title: str) -> list[Table]:
    """The words whose losses fell most in all, and those whose losses rose most."""
    columns = ["word", "occurrences", "in training", "change of loss, sum", "mean"]

    def row(word: int) -> list[Cell]:
        name = f"#{word}" if words is None else words.names[word]
        total, many = changes.total[word], changes.occurrences[word]
        trained = None if words is None else words.counts[word]
        return [name, many, trained, f"{total:+.2f}", f"{total / many:+.3f}"]

    order = sorted(changes.total, key=lambda word: (changes.total[word], word))
    gained = [row(word) for word in order if changes.total[word] < 0][:SHOWN]
    lost = [row(word) for word in reversed(order) if changes.total[word] > 0][:SHOWN]
    return [
        Table(f"Words that gained most {title} (nats; less is better)", columns, gained),
        Table(f"Words that lost most {title}", columns, lost),
    ]


def vocabulary_of(run: Run, fingerprint: str) -> Words | None:
    """The vocabulary of the corpus with this fingerprint, where it is at hand. Nothing is downloaded or prepared."""
    if {"vocabulary", "tokens"} <= set(run.settings):
        made = zipf_corpus(int(run.settings["vocabulary"]), int(run.settings["tokens"]))
        return Words(made.words, made.counts.tolist()) if made.fingerprint == fingerprint else None
    given = Path(str(run.settings.get("corpus") or ""))
    folders = [given] if (given / MANIFEST).exists() else []
    for folder in [*folders, *prepared()]:
        try:
            corpus = open_corpus(folder)
        except LabError:
            continue  # a damaged corpus is not the one
        if corpus.fingerprint == fingerprint:
            return Words(corpus.words, corpus.counts.tolist())
    return None


def _read(path: Path) -> dict[str, Any]:
    import numpy as np

    try:
        with np.load(path) as words:
            arrays = {name: words[name] for name in ("nll", "ids", "corpus", "streams")}
        if len(arrays["nll"]) != len(arrays["ids"]):
            raise ValueError("its arrays have unequal lengths")
        return arrays
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise LabError(f"{path} cannot be read ({reason(error)}): evaluate that run again") from error
