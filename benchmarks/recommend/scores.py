"""NDCG@10 and hit rate@10 over all items, and for items that were seen seldom."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from benchmarks.recommend.data import Items, Period

BEST = 10
"""How many items are recommended."""

Scores = dict[str, dict[str, float | int | None]]
"""For each group of questions: ``questions``, ``ndcg`` and ``hit_rate``; None where there is no question."""


def gains(recommended: Items, targets: Items) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Return the NDCG and whether the target was hit, for each question.

    With a single relevant item the ideal gain is 1, so the NDCG is 1 / log2(place + 1), the best place being 1.
    """
    places = recommended == targets[:, None]
    discounts = 1 / np.log2(np.arange(recommended.shape[1]) + 2)
    return (places * discounts).sum(1), places.any(1)


class Tally:
    """The gains of one split, period by period, by how often the target was seen before.

    The groups ``all``, ``<10``, ``<5`` and ``cold`` (never seen) contain each other. ``new`` are items that were not in
    training and have been seen since.
    """

    def __init__(self, trained_items: int) -> None:
        self._trained_items = trained_items
        self._found: list[tuple[NDArray[np.float64], NDArray[np.bool_], Items, Items]] = []

    def add(self, recommended: Items, period: Period) -> None:
        """Take in what was recommended, (questions, 10)."""
        self._found.append((*gains(recommended, period.targets), period.seen, period.targets))

    def scores(self) -> Scores:
        """Return the means of all questions so far."""
        ndcg, hits, seen, targets = (np.concatenate(each) for each in zip(*self._found, strict=True))
        groups = {
            "all": seen >= 0,
            "<10": seen < 10,
            "<5": seen < 5,
            "cold": seen == 0,
            "new": (targets >= self._trained_items) & (seen > 0),
        }
        found: Scores = {}
        for name, group in groups.items():
            some = bool(group.any())
            found[name] = {
                "questions": int(group.sum()),
                "ndcg": float(ndcg[group].mean()) if some else None,
                "hit_rate": float(hits[group].mean()) if some else None,
            }
        return found
