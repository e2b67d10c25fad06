"""The two sets of interactions, and how they are divided into what is trained on and what is asked.

Leave-one-out, as in the literature: the last item of each user is the test, the one before it the validation, and what
comes before is the training. Times of different users are not compared, so the test of one user may be older than the
training of another.

By time: the first interactions of all users are the training; later ones come in periods. Each period is predicted
first and then learned from, as in use. No later interaction is known before, and no item that is first seen later.
"""

from __future__ import annotations

import lzma
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Items = NDArray[np.int64]
"""Items in the order of time; in general those of one user."""

TRAINING, VALIDATION = 0.4, 0.2
"""The shares of all interactions that the split by time trains on and chooses by; the others are the test."""
PERIOD = 1000
"""About how many interactions of the split by time come between two updates of a model."""


class Event(NamedTuple):
    """One interaction."""

    user: int
    item: int
    time: int


class Lesson(NamedTuple):
    """What a model may learn from after a period: the items of a user so far, of which the last ``fresh`` are new."""

    user: int
    history: Items
    fresh: int


class Period(NamedTuple):
    """Questions that are asked of one state of a model, and what it may learn from afterwards."""

    split: str
    """``valid`` or ``test``."""
    histories: list[Items]
    """What the user of each question took before, at least one item."""
    targets: Items
    """What that user took next."""
    seen: Items
    """How often the target of each question was in what was learned from so far."""
    lessons: list[Lesson]
    items: int
    """The number of items that have been seen when the period is over."""


class Split(NamedTuple):
    """The whole course: training, and then one period after the other."""

    train: list[Lesson]
    items: int
    """The size of the catalogue in training."""
    periods: list[Period]


def read_lines(path: Path) -> list[str]:
    """Return the lines of a text file, which may be compressed (.xz)."""
    content = path.read_bytes()
    return (lzma.decompress(content) if path.suffix == ".xz" else content).decode("utf-8").splitlines()


def read_sequences(path: Path) -> list[Items]:
    """Return the items of each user, in the order of time.

    A line has a user and the user's items in that order, with spaces between; items are numbered as they first occur.
    Or a line is one interaction, as in :func:`read_events`.
    """
    lines = read_lines(path)
    if any("\t" in line for line in lines[:2]):
        return sequences_of(read_events(path))
    numbers: dict[str, int] = {}
    found = []
    for line in lines:
        _, *items = line.split()
        found.append(np.array([numbers.setdefault(item, len(numbers)) for item in items], dtype=np.int64))
    return found


def read_events(path: Path) -> list[Event]:
    """Return the interactions, oldest first, from tab-separated lines after a header: user, item, anything, and time.

    Users and items are numbered as they are first seen. Interactions of the same second stay in the order of the file.
    """
    users: dict[str, int] = {}
    items: dict[str, int] = {}
    try:
        timed = [
            (float(time), user, item) for user, item, *_, time in (line.split("\t") for line in read_lines(path)[1:])
        ]
    except ValueError:
        raise ValueError(f"{path} must have a user, an item and last a time in each line, with tabs between") from None
    timed.sort(key=lambda each: each[0])
    return [
        Event(users.setdefault(user, len(users)), items.setdefault(item, len(items)), int(time))
        for time, user, item in timed
    ]


def sequences_of(events: Sequence[Event]) -> list[Items]:
    """Return the items of each user, in the order of time."""
    found: dict[int, list[int]] = {}
    for event in events:
        found.setdefault(event.user, []).append(event.item)
    return [np.array(items, dtype=np.int64) for items in found.values()]


def leave_one_out(sequences: Sequence[Items]) -> Split:
    """Return the split by position: for each user the last item is the test and the one before it the validation.

    The catalogue has all items from the start. A model learns nothing after training, and answers the test with the
    item of the validation in the history. Users with fewer than three items are never asked.
    """
    asked = [items for items in sequences if len(items) >= 3]
    kept = [items[:-2] if len(items) >= 3 else items for items in sequences]
    train = [Lesson(user, items, len(items)) for user, items in enumerate(kept)]
    catalogue = 1 + max(int(items.max()) for items in sequences)
    counts = np.bincount(np.concatenate(kept), minlength=catalogue)
    periods = []
    for split, last in (("valid", -2), ("test", -1)):
        targets = np.array([items[last] for items in asked], dtype=np.int64)
        periods.append(Period(split, [items[:last] for items in asked], targets, counts[targets], [], catalogue))
    return Split(train, catalogue, periods)


def by_time(
    events: Sequence[Event], training: float = TRAINING, validation: float = VALIDATION, period: int = PERIOD
) -> Split:
    """Return the split by time of events that are in order and whose items are numbered as they are first seen.

    Interactions of the same second are never divided. What a user takes first is learned from and not asked.
    """
    ends = _ends(events, training, validation, period)
    (_, start), *later = ends
    histories: dict[int, list[int]] = {}
    train = _learn(events[:start], histories)
    counts = np.zeros(1 + max(event.item for event in events), dtype=np.int64)
    known = _count(events[:start], counts, 0)
    catalogue, periods = known, []
    for split, end in later:
        some = events[start:end]
        before, targets = [], []
        so_far = {user: list(histories[user]) for user in {event.user for event in some} & histories.keys()}
        for event in some:
            history = so_far.setdefault(event.user, [])
            if history:
                before.append(np.array(history, dtype=np.int64))
                targets.append(event.item)
            history.append(event.item)
        asked = np.array(targets, dtype=np.int64)
        seen = counts[asked]
        lessons = _learn(some, histories)
        known = _count(some, counts, known)
        periods.append(Period(split, before, asked, seen, lessons, known))
        start = end
    return Split(train, catalogue, periods)


def _ends(events: Sequence[Event], training: float, validation: float, period: int) -> list[tuple[str, int]]:
    """Return the name of each part and the number of events up to its end; seconds are not divided."""
    total = len(events)
    wanted = [("train", int(total * training))]
    for split, share in (("valid", training + validation), ("test", 1.0)):
        first, last = wanted[-1][1], round(total * share)
        parts = max(1, round((last - first) / period))
        wanted += [(split, first + (last - first) * (part + 1) // parts) for part in range(parts)]
    found: list[tuple[str, int]] = []
    for split, end in wanted:
        while 0 < end < total and events[end].time == events[end - 1].time:
            end += 1
        if end > (found[-1][1] if found else 0):
            found.append((split, end))
    if {split for split, _ in found} != {"train", "valid", "test"}:
        raise ValueError(f"{total} interactions are too few for training, validation and test")
    return found


def _learn(events: Sequence[Event], histories: dict[int, list[int]]) -> list[Lesson]:
    """Append events to the histories, and return what each of their users has taken by then."""
    fresh: dict[int, int] = {}
    for event in events:
        histories.setdefault(event.user, []).append(event.item)
        fresh[event.user] = fresh.get(event.user, 0) + 1
    return [Lesson(user, np.array(histories[user], dtype=np.int64), count) for user, count in fresh.items()]


def _count(events: Sequence[Event], counts: Items, known: int) -> int:
    """Count the items of events, and return how many items have been seen by then."""
    for event in events:
        counts[event.item] += 1
    return max(known, 1 + max(event.item for event in events))
