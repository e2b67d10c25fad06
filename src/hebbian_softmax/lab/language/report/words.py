"""Language models beside each other: learning curves, perplexity by frequency, and the words that gained and lost most.

All of it comes from what runs of `hebbian train` and `hebbian compare` leave in their folders: the log, the scores, and
the loss of every word of a text.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hebbian_softmax.lab.base.errors import LabError, reason
from hebbian_softmax.lab.base.runs import Run
from hebbian_softmax.lab.data.buckets import BUCKETS
from hebbian_softmax.lab.language.names import HEBBIAN, ONLY, PLAIN, TEXTS, ModelName
from hebbian_softmax.lab.language.report.curves import CAPTION, draw_curves
from hebbian_softmax.lab.language.report.gains import Changes, changes_of, tabulate_changes, vocabulary_of
from hebbian_softmax.lab.language.source import CORPORA
from hebbian_softmax.lab.report.result import Beside
from hebbian_softmax.lab.report.tables import Cell, Table

HEADS = {"train": (ONLY,), "compare": (PLAIN, HEBBIAN)}
SPLITS = ("test", "valid")  # what is of more interest first


@dataclass(frozen=True)
class Model:
    """One model of a run, and what tables and figures call it."""

    run: Run
    name: ModelName
    label: str

    def score(self, split: str) -> Mapping[str, Any] | None:
        """The last that was measured of it on a text; `streams` are the parts in which the text was read."""
        metrics = (self.run.result() or {}).get("metrics", {})
        own, later = {"streams": 1, "scores": metrics.get("scores", {})}, _evaluation(self.run)
        # A run can be evaluated before it is finished; what it was measured with at its end is newer then.
        newer = later.get("step", 0) >= metrics.get("steps", 0)
        for found in (later, own) if newer else (own, later):
            scores = found.get("scores", {}).get(self.name.key, {})
            if split in scores:
                return {**scores[split], "streams": found.get("streams", 1)}
        return None


def models_of(runs: Sequence[Run]) -> list[Model]:
    """The language models of runs; runs of other kinds have none."""
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
    """Which models are compared word by word: the two heads of a run, and each later run with the first."""
    runs: dict[Any, list[Model]] = {}
    for model in models:
        runs.setdefault(model.run.path, []).append(model)
    groups = list(runs.values())
    return [(group[0], group[1]) for group in groups if len(group) == 2] + [
        (groups[0][-1], group[-1]) for group in groups[1:]
    ]


def compare_words(runs: Sequence[Run]) -> Beside:
    """Everything that the language models among `runs` have in common; nothing where there are none."""
    models = models_of(runs)
    tables: list[Table] = []
    notes: list[str] = []
    images: dict[str, tuple[str, bytes]] = {}
    if len({model.run.path for model in models}) > 1:
        tables += [table for split in SPLITS for table in tabulate_buckets(models, split)]
    for before, after in pairs_of(models):
        changes = _changes(before, after, notes)
        if changes is not None:
            split, found = changes
            vocabulary = vocabulary_of(before.run, found.corpus)
            if vocabulary is None:
                notes.append(f"the vocabulary of corpus {found.corpus} is not at hand: words are shown by their ids")
            title = f"on the {TEXTS[split]} text, from {before.label} to {after.label}"
            tables += tabulate_changes(found, vocabulary, title)
    drawn = len(runs) == 1 and runs[0].result() is not None  # a finished run has its own figure
    if not drawn and any(model.run.records() for model in models):
        curves = {model.label: [model.run.records()] for model in models}
        images["curves.png"] = (CAPTION, draw_curves(curves, {model.label: model.name for model in models}))
    return Beside(tables, images, notes)


def tabulate_buckets(models: Sequence[Model], split: str) -> list[Table]:
    """Perplexity by frequency, a row for each model that was measured on this text; none where fewer than two were."""
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
    """On the test text, or on the validation text where that was not measured."""
    for split in SPLITS:
        try:
            if (found := changes_of(before.run, before.name, after.run, after.name, split)) is not None:
                if len(set(found.streams)) > 1:
                    parts = " and ".join(map(str, found.streams))
                    notes.append(
                        f"{before.label} and {after.label} were measured in {parts} streams of the {TEXTS[split]} "
                        "text, each of which begins without a state: evaluate both with as many --streams"
                    )
                return split, found
        except LabError as error:
            notes.append(str(error))
    return None


def _evaluation(run: Run) -> Mapping[str, Any]:
    """The last `hebbian evaluate`; one with memories measures mixtures and is left out."""
    path = run.path / "evaluation.json"
    if not path.exists():
        return {}
    try:
        found = json.loads(path.read_bytes())
        return {} if "memories" in found else {name: found[name] for name in ("step", "streams", "scores")}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise LabError(f"{path} is damaged ({reason(error)}): evaluate that run again") from error
