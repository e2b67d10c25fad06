"""What a run of language models says: perplexities by frequency, learning curves, sentences."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from hebbian_softmax.lab.base.errors import enough_memory
from hebbian_softmax.lab.base.files import write_atomic
from hebbian_softmax.lab.base.progress import Progress
from hebbian_softmax.lab.base.ranks import current_ranks
from hebbian_softmax.lab.base.runs import Run
from hebbian_softmax.lab.data.buckets import BUCKETS
from hebbian_softmax.lab.data.corpus import Corpus
from hebbian_softmax.lab.language.evaluation import Score, measure
from hebbian_softmax.lab.language.model.lstm import WordLSTM
from hebbian_softmax.lab.language.names import ONLY, ModelName
from hebbian_softmax.lab.language.report.curves import draw_curves
from hebbian_softmax.lab.report.tables import Cell, Table

TEXTS = {"valid": "validation", "test": "test"}
Scores = Mapping[ModelName, Mapping[str, Score]]
"""By model, then by split."""


def words_file(name: ModelName, split: str) -> str:
    """Return the file with the loss and the id of every word predicted: `nll` (float32) and `ids` (int32)."""
    return f"{name.file_prefix}{split}-words.npz"


def measure_all(
    models: Mapping[ModelName, WordLSTM],
    corpus: Corpus,
    splits: Sequence[str],
    run: Run,
    *,
    streams: int = 1,
    quiet: bool = False,
) -> dict[ModelName, dict[str, Score]]:
    """Measure all models on all splits, and keep what each thought of every word in the run folder."""
    import numpy as np

    scores: dict[ModelName, dict[str, Score]] = {name: {} for name in models}
    for split in splits:
        for name, model in models.items():
            label = f"measuring {name.title} on the {TEXTS[split]} text"
            total = len(corpus.splits[split]) - 1
            with (
                enough_memory("reading a text", "hebbian evaluate with fewer --streams, or --device cpu, takes less"),
                Progress(label, total=total, unit="words", quiet=quiet) as progress,
            ):
                found, arrays = measure(model, corpus, split, streams=streams, seen=progress.update)
                progress.update(total, {"perplexity": found.perplexity})
            scores[name][split] = found
            if current_ranks().first:
                kept = {**arrays, "corpus": np.array(corpus.fingerprint), "streams": np.array(streams)}
                write_atomic(
                    run.path / words_file(name, split),
                    partial(np.savez_compressed, **kept),
                )
    return scores


def as_plain(scores: Scores) -> dict[str, Any]:
    """For JSON: by model, then by split."""
    return {name.key: {split: asdict(score) for split, score in of_model.items()} for name, of_model in scores.items()}


def tabulate(scores: Scores, corpus: Corpus) -> list[Table]:
    """One table a split, of one model or of two beside each other."""
    tables = []
    for split in next(iter(scores.values())):
        found = [of_model[split] for of_model in scores.values()]
        rows: list[list[Cell]] = []
        for bucket in (None, *BUCKETS):
            words = found[0].words if bucket is None else found[0].bucket_words[bucket]
            values = [each.perplexity if bucket is None else each.bucket_perplexity[bucket] for each in found]
            if words:
                rows.append(["all" if bucket is None else f"{bucket} times", words, *values, *_change(values)])
        columns = [
            "words seen in training",
            "predictions",
            *("perplexity" if name == ONLY else name.title for name in scores),
        ]
        columns += ["change"] if len(scores) == 2 else []
        tables.append(Table(f"Perplexity on the {TEXTS[split]} text of {corpus.name}", columns, rows))
    return tables


def _change(values: Sequence[float | None]) -> list[Cell]:
    if len(values) != 2:
        return []
    before, after = values
    return [f"{100 * (after / before - 1):+.1f} %" if before and after else None]


def draw(records: Sequence[Mapping[str, Any]], names: Sequence[ModelName]) -> bytes:
    """The learning curves of a run, one line for each of its models."""
    labels = {"this run" if name == ONLY else name.title: name for name in names}
    return draw_curves({label: [records] for label in labels}, labels)
