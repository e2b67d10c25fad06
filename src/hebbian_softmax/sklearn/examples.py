"""A bounded store of examples."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]


class Examples:
    """At most ``size`` examples of numbered classes. When it is full, the class that has the most of them gives one up.

    Which one is random. A class that is the largest keeps its i-th example with the probability (its places) / i, as in
    reservoir sampling, so that its old and its recent examples are equally likely to be in the store.
    """

    def __init__(self, features: int, dtype: np.dtype[Any], size: int) -> None:
        self.size = size
        self.stored = 0
        self.x: NDArray[Any] = np.zeros((0, features), dtype)
        """Room for examples; the first ``stored`` rows are in use."""
        self.places: list[list[int]] = []
        """The rows of ``x`` that each class has."""
        self.held: Integers = np.zeros(0, dtype=np.int64)
        """How many rows each class has."""
        self.seen: Integers = np.zeros(0, dtype=np.int64)
        """How many examples of each class have come so far, kept or not."""

    def add_classes(self, n: int) -> None:
        """Append classes without examples."""
        self.places += [[] for _ in range(n)]
        self.held, self.seen = (np.concatenate([each, np.zeros(n, np.int64)]) for each in (self.held, self.seen))

    def store(self, x: NDArray[Any], classes: Integers, random: np.random.RandomState) -> None:
        """Store examples (N, features) of ``classes`` (N,), as far as there is room."""
        needed = min(self.stored + len(x), self.size)
        if needed > len(self.x):
            room = min(max(needed, 2 * len(self.x)), self.size)
            self.x = np.concatenate([self.x, np.zeros((room - len(self.x), self.x.shape[1]), self.x.dtype)])
        for row, each in zip(x, classes.tolist(), strict=True):
            self.seen[each] += 1
            place = self._place(each, random)
            if place is not None:
                self.x[place] = row

    def _place(self, new: int, random: np.random.RandomState) -> int | None:
        """Return the place for an example of the class ``new``, or None if it is not kept."""
        own = self.places[new]
        if self.stored < self.size:
            own.append(self.stored)
            self.stored += 1
        else:
            largest = int(self.held.argmax())
            if self.held[largest] <= len(own) + 1:  # the class would be the largest
                kept = random.randint(self.seen[new])
                return own[kept] if kept < len(own) else None
            own.append(self.places[largest].pop(random.randint(self.held[largest])))
            self.held[largest] -= 1
        self.held[new] += 1
        return own[-1]

    def draw(self, n: int, random: np.random.RandomState) -> tuple[NDArray[Any], Integers]:
        """Return ``n`` examples and their classes: first a class is drawn, each as likely, then an example of it."""
        stored = np.flatnonzero(self.held)
        classes = stored[random.randint(len(stored), size=n)]
        which = (random.random_sample(n) * self.held[classes]).astype(np.int64)
        places = [self.places[each][i] for each, i in zip(classes.tolist(), which.tolist(), strict=True)]
        return self.x[places], classes
