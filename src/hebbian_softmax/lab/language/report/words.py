"""Models of `hebbian train` and `compare` beside each other: curves, perplexities, words that gained and lost most."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from hebbian_softmax.lab.base.arrays import DAMAGES, read_arrays
from hebbian_softmax.lab.base.errors import LabError, reason
from hebbian_softmax.lab.base.json_files import read_json
from hebbian_softmax.lab.base.runs import Run
from hebbian_softmax.lab.base.settings import from_values
from hebbian_softmax.lab.data.buckets import BUCKETS
from hebbian_softmax.lab.data.corpus import MANIFEST, Corpus, open_corpus, prepared
from hebbian_softmax.lab.language.evaluation import Score, words_file
from hebbian_softmax.lab.language.names import HEBBIAN, ONLY, PLAIN, TEXTS, ModelName
from hebbian_softmax.lab.language.report.curves import CAPTION, draw_curves
from hebbian_softmax.lab.language.settings import ZipfSource
from hebbian_softmax.lab.language.source import CORPORA
from hebbian_softmax.lab.language.zipf import zipf_corpus
from hebbian_softmax.lab.report.result import Beside
from hebbian_softmax.lab.report.tables import Cell, Table

HEADS = {"train": (ONLY,), "compare": (PLAIN, HEBBIAN)}
SPLITS = ("test", "valid")  # the more interesting text first
SHOWN = 15  # words in a table of those that gained or lost most


@dataclass(frozen=True)
class Model:
    """One model of a run, and what tables and figures call it."""

    run: Run
    name: ModelName
    label: str

    def score(self, split: str) -> Mapping[str, Any] | None:
        """Return the newest score on a text; its `streams` are the parts in which the text was read."""
        try:
            metrics = (self.run.result() or {}).get("metrics", {})
            own, later = {"streams": 1, "scores": metrics.get("scores", {})}, _evaluation(self.run)
            # A run can be evaluated before it is finished. Then the measurement at its end is the newer one.
            newer = later.get("step", 0) >= metrics.get("steps", 0)
            for found in (later, own) if newer else (own, later):
                scores = found.get("scores", {}).get(self.name.key, {})
                if split in scores:
                    return {"streams": found.get("streams", 1), **asdict(Score(**scores[split]))}
        except (AttributeError, TypeError) as error:
            raise LabError(
                f"result.json or evaluation.json in {self.run.path} does not hold the scores of its models "
                f"({reason(error)}): evaluate that run again, or delete result.json and resume it"
            ) from error
        return None


@dataclass(frozen=True)
class Changes:
    """The number of predictions of each word of a text, and the total change of its losses (nats), by id."""

    corpus: str
    occurrences: Mapping[int, int]
    total: Mapping[int, float]


def models_of(runs: Sequence[Run]) -> list[Model]:
    """Return the language models of runs; runs of other experiments have none."""
    found = []
    alike = len({run.path.name for run in runs}) < len(runs)
    for run in runs:
        verb, _, corpus = run.command.partition(" ")
        for name in HEADS.get(verb, ()) if corpus in CORPORA else ():
            labels = [str(run.path) if alike else run.path.name] if len(runs) > 1 else []
            labels += [] if name == ONLY else [name.title]
            found.append(Model(run, name, ", ".join(labels) or "this run"))
    return found


def pairs_of(models: Sequence[Model]) -> list[tuple[Model, Model]]:
    """Return the models to compare word by word: the two heads of a run, and each later run with the first."""
    runs: dict[Path, list[Model]] = {}
    for model in models:
        runs.setdefault(model.run.path, []).append(model)
    groups = list(runs.values())
    heads = [(group[0], group[1]) for group in groups if len(group) == 2]
    return heads + [(groups[0][-1], group[-1]) for group in groups[1:]]


def compare_words(runs: Sequence[Run]) -> Beside:
    """Set the language models among `runs` beside each other; the result is empty if there are none."""
    models = models_of(runs)
    tables: list[Table] = []
    notes: list[str] = []
    images: dict[str, tuple[str, bytes]] = {}
    texts = sorted({str(model.run.settings.get("corpus") or model.run.command.split()[-1]) for model in models})
    if len(texts) > 1:
        notes.append(f"perplexities of different texts cannot be compared: these runs are of {', '.join(texts)}")
    if len({model.run.path for model in models}) > 1:
        tables += [table for split in SPLITS for table in tabulate_buckets(models, split)]
    for before, after in pairs_of(models):
        if (changes := _changes(before, after, notes)) is not None:
            split, found = changes
            corpus = corpus_of(before.run, found.corpus)
            if corpus is None:
                notes.append(f"the vocabulary of corpus {found.corpus} cannot be found: words are shown by their ids")
            title = f"on the {TEXTS[split]} text, from {before.label} to {after.label}"
            tables += tabulate_changes(found, corpus, title)
    drawn = len(runs) == 1 and runs[0].result() is not None  # a finished run has this figure already
    if not drawn and any(model.run.records() for model in models):
        curves = {model.label: [model.run.records()] for model in models}
        images["curves.png"] = (CAPTION, draw_curves(curves, {model.label: model.name for model in models}))
    return Beside(tables, images, notes)


def tabulate_buckets(models: Sequence[Model], split: str) -> list[Table]:
    """Return perplexities by frequency, a row for each model measured on this text; no table for fewer than two."""
    rows: list[list[Cell]] = []
    for model in models:
        if (score := model.score(split)) is not None:
            values = [score["bucket_perplexity"].get(bucket) for bucket in BUCKETS]
            parts = "" if score["streams"] == 1 else f" (in {score['streams']} streams)"
            rows.append([model.label + parts, score["words"], *values, score["perplexity"]])
    if len(rows) < 2:
        return []
    columns = ["", "predictions", *BUCKETS, "all"]
    return [Table(f"Perplexity on the {TEXTS[split]} text by training occurrences of the word", columns, rows)]


def _changes(before: Model, after: Model, notes: list[str]) -> tuple[str, Changes] | None:
    """Return the changes on the test text, or else on the validation text, with the split that they are of."""
    for split in SPLITS:
        try:
            if (found := changes_of(before, after, split, notes)) is not None:
                return split, found
        except LabError as error:
            notes.append(str(error))
    return None


def _evaluation(run: Run) -> Mapping[str, Any]:
    """Return the result of the last `hebbian evaluate`, unless it measured mixtures with memories."""
    path = run.path / "evaluation.json"
    if not path.exists():
        return {}
    found = read_json(path, "evaluate that run again")
    if "memories" in found:
        return {}
    if missing := [name for name in ("step", "streams", "scores") if name not in found]:
        raise LabError(f"{path} lacks {', '.join(missing)}: evaluate that run again")
    return found


def changes_of(before: Model, after: Model, split: str, notes: list[str]) -> Changes | None:
    """Return the changes from one model to another on a text; None if one of them was not measured on it."""
    paths = [model.run.path / words_file(model.name, split) for model in (before, after)]
    if not all(path.exists() for path in paths):
        return None
    first, second = (_read(path) for path in paths)
    if first["corpus"] != second["corpus"] or first["ids"].tolist() != second["ids"].tolist():
        raise LabError(f"{paths[0]} and {paths[1]} are of different texts, so their words cannot be compared")
    if first["streams"] != second["streams"]:
        notes.append(
            f"{before.label} and {after.label} were measured in {first['streams']} and {second['streams']} streams of "
            f"the {TEXTS[split]} text, each of which begins without a state: evaluate both with the same --streams"
        )
    return change_by_word(str(first["corpus"]), first["ids"], first["nll"], second["nll"])


def change_by_word(corpus: str, ids: Any, before: Any, after: Any) -> Changes:
    """Sum the changes over the occurrences of each word."""
    import numpy as np

    found, place, occurrences = np.unique(ids, return_inverse=True, return_counts=True)
    totals = np.bincount(place.reshape(-1), weights=after.astype("f8") - before.astype("f8"))
    return Changes(corpus, *(dict(zip(found.tolist(), each.tolist(), strict=True)) for each in (occurrences, totals)))


def tabulate_changes(changes: Changes, corpus: Corpus | None, title: str) -> list[Table]:
    """Return the words whose losses fell most in all, and those whose losses rose most."""
    columns = ["word", "occurrences", "in training", "change of loss, sum", "mean"]

    def row(word: int) -> list[Cell]:
        name, trained = (f"#{word}", None) if corpus is None else (corpus.words[word], int(corpus.counts[word]))
        total, many = changes.total[word], changes.occurrences[word]
        return [name, many, trained, f"{total:+.2f}", f"{total / many:+.3f}"]

    order = sorted(changes.total, key=lambda word: (changes.total[word], word))
    gained = [row(word) for word in order if changes.total[word] < 0][:SHOWN]
    lost = [row(word) for word in reversed(order) if changes.total[word] > 0][:SHOWN]
    tables = [
        Table(f"Words that gained most {title} (nats; less is better)", columns, gained),
        Table(f"Words that lost most {title}", columns, lost),
    ]
    return [table for table in tables if table.rows]


def corpus_of(run: Run, fingerprint: str) -> Corpus | None:
    """Return the corpus of a run if one with this fingerprint is on this machine; download nothing."""
    source = {field.name: run.settings.get(field.name) for field in fields(ZipfSource)}
    if None not in source.values():
        try:
            made = zipf_corpus(**asdict(from_values(ZipfSource, source)))
        except ValueError:
            return None
        return made if made.fingerprint == fingerprint else None
    given = Path(str(run.settings.get("corpus") or ""))
    folders = [given] if (given / MANIFEST).exists() else []
    for folder in [*folders, *prepared()]:
        try:
            corpus = open_corpus(folder)
        except LabError:
            continue  # a damaged corpus cannot be the one
        if corpus.fingerprint == fingerprint:
            return corpus
    return None


def _read(path: Path) -> dict[str, Any]:
    try:
        words = read_arrays(path)
        arrays = {name: words[name] for name in ("nll", "ids", "corpus", "streams")}
        if arrays["nll"].shape != arrays["ids"].shape or arrays["nll"].ndim != 1:
            raise ValueError("its arrays are not lists of equal lengths")
        return arrays
    except DAMAGES as error:
        raise LabError(f"{path} cannot be read ({reason(error)}): evaluate that run again") from error
