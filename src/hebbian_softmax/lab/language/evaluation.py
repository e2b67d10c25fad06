"""How well a model predicts a text: every word after all words before it, in one stream with carried state.

A text of n words has n - 1 predictions: its first word is only read.
"""

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hebbian_softmax import linear_log_prob
from hebbian_softmax.lab.base.errors import LabError
from hebbian_softmax.lab.data.buckets import BUCKETS, bucket_of
from hebbian_softmax.lab.data.corpus import Corpus
from hebbian_softmax.lab.language.model.lstm import State, WordLSTM

CHUNK = 4096  # predictions at a time


@torch.no_grad()
def stream(model: WordLSTM, ids: Tensor, *, streams: int = 1, chunk: int = CHUNK) -> Iterator[tuple[Tensor, Tensor]]:
    """Activations (time, streams, features) and the words that follow (time, streams), from the start to the end.

    With one stream these are the text's own, in order: what a memory is to see. More are contiguous parts of the text
    read side by side; each begins without a state, so the words at its start are predicted a little worse. Where the
    parts are of unequal length the last targets are -1 and mean nothing.
    """
    lanes = _lanes(ids, streams)
    device = next(model.parameters()).device
    time = max(1, chunk // len(lanes))
    state: State | None = None
    with _evaluating(model):
        for first in range(0, lanes.shape[1] - 1, time):
            words = lanes[:, first : first + time + 1].to(device).long().T
            inputs = words[:-1].clamp(min=0).contiguous()
            activations, state = model.features(inputs, state)
            yield activations, words[1:]


@torch.no_grad()
def word_losses(
    model: WordLSTM,
    ids: Tensor,
    *,
    streams: int = 1,
    chunk: int = CHUNK,
    seen: Callable[[int], object] | None = None,
) -> Tensor:
    """-log p of every word but the first, in the order of the text, as float32 on the CPU.

    `seen` is told the number of predictions so far.
    """
    found, done = [], 0
    weight = model.head.weight.to(model.precision)
    for activations, targets in stream(model, ids, streams=streams, chunk=chunk):
        log_prob, _ = linear_log_prob(
            activations.flatten(0, 1),
            weight,
            targets.flatten(),
            linear_bias=model.head.bias,
            ignore_index=-1,
        )
        found.append(-log_prob.view(targets.shape).float())  # stays on the device: reading it would wait
        done += targets.numel()
        if seen is not None:
            seen(min(done, len(ids) - 1))
    return torch.cat(found).T.reshape(-1)[: len(ids) - 1].cpu()


def _lanes(ids: Tensor, streams: int) -> Tensor:
    """(streams, length + 1): each lane begins with the last word of the lane before it; -1 where the text has ended."""
    length = -(-(len(ids) - 1) // streams)
    return F.pad(ids, (0, streams * length + 1 - len(ids)), value=-1).unfold(0, length + 1, length)


@contextlib.contextmanager
def _evaluating(model: WordLSTM) -> Iterator[None]:
    was = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was)


@dataclass(frozen=True)
class Score:
    """Of one text: the predictions and their perplexity in all and by training frequency of the word predicted."""

    words: int
    perplexity: float
    bucket_words: dict[str, int]
    bucket_perplexity: dict[str, float | None]

    def as_metrics(self, prefix: str) -> dict[str, float]:
        """Flat, for the log; a bucket without words has no entry."""
        metrics = {f"{prefix}_perplexity": self.perplexity}
        for name, value in self.bucket_perplexity.items():
            if value is not None:
                metrics[f"{prefix}_perplexity_{name}"] = value
        return metrics


def score(losses: Tensor, targets: Tensor, counts: Tensor) -> Score:
    """Perplexity is exp of the mean loss. `counts` are the training occurrences of every word."""
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


def perplexity(mean_loss: float) -> float:
    """exp, with infinity where that is more than a number can hold."""
    return math.exp(mean_loss) if mean_loss < 700 else math.inf


def text_of(corpus: Corpus, split: str) -> Tensor:
    """A split with something to predict."""
    ids = corpus.splits[split]
    if len(ids) < 2:
        raise LabError(
            f"the {split} text of {corpus.path} has {len(ids)} words, so nothing can be predicted: prepare it again"
        )
    return ids


def measure(
    model: WordLSTM,
    corpus: Corpus,
    split: str,
    *,
    streams: int = 1,
    first: int = 0,
    seen: Callable[[int], object] | None = None,
) -> tuple[Score, dict[str, Any]]:
    """The score of a split, and the arrays to keep: the loss and the id of every word predicted.

    With `first` only so many predictions are made, from the beginning.
    """
    ids = text_of(corpus, split)
    ids = ids[: first + 1] if first else ids
    losses = word_losses(model, ids, streams=min(streams, len(ids) - 1), seen=seen)
    targets = ids[1:]
    return score(losses, targets, corpus.counts), {"nll": losses.numpy(), "ids": targets.numpy()}
