"""How far examples lie from the mean of their class, and the means of the classes from each other."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from hebbian_softmax.sklearn.examples import Integers

Floats = NDArray[np.float64]


class ClassSpread:
    r"""The sum of the examples of each class and, from these sums, two variances; one batch is taken in at a time.

    An example is seen as the mean of its class plus a deviation. :math:`\Sigma_w` is the covariance of the deviations
    and :math:`\Sigma_b` that of the class means, both the same for all classes; only their traces are kept. Sums are in
    float64 and relative to the mean of the first batch, so that a large common part of all examples costs no precision.
    """

    def __init__(self, features: int) -> None:
        self.counts: Integers = np.zeros(0, dtype=np.int64)
        self.examples = 0
        self.classes = 0
        """The number of classes that have an example."""
        self._sums: Floats = np.zeros((0, features))  # with room for further classes
        self._origin: Floats = np.zeros(features)
        # Sums over all classes, of: the mean, ‖mean‖², n ‖mean‖², 1 / n. And over all examples, of ‖x‖².
        self._means: Floats = np.zeros(features)
        self._mean_squares = self._explained = self._inverse_counts = self._squares = 0.0

    def add_classes(self, n: int) -> None:
        """Append classes without examples. An eighth more room is made, so that single classes are cheap."""
        total, room = len(self.counts) + n, len(self._sums)
        if total > room:
            self._sums = np.concatenate([self._sums, np.zeros((total + total // 8 - room, self._sums.shape[1]))])
        self.counts = np.concatenate([self.counts, np.zeros(n, dtype=np.int64)])

    def see(self, x: NDArray[Any], classes: Integers) -> None:
        """Take in examples (N, features) of ``classes`` (N,)."""
        if self.examples == 0:
            self._origin = x.mean(0, dtype=np.float64)
        x = x - self._origin
        changed = np.unique(classes)
        self._sum_over(changed, -1)
        np.add.at(self._sums, classes, x)
        np.add.at(self.counts, classes, 1)
        self._sum_over(changed, 1)
        self.examples += len(x)
        self._squares += float(np.vdot(x, x))

    def _sum_over(self, classes: Integers, sign: int) -> None:
        """Add what these classes contribute to the sums over all classes, or take it away."""
        counts = self.counts[classes]
        classes, counts = classes[counts > 0], counts[counts > 0]
        means = self._sums[classes] / counts[:, None]
        squares = np.einsum("ij,ij->i", means, means)
        self.classes += sign * len(classes)
        self._means += sign * means.sum(0)
        self._mean_squares += sign * float(squares.sum())
        self._explained += sign * float(counts @ squares)
        self._inverse_counts += sign * float((1 / counts).sum())

    def center(self) -> Floats:
        """Return the mean of the class means; 0 while there is one class only, since nothing is common to several."""
        return self._origin + self._means / self.classes if self.classes > 1 else np.zeros_like(self._origin)

    def means(self, classes: Integers) -> Floats:
        """Return the means of classes that have examples."""
        means: Floats = self._origin + self._sums[classes] / self.counts[classes][:, None]
        return means

    def traces(self) -> tuple[float, float]:
        """Return unbiased estimates of tr Σ_w and tr Σ_b, not below 0.

        If only one of them or only their sum can be known, because there is one class or each class has one example,
        they are taken to be equal.
        """
        n, k = self.examples, self.classes
        within = max(self._squares - self._explained, 0.0) / max(n - k, 1)
        between = max(self._mean_squares - float(self._means @ self._means) / max(k, 1), 0.0) / max(k - 1, 1)
        if n == k:
            return between / 2, between / 2
        return within, within if k == 1 else max(between - within * self._inverse_counts / k, 0.0)
