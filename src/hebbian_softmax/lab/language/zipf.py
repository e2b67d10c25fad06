"""A made-up corpus of any size, for measuring speed and for trying things out without any text."""

import hashlib
from pathlib import Path

import torch
from torch import Tensor

from hebbian_softmax.lab.base.seeds import derive_seed
from hebbian_softmax.lab.data.corpus import Corpus

FOLLOWS = 0.5  # share of the words that are determined by the word before them
SHIFT = 2.7  # Mandelbrot's correction: the most frequent words are a little rarer than Zipf's law says
LANES = 1024  # parts of the text that are drawn side by side
HELD_OUT = 20  # the validation and the test text are each one part in this many of the training text's length


def zipf_corpus(vocabulary: int, tokens: int) -> Corpus:
    """Return a corpus whose word frequencies follow Zipf's law; half of its words are determined by the word before.

    The same sizes always give the same corpus. Each word has one successor, which is drawn from the law, too, so that a
    model has something to learn: a perfect model knows every second word.
    """
    draws = torch.Generator().manual_seed(derive_seed(0, "zipf", vocabulary, tokens))
    held = max(100, tokens // HELD_OUT)
    cumulative = (1 / (torch.arange(vocabulary, dtype=torch.float64) + SHIFT)).cumsum(0)
    successor = _draw(cumulative, vocabulary, draws)
    total = tokens + 2 * held
    length = -(-total // LANES)
    text = torch.empty(LANES, length, dtype=torch.int64)
    now = _draw(cumulative, LANES, draws)
    for place in range(length):
        follows = torch.rand(LANES, generator=draws) < FOLLOWS
        now = torch.where(follows, successor[now], _draw(cumulative, LANES, draws))
        text[:, place] = now
    ids = text.flatten()[:total]
    counts = torch.bincount(ids[:tokens], minlength=vocabulary)
    order = counts.argsort(descending=True, stable=True)
    rank = torch.empty_like(order)
    rank[order] = torch.arange(vocabulary)
    ids = rank[ids].int()
    identity = hashlib.sha256(f"{vocabulary} {tokens} ".encode() + ids.numpy().tobytes())
    return Corpus(
        name="zipf",
        path=Path("zipf"),
        words=[f"w{number}" for number in range(vocabulary)],
        counts=counts[order],
        splits={"train": ids[:tokens], "valid": ids[tokens : tokens + held], "test": ids[tokens + held :]},
        fingerprint=identity.hexdigest()[:16],
        manifest={"settings": {"vocabulary": vocabulary, "tokens": tokens}},
    )


def _draw(cumulative: Tensor, count: int, draws: torch.Generator) -> Tensor:
    """Draw indices; `cumulative` is the running sum of their probabilities, up to a factor."""
    places = torch.rand(count, generator=draws, dtype=torch.float64) * cumulative[-1]
    return torch.searchsorted(cumulative, places).clamp(max=len(cumulative) - 1)
