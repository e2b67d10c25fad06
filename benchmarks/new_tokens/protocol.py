"""The protocol: which tokens lose their rows, what the head is shown, and how it is judged."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.new_tokens.features import Features
from hebbian_softmax import HebbianSoftmax, NewClasses
from hebbian_softmax.calibration import Calibration

STREAM = 0.7
"""The share of the positions that rows are written from; the others are for judging."""
JUDGED = 18_000
"""Positions that test tokens are judged by; the rest are for choosing settings."""
RAREST, MOST_FREQUENT = 1, 64
BUCKETS = {
    "1": (1, 1),
    "2-3": (2, 3),
    "4-7": (4, 7),
    "8-15": (8, 15),
    "16-64": (16, 64),
    "65 or more": (65, 2**62),
}
LIMIT = 1000
CALIBRATED = 20_000
"""Positions of the stream that the head looks at to know their logits."""


@dataclass
class Split:
    """Tokens that lose their rows, and everything about the others that the comparisons need."""

    features: Features
    new: Tensor
    """The tokens that lose their rows, ascending."""
    judged: slice
    """The positions by which rows are judged."""
    old_log_z: Tensor
    """The log normaliser of the kept rows at each position."""
    stream: slice
    """The positions that rows are written from, which come first."""
    labels: Tensor = field(init=False)
    """The class of each target in a head whose classes are the kept tokens and then the new ones."""
    kept: nn.Linear = field(init=False)
    calibration: Calibration = field(init=False)

    def __post_init__(self) -> None:
        h, targets, rows = self.features
        is_new = torch.zeros(len(rows), dtype=torch.bool).index_fill(0, self.new, True)
        class_of = torch.empty(len(rows), dtype=torch.int64)
        class_of[~is_new] = torch.arange(int((~is_new).sum()))
        class_of[self.new] = torch.arange(len(self.new)) + int((~is_new).sum())
        self.labels = class_of[targets]
        self.kept = nn.Linear(rows.shape[1], int((~is_new).sum()), bias=False, dtype=rows.dtype)
        self.kept.weight = nn.Parameter(rows[~is_new])
        self.counts = torch.bincount(self.labels[self.stream], minlength=len(rows))[self.kept.out_features :]
        head = self.head(NewClasses())
        head.calibrate(h[:CALIBRATED])
        assert head.calibration is not None
        self.calibration = head.calibration

    def head(self, settings: NewClasses, bias: bool = False) -> HebbianSoftmax:
        """Return a head with the kept rows, and a bias of zeros if asked for."""
        linear = nn.Linear(self.kept.in_features, self.kept.out_features, bias=bias)
        linear.weight = nn.Parameter(self.kept.weight.detach().clone())
        if bias:
            nn.init.zeros_(linear.bias)
        return HebbianSoftmax.from_linear(linear, limit=LIMIT, new_classes=settings)

    def written(self, settings: NewClasses, bias: bool) -> tuple[Tensor, Tensor]:
        """Return the rows and biases of the new tokens after the stream was memorised once."""
        head = self.head(settings, bias)
        head.calibration = self.known()  # which is the same for each head
        head.add_classes(len(self.new))
        head.memorize(self.features.h[self.stream], self.labels[self.stream])
        first = self.kept.out_features
        rows = head.weight[first:].detach()
        return rows, rows.new_zeros(len(rows)) if head.bias is None else head.bias[first:].detach()

    def known(self) -> Calibration:
        """Return a copy of what a head knows that was calibrated."""
        return copy.deepcopy(self.calibration)

    def judge(self, rows: Tensor, bias: Tensor) -> dict[str, float]:
        """Return perplexities over all positions and over kept targets, and the nats of new targets by their count."""
        first, labels = self.kept.out_features, self.labels[self.judged]
        parts = []
        for h, label, old, target in zip(
            *(each[self.judged].split(2048) for each in (self.features.h, self.labels, self.old_log_z)),
            self.features.targets[self.judged].split(2048),
            strict=True,
        ):
            logits = F.linear(h, rows, bias)
            own = (h * self.features.rows[target]).sum(1)
            is_new = label >= first
            own[is_new] = logits[is_new].gather(1, (label[is_new] - first).unsqueeze(1)).squeeze(1)
            parts.append(torch.logaddexp(logits.logsumexp(1), old) - own)
        loss = torch.cat(parts).double()
        is_new = labels >= first
        count = torch.zeros_like(labels)
        count[is_new] = self.counts[labels[is_new] - first]
        found = {
            "perplexity": math.exp(min(50.0, float(loss.mean()))),
            "perplexity of kept tokens": math.exp(min(50.0, float(loss[~is_new].mean()))),
            "nats of new tokens": float(loss[is_new].mean()),
        }
        for name, (low, high) in BUCKETS.items():
            mine = loss[is_new & (count >= low) & (count <= high)]
            if len(mine) > 0:
                found[f"nats, seen {name}"] = float(mine.mean())
        return found

    def trained_rows(self) -> Tensor:
        """Return the rows that the new tokens had."""
        return self.features.rows[self.new]

    def adam(
        self, rows: Tensor, bias: Tensor, lr: float, epochs: int, gradients_from: int = 0
    ) -> list[dict[str, float]]:
        """Train the rows of the new tokens by Adam, and judge them after each epoch; other rows and biases stay.

        Rows of tokens that were seen fewer times than ``gradients_from`` stay, too.
        """
        first, weight = self.kept.out_features, nn.Parameter(rows.clone())
        optimizer = torch.optim.Adam([weight], lr=lr)
        moves = (self.counts >= gradients_from).to(rows.dtype).unsqueeze(1)
        weight.register_hook(lambda grad: grad * moves)
        generator = torch.Generator().manual_seed(0)
        found = []
        for _ in range(epochs):
            for batch in torch.randperm(self.stream.stop, generator=generator).split(512):
                label = self.labels[batch]
                logits = F.linear(self.features.h[batch], weight, bias)
                log_z = torch.logaddexp(logits.logsumexp(1), self.old_log_z[batch])
                is_new = label >= first  # the logits of kept tokens do not change
                own = logits[is_new].gather(1, (label[is_new] - first).unsqueeze(1))
                loss = (log_z.sum() - own.sum()) / len(batch)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            found.append(self.judge(weight.detach(), bias))
        return found


def drawn_tokens(targets: Tensor, tokens: int, seeds: int) -> tuple[Tensor, list[Tensor]]:
    """Return the tokens for choosing settings, and for each seed other tokens that lose their rows.

    All are among the tokens that occur 1 to 64 times in the stream; a quarter of these are for choosing.
    """
    counts = torch.bincount(targets[: int(len(targets) * STREAM)], minlength=tokens)
    rare = ((counts >= RAREST) & (counts <= MOST_FREQUENT)).nonzero().squeeze(1)
    order = rare[torch.randperm(len(rare), generator=torch.Generator().manual_seed(0))]
    chosen, rest = order[: len(rare) // 4], order[len(rare) // 4 :]
    drawn = [rest[torch.randperm(len(rest), generator=torch.Generator().manual_seed(1 + i))] for i in range(seeds)]
    return chosen.sort().values, [each[: len(rare) // 2].sort().values for each in drawn]


def prepare(features: Features, seeds: int, file: Path) -> list[Callable[[], Split]]:
    """Return functions that make the split by which settings are chosen, and those whose results are reported.

    The log normalisers take minutes; they are kept in ``file``.
    """
    chosen, drawn = drawn_tokens(features.targets, len(features.rows), seeds)
    if not file.exists():
        torch.save(log_normalisers(features, [chosen, *drawn]), file)
    log_z = torch.load(file, weights_only=True)
    start = int(len(features.targets) * STREAM)
    judged, rest = slice(start, start + JUDGED), slice(start + JUDGED, len(features.targets))
    tests = [partial(Split, features, new, judged, log_z[1 + i], slice(start)) for i, new in enumerate(drawn)]
    return [partial(Split, features, chosen, rest, log_z[0], slice(start)), *tests]


@torch.no_grad()
def log_normalisers(features: Features, sets: list[Tensor]) -> list[Tensor]:
    """Return the log normaliser at each position without the rows of each set, in one pass over all rows.

    Tokens that are in the same sets form a group, whose rows are multiplied once.
    """
    inside = torch.stack([torch.zeros(len(features.rows)).index_fill(0, each, 1) for each in sets]).bool()
    member = (inside * 2 ** torch.arange(len(sets)).unsqueeze(1)).sum(0)
    order = member.argsort(stable=True)
    groups, sizes = member[order].unique_consecutive(return_counts=True)
    rows, found = features.rows[order], []
    for h in features.h.split(512):
        parts = torch.stack([each.logsumexp(1) for each in (h @ rows.T).split(sizes.tolist(), 1)], 1)
        found.append(torch.stack([parts[:, (groups >> i) % 2 == 0].logsumexp(1) for i in range(len(sets))]))
    return list(torch.cat(found, 1))
