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
from hebbian_softmax.lab.language.report.curves import draw_curves
from hebbian_softmax.lab.report.tables import Cell, Table

NAMES = {"plain_": "plain softmax", "hebbian_": "Hebbian softmax"}
TEXTS = {"valid": "validation", "test": "test"}
Scores = Mapping[str, Mapping[str, Score]]
"""By the model's prefix, then by split."""


def words_file(prefix: str, split: str) -> str:
    """The loss and the id of every word that a model was to predict: `nll` (float32) and `ids` (int32)."""
    return f"{prefix.replace('_', '-')}{split}-words.npz"


def measure_all(
    models: Mapping[str, WordLSTM],
    corpus: Corpus,
    splits: Sequence[str],
    run: Run,
    *,
    streams: int = 1,
    quiet: bool = False,
) -> dict[str, dict[str, Score]]:
    """Measure all models on all splits, and keep what each thought of every word in the run folder."""
    import numpy as np

    scores: dict[str, dict[str, Score]] = {prefix: {} for prefix in models}
    for split in splits:
        for prefix, model in models.items():
            label = f"measuring {NAMES.get(prefix, 'it')} on the {TEXTS[split]} text"
            total = len(corpus.splits[split]) - 1
            with (
                enough_memory("reading a text", "hebbian evaluate with fewer --streams, or --device cpu, takes less"),
                Progress(label, total=total, unit="words", quiet=quiet) as progress,
            ):
                found, arrays = measure(model, corpus, split, streams=streams, seen=progress.update)
                progress.update(total, {"perplexity": found.perplexity})
            scores[prefix][split] = found
            if current_ranks().first:
                kept = {**arrays, "corpus": np.array(corpus.fingerprint), "streams": np.array(streams)}
                write_atomic(
                    run.path / words_file(prefix, split),
                    partial(np.savez_compressed, **kept),
                )
    return scores


def as_plain(scores: Scores) -> dict[str, Any]:
    """For JSON: by model, then by split."""
    return {
        prefix.rstrip("_") or "model": {split: asdict(score) for split, score in of_model.items()}
        for prefix, of_model in scores.items()
    }


def tabulate(scores: Scores, corpus: Corpus) -> list[Table]:
    """One table a split, of one model or of two beside each other."""
    prefixes = list(scores)
    tables = []
    for split in scores[prefixes[0]]:
        found = [scores[prefix][split] for prefix in prefixes]
        rows: list[list[Cell]] = []
        for bucket in (None, *BUCKETS):
            words = found[0].words if bucket is None else found[0].bucket_words[bucket]
            values = [each.perplexity if bucket is None else each.bucket_perplexity[bucket] for each in found]
            if words:
                rows.append(["all" if bucket is None else f"{bucket} times", words, *values, *_change(values)])
        columns = ["words seen in training", "predictions", *(NAMES.get(prefix, "perplexity") for prefix in prefixes)]
        columns += ["change"] if len(prefixes) == 2 else []
        tables.append(Table(f"Perplexity on the {TEXTS[split]} text of {corpus.name}", columns, rows))
    return tables


def _change(values: Sequence[float | None]) -> list[Cell]:
    if len(values) != 2:
        return []
    before, after = values
    return [f"{100 * (after / before - 1):+.1f} %" if before and after else None]


def draw(records: Sequence[Mapping[str, Any]], prefixes: Sequence[str]) -> bytes:
    """The learning curves of a run, one line for each of its models."""
    labels = {NAMES.get(prefix, "this run"): prefix for prefix in prefixes}
    return draw_curves({label: [records] for label in labels}, labels)
