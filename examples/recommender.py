"""A recommender whose catalogue grows: which item will a user take next, of all items, while new ones keep arriving?

A small Transformer reads what a user took so far (as SASRec does; Kang and McAuley, 2018), and a softmax over all items
says what comes next. The first half of the interactions is for training. The other half arrives in ten parts, in the
order of time: each is predicted first and then learned from. New items become new classes of the same head.

    python examples/recommender.py                            # invented interactions, about a minute
    python examples/recommender.py movielens-100k.inter.xz    # a header, then user, item, rating and time in each line
    python examples/recommender.py --plain                    # the same without the rule
    python examples/recommender.py --quick                    # only to see that it runs

It prints for each part how often the next item is among the ten that are recommended, and how often it would be among
the ten most popular ones.
"""

from __future__ import annotations

import argparse
import lzma
import math
import random
import sys
from collections import Counter
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hebbian_softmax import HebbianSoftmax, OnePassAdam, linear_topk

IGNORED = -100
LEAST = 100
"""How many interactions there must be for a half that can be learned and ten parts that can be asked."""
History = Any
"""The items of one user in the order of time, as a list or an array."""


class Recommender(nn.Module):
    """A Transformer over the last ``length`` items of a user, with one matrix for the items it reads and predicts.

    ``rule`` are options of :class:`HebbianSoftmax`; without ``memorizing`` the head is a plain softmax.
    """

    def __init__(
        self,
        items: int,
        *,
        features: int = 64,
        layers: int = 2,
        length: int = 50,
        dropout: float = 0.2,
        memorizing: bool = True,
        **rule: Any,
    ) -> None:
        super().__init__()
        self.length = length
        self.head = HebbianSoftmax(features, items, **rule)
        self.head.memorizing = memorizing
        self.items = nn.Embedding(items, features)
        self.items.weight = self.head.weight
        self.positions = nn.Parameter(torch.randn(length, features) / math.sqrt(features))
        self.dropout = nn.Dropout(dropout)
        layer = nn.TransformerEncoderLayer(features, 2, 4 * features, dropout, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, nn.LayerNorm(features), enable_nested_tensor=False)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return features (batch, time, features) of items (batch, time); each knows the items up to its own.

        So what fills up short rows at their end is read by nothing that counts.
        """
        time = inputs.shape[1]
        x = self.items(inputs) * math.sqrt(self.items.embedding_dim) + self.positions[:time]
        mask = nn.Transformer.generate_square_subsequent_mask(time, device=inputs.device)
        found: Tensor = self.layers(self.dropout(x), mask=mask, is_causal=True)
        return found

    @torch.no_grad()
    def recommend(self, histories: Sequence[History], k: int = 10, batch: int = 256) -> Tensor:
        """Return the k likeliest next items of each user, best first, without those of the history: (users, k).

        Where fewer than k items are left, -1 follows them. Items that are not in the catalogue yet are passed over; for
        a user without any other, nothing can be said.
        """
        self.eval()
        found = torch.full((len(histories), k), -1)
        known = [each[each < self.head.num_classes] for each in map(torch.as_tensor, histories)]
        order = sorted((user for user, each in enumerate(known) if len(each)), key=lambda user: len(known[user]))
        for users in (order[start : start + batch] for start in range(0, len(order), batch)):
            some = [known[user] for user in users]
            recent = [each[-self.length :] for each in some]
            inputs = nn.utils.rnn.pad_sequence(recent, batch_first=True).to(self.positions.device)
            h = self(inputs)[range(len(users)), [len(each) - 1 for each in recent]]
            found[users] = best_unseen(h, self.head.weight, some, k).cpu()
        return found


def best_unseen(h: Tensor, weight: Tensor, histories: Sequence[Tensor], k: int) -> Tensor:
    """Return the k items (N, k) with the largest logits of each feature, without its history; -1 where none is left.

    Of the k + m best items, at most m are in a history of m items, so this is the exact ranking.
    """
    items = weight.shape[0]
    _, best = linear_topk(h, weight, min(items, k + max(len(history) for history in histories)))
    keys = torch.cat([history + row * items for row, history in enumerate(histories)])  # one for each pair
    rows = torch.arange(len(histories), device=h.device).unsqueeze(1)
    seen = torch.isin(best + rows * items, keys.to(h.device))
    kept = seen.to(torch.uint8).argsort(dim=1, stable=True)[:, :k]  # unseen items first, in their order
    found = best.gather(1, kept).masked_fill(seen.gather(1, kept), -1)
    return nn.functional.pad(found, (0, k - found.shape[1]), value=-1)


def windows(histories: Sequence[History], fresh: Sequence[int], length: int) -> tuple[Tensor, Tensor]:
    """Return inputs and targets (windows, length) that have the last ``fresh`` items of each history as targets, once.

    Rows are filled up with item 0 and with ignored targets. The first item of a history has nothing before it.
    """
    rows = []
    for history, wanted in zip(histories, fresh, strict=True):
        left, end = min(wanted, len(history) - 1), len(history)
        while left > 0:
            rows.append((history[max(0, end - length - 1) : end], min(left, length)))
            left, end = left - length, end - length
    inputs = torch.zeros(len(rows), length, dtype=torch.int64)
    targets = torch.full_like(inputs, IGNORED)
    for row, (items, count) in enumerate(rows):
        end = len(items) - 1
        inputs[row, :end] = torch.as_tensor(items[:-1])
        targets[row, end - count : end] = torch.as_tensor(items[-count:])
    return inputs, targets


def train_once(
    model: Recommender,
    optimizer: OnePassAdam,
    inputs: Tensor,
    targets: Tensor,
    batch: int,
    schedule: torch.optim.lr_scheduler.LRScheduler | None = None,
) -> None:
    """Train with each window once, in random order."""
    model.train()
    device = model.positions.device
    for rows in torch.randperm(len(inputs)).split(batch) if len(inputs) else ():
        time = 1 + int((targets[rows] != IGNORED).any(0).nonzero().max())  # that of the longest row
        some = targets[rows, :time].flatten()
        at = (some != IGNORED).nonzero().squeeze(1)
        h = model(inputs[rows, :time].to(device)).flatten(0, 1).index_select(0, at.to(device))
        model.head.loss(h, some[at].to(device)).backward()
        optimizer.step()
        optimizer.zero_grad()
        if schedule is not None:
            schedule.step()


def invented(events: int = 12_000, users: int = 300) -> list[tuple[int, int]]:
    """Return pairs of user and item in the order of time. Users stay with groups of ten items; the catalogue grows."""
    chance = random.Random(0)
    found: dict[tuple[int, int], None] = {}  # no user takes an item twice
    last = [0] * users
    while len(found) < events:
        known, user = 200 + 400 * len(found) // events, chance.randrange(users)
        group = last[user] // 10 * 10
        item = chance.randrange(group, group + 10) if chance.random() < 0.8 else chance.randrange(known)
        if item < known and (user, item) not in found:
            found[user, item] = None
            last[user] = item
    return list(found)


def read(path: Path) -> list[tuple[str, str]]:
    """Return pairs of user and item in the order of time."""
    try:
        with (lzma.open if path.suffix == ".xz" else open)(path, "rt", encoding="utf-8") as file:
            rows = [line.rstrip("\n").split("\t") for line in file][1:]
        timed = [(float(time), user, item) for user, item, _, time in rows]
    except OSError as error:
        raise SystemExit(f"{path} cannot be read ({error.strerror or error}); give another file") from None
    except (UnicodeDecodeError, lzma.LZMAError, EOFError) as error:
        raise SystemExit(f"{path} is no text in UTF-8 ({error}); give another file") from None
    except ValueError:
        raise SystemExit(f"{path} must have user, item, rating and time, with tabs between, after a header") from None
    if len(timed) < LEAST:
        raise SystemExit(f"{path} has only {len(timed)} interactions, and at least {LEAST} are needed; give more")
    return [(user, item) for _, user, item in sorted(timed, key=lambda each: each[0])]


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError
    return number


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("interactions", type=Path, nargs="?", help="a file; without it they are invented")
    parser.add_argument("--plain", action="store_true", help="a plain softmax, without the rule")
    parser.add_argument("--epochs", type=positive, default=20, help="passes over the first half (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="few interactions and one pass, to see that it runs")
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    pairs: Sequence[tuple[object, object]] = read(options.interactions) if options.interactions else invented()
    if options.quick:
        pairs, options.epochs = pairs[:1500], 1
    numbers: dict[object, int] = {}  # items are numbered as they are first seen
    events = [(user, numbers.setdefault(item, len(numbers))) for user, item in pairs]
    histories: dict[object, list[int]] = {}
    half = len(events) // 2
    for user, item in events[:half]:
        histories.setdefault(user, []).append(item)

    model = Recommender(1 + max(item for _, item in events[:half]), memorizing=not options.plain)
    optimizer = OnePassAdam(model.parameters(), lr=2e-3, head=model.head)
    lessons = windows(list(histories.values()), [len(each) for each in histories.values()], model.length)
    for epoch in range(options.epochs):
        train_once(model, optimizer, *lessons, batch=64)
        print(f"\rpass {epoch + 1} of {options.epochs} over the first half", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)

    for group in optimizer.param_groups:
        group["lr"] /= 4
    hits_of_all, popular_hits_of_all = [], []
    print("interactions  catalogue  hit rate@10  most popular items")
    for part in range(10):
        start, end = (half + (len(events) - half) * each // 10 for each in (part, part + 1))
        fresh: dict[object, int] = {}
        before, targets = [], []
        popular = Counter(item for _, item in events[:start]).most_common()
        for user, item in events[start:end]:
            if user in histories:  # what a user takes first cannot be predicted from anything
                before.append(list(histories[user]))
                targets.append(item)
            histories.setdefault(user, []).append(item)
            fresh[user] = fresh.get(user, 0) + 1
        hits = (model.recommend(before) == torch.tensor(targets).unsqueeze(1)).any(1).tolist()
        popular_hits = [
            item in list(islice((each for each, _ in popular if each not in history), 10))
            for history, item in zip(map(set, before), targets, strict=True)
        ]
        print(f"{start:6}-{end:<6} {model.head.num_classes:8}  {share(hits):10.1f} %  {share(popular_hits):17.1f} %")
        hits_of_all += hits
        popular_hits_of_all += popular_hits
        arrived = 1 + max(item for _, item in events[:end]) - model.head.num_classes
        if arrived:
            model.head.add_classes(arrived)  # the matrix, the tied embedding and the optimizer's state grow
        lessons = windows([histories[user] for user in fresh], list(fresh.values()), model.length)
        train_once(model, optimizer, *lessons, batch=16)
    kind = "plain softmax" if options.plain else "rule"
    print(
        f"\nOf {len(hits_of_all):,} items that users took next, the network with the {kind} had "
        f"{share(hits_of_all):.1f} % among its ten;\n"
        f"the most popular items would have been right in {share(popular_hits_of_all):.1f} %. "
        f"In the first half there were {1 + max(item for _, item in events[:half])} items, at the end {len(numbers)}."
    )
    if options.quick:
        print("This was a quick run to see that it works: after one pass over little data the numbers mean nothing.")


def share(hits: Sequence[bool]) -> float:
    """Return how many are true, in per cent."""
    return 100 * sum(hits) / max(1, len(hits))


if __name__ == "__main__":
    main()
