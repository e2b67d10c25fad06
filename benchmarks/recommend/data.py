"""The two sets of interactions, and how they are divided into what is trained on and what is asked.

Leave-one-out, as in the literature: the last item of each user is the test, the one before it the validation, and what
comes before is the training. Times of different users are not compared, so the test of one user may be older than the
training of another.

By time: the first interactions of all users are the training; later ones come in periods. Each period is predicted
first and then learned from, as in use. No later interaction is known before, and no item that is first seen later.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Items = NDArray[np.int64]
"""Items in the order of time; in general those of one user."""

TRAINING, VALIDATION = 0.4, 0.2
"""The shares of all interactions that the split by time trains on and chooses by; the others are the test."""
PERIOD = 1000
"""About how many interactions of the split by time come between two updates of a model."""
LAST_ITEM = "the last item of each user"
BY_TIME = f"by time, training {TRAINING:g}, validation {VALIDATION:g}, periods of {PERIOD}"
"""How the two splits ask, with all that decides what is asked: results of different ones are not compared."""


class Event(NamedTuple):
    """One interaction."""

    user: int
    item: int
    time: float
    """In seconds, or in what the file has."""


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
    if not asked:
        raise ValueError("no user has three items, which asking for the last one needs: give more of each user")
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

    Interactions of the same time are never divided. What a user takes first is learned from and not asked.
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
    """Return the name of each part and the number of events up to its end; those of one time are not divided."""
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
        moments = len({event.time for event in events})
        advice = ", or give --split last, which needs no times" if moments < 3 <= total else ""
        raise ValueError(
            f"{total} interactions are too few for training, validation and test, where those of one time are not "
            f"divided (the number of different times is {moments}): give more{advice}"
        )
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


def check(split: Split) -> None:
    """Raise ValueError where nothing can be learned in training, or nothing is asked in the validation or the test."""
    if all(len(lesson.history) < 2 for lesson in split.train):
        raise ValueError(
            "no user has two items in the training, so no next item can be learned: give more of each user"
        )
    for name, title in (("valid", "validation"), ("test", "test")):
        if not any(len(period.targets) for period in split.periods if period.split == name):
            raise ValueError(f"nobody takes an item in the {title} after another one: give more of each user")
