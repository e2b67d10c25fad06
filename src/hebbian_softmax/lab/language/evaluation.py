"""The evaluation of a model: it predicts every word of a text after all words before it, in one stream with state.

A text of n words has n - 1 predictions, because its first word is only read. `stream` and `word_losses` read a text,
`measure` gives its perplexity in all and by training frequency, and `measure_all` does so for all models of a run.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hebbian_softmax import linear_log_prob
from hebbian_softmax.lab.base.errors import DivergedError, LabError, enough_memory
from hebbian_softmax.lab.base.files import write_atomic
from hebbian_softmax.lab.base.progress import Progress
from hebbian_softmax.lab.base.ranks import current_ranks
from hebbian_softmax.lab.base.runs import Run
from hebbian_softmax.lab.data.buckets import BUCKETS, bucket_of
from hebbian_softmax.lab.data.corpus import Corpus
from hebbian_softmax.lab.language.model import LanguageModel
from hebbian_softmax.lab.language.names import ONLY, TEXTS, ModelName
from hebbian_softmax.lab.report.tables import Cell, Table

CHUNK = 4096  # predictions that are made at a time
Seen = Callable[[int], object] | None
"""A function to call, while a text is read, with the number of predictions made so far."""


@torch.no_grad()
def stream(
    model: LanguageModel, ids: Tensor, *, streams: int = 1, chunk: int = CHUNK
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield activations (time, streams, features) and the words that follow them (time, streams), in order.

    One stream reads the whole text as it stands, which is what a memory must see. Several streams read contiguous
    parts of the text side by side; each begins without a state, so the words at its start are predicted a little
    worse. If the parts have unequal lengths, the last targets are -1 and must be ignored.
    """
    length = -(-(len(ids) - 1) // streams)
    # Each lane begins with the last word of the lane before it; the last lane is filled up with -1.
    lanes = F.pad(ids, (0, streams * length + 1 - len(ids)), value=-1).unfold(0, length + 1, length)
    device = next(model.parameters()).device
    time = max(1, chunk // streams)
    state, was_training = None, model.training
    model.eval()
    try:
        for first in range(0, length, time):
            words = lanes[:, first : first + time + 1].to(device).long().T
            inputs = words[:-1].clamp(min=0).contiguous()
            activations, state = model.features(inputs, state)
            yield activations, words[1:]
    finally:
        model.train(was_training)


@torch.no_grad()
def word_losses(
    model: LanguageModel, ids: Tensor, *, streams: int = 1, chunk: int = CHUNK, seen: Seen = None
) -> Tensor:
    """Return -log p of every word but the first, in the order of the text, as float32 on the CPU."""
    found, done = [], 0
    weight = model.head.weight.to(model.precision)
    for activations, targets in stream(model, ids, streams=streams, chunk=chunk):
        log_prob, _ = linear_log_prob(
            activations.flatten(0, 1), weight, targets.flatten(), linear_bias=model.head.bias, ignore_index=-1
        )
        found.append(-log_prob.view(targets.shape).float())  # left on the device, because reading it would wait
        done += targets.numel()
        if seen is not None:
            seen(min(done, len(ids) - 1))
    return torch.cat(found).T.reshape(-1)[: len(ids) - 1].cpu()


@dataclass(frozen=True)
class Score:
    """The number of predictions of a text and their perplexity, in all and by training frequency of the word."""

    words: int
    perplexity: float
    bucket_words: dict[str, int]
    bucket_perplexity: dict[str, float | None]

    def __post_init__(self) -> None:
        """Refuse what no score can hold, since scores are also read from files; older ones had null for infinity."""
        numbers = [self.words, self.perplexity, *self.bucket_words.values(), *self.bucket_perplexity.values()]
        if not all(value is None or isinstance(value, int | float) for value in numbers):
            raise TypeError("a score is not a number")

    def as_metrics(self, prefix: str) -> dict[str, float]:
        """Return the perplexities for the log; a bucket without words has no entry."""
        metrics = {f"{prefix}_perplexity": self.perplexity}
        for name, value in self.bucket_perplexity.items():
            if value is not None:
                metrics[f"{prefix}_perplexity_{name}"] = value
        return metrics


def score(losses: Tensor, targets: Tensor, counts: Tensor) -> Score:
    """Return the perplexities, exp of the mean loss. `counts` are the training occurrences of every word."""
    buckets = bucket_of(counts)[targets.long()]
    words = torch.bincount(buckets, minlength=len(BUCKETS))
    sums = torch.bincount(buckets, weights=losses.double(), minlength=len(BUCKETS))
    perplexities = [
        perplexity(total / many) if many else None for total, many in zip(sums.tolist(), words.tolist(), strict=True)
    ]
    return Score(
        words=len(losses),
        perplexity=perplexity(losses.double().mean().item()),
        bucket_words=dict(zip(BUCKETS, words.tolist(), strict=True)),
        bucket_perplexity=dict(zip(BUCKETS, perplexities, strict=True)),
    )


def check_finite(found: Score, what: str) -> None:
    """Raise an error if one of the perplexities of `what` is infinite."""
    for name, value in {"all words": found.perplexity, **found.bucket_perplexity}.items():
        if value is not None and not math.isfinite(value):
            seen = name if value == found.perplexity else f"words seen {name} times"
            raise DivergedError(
                f"the perplexity of {what} is not finite ({seen}): the model's weights are too large or not numbers; "
                "train one with a lower learning rate"
            )


def perplexity(mean_loss: float) -> float:
    """Return exp of the mean loss, or infinity if that is more than a number can hold or the loss is nan."""
    return math.exp(mean_loss) if mean_loss < 700 else math.inf


def text_of(corpus: Corpus, split: str) -> Tensor:
    """Return the ids of a split, which must have something to predict."""
    ids = corpus.splits[split]
    if len(ids) < 2:
        raise LabError(
            f"the {split} text of {corpus.path} has {len(ids)} words, so nothing can be predicted: prepare it again"
        )
    return ids


def measure(
    model: LanguageModel, corpus: Corpus, split: str, *, streams: int = 1, first: int = 0, seen: Seen = None
) -> tuple[Score, dict[str, Any]]:
    """Return the score of a split, and the arrays to keep: the loss and the id of every word predicted.

    With `first`, only the first so many predictions are made.
    """
    ids = text_of(corpus, split)
    ids = ids[: first + 1] if first else ids
    losses = word_losses(model, ids, streams=min(streams, len(ids) - 1), seen=seen)
    targets = ids[1:]
    return score(losses, targets, corpus.counts), {"nll": losses.numpy(), "ids": targets.numpy()}


Scores = Mapping[ModelName, Mapping[str, Score]]
"""By model, then by split."""


def words_file(name: ModelName, split: str) -> str:
    """Return the file with the loss and the id of every word predicted: `nll` (float32) and `ids` (int32)."""
    return f"{name.file_prefix}{split}-words.npz"


def measure_all(
    models: Mapping[ModelName, LanguageModel],
    corpus: Corpus,
    splits: Sequence[str],
    run: Run,
    *,
    streams: int = 1,
    quiet: bool = False,
) -> dict[ModelName, dict[str, Score]]:
    """Measure all models on all splits, and write the loss of every word to the run folder.

    A perplexity that is not finite raises a `DivergedError`.
    """
    import numpy as np

    scores: dict[ModelName, dict[str, Score]] = {name: {} for name in models}
    for split in splits:
        for name, model in models.items():
            label = f"measuring {name.title} on the {TEXTS[split]} text"
            total = len(corpus.splits[split]) - 1
            with (
                enough_memory("reading a text", "hebbian evaluate takes less with fewer --streams or --device cpu"),
                Progress(label, total=total, unit="words", quiet=quiet) as progress,
            ):
                found, arrays = measure(model, corpus, split, streams=streams, seen=progress.update)
                progress.update(total, {"perplexity": found.perplexity})
            check_finite(found, f"{name.title} on the {TEXTS[split]} text")
            scores[name][split] = found
            if current_ranks().first:
                kept = {**arrays, "corpus": np.array(corpus.fingerprint), "streams": np.array(streams)}
                write_atomic(run.path / words_file(name, split), partial(np.savez_compressed, **kept))
    return scores


def as_plain(scores: Scores) -> dict[str, Any]:
    """Return the scores for JSON: by model, then by split."""
    return {name.key: {split: asdict(score) for split, score in of_model.items()} for name, of_model in scores.items()}


def tabulate(scores: Scores, corpus: Corpus) -> list[Table]:
    """Return one table for each split, with one model or with two beside each other."""
    tables = []
    names = ["perplexity" if name == ONLY else name.title for name in scores]
    for split in next(iter(scores.values())):
        title = f"Perplexity on the {TEXTS[split]} text of {corpus.name}"
        table = score_table(title, names, [of_model[split] for of_model in scores.values()])
        if len(scores) == 2:
            rows = [[*row, _change(row[2], row[3])] for row in table.rows]
            table = Table(title, [*table.columns, "change"], rows)
        tables.append(table)
    return tables


def score_table(title: str, names: Sequence[str], scores: Sequence[Score]) -> Table:
    """Return a table of all words and of each bucket that has words, with a column for each score."""
    rows: list[list[Cell]] = [["all", scores[0].words, *(each.perplexity for each in scores)]]
    for bucket, words in scores[0].bucket_words.items():
        if words:
            rows.append([f"{bucket} times", words, *(each.bucket_perplexity[bucket] for each in scores)])
    return Table(title, ["words seen in training", "predictions", *names], rows)


def _change(before: Cell, after: Cell) -> str | None:
    if isinstance(before, float) and isinstance(after, float):
        return f"{100 * (after / before - 1):+.1f} %"
    return None
