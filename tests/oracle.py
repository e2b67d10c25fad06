"""Algorithm 1, literally: the loops of the paper over classes and examples, one number at a time.

Slow on purpose, and written without a look at the library, so that the two can disagree.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

IGNORED = -100


def paper_rate(count: int, gamma: float, limit: int) -> float:
    """Return λ of equation 4, with 1/0 read as 1."""
    if count >= limit:
        return 0.0
    return max(1.0 if count == 0 else 1.0 / count, gamma)


def mean_rate(count: int, n: int, gamma: float, limit: int) -> float:
    """Return the share of n occurrences in all occurrences, at least γ, below the limit."""
    return max(n / (count + n), gamma) if count < limit else 0.0


def recent_rate(count: int, n: int, batches: int, gamma: float, limit: int, strength: float) -> float:
    """Return the rate of steps: a mean in which the k-th occurrence weighs about k².

    If the learning rate is below its highest value, of which it has ``strength`` left, the last 150 batches weigh more.
    """
    if count >= limit:
        return 0.0
    weight = n * batches * min(1.0, 10 * (1 - strength)) / 150
    return max(3 * n / (count + 3 * n), min(gamma, weight / (count + weight)) if weight else 0.0)


def shortened(n: int, rate: float) -> float:
    """Return how long a memory is written that is a running mean with a rate: k/(k + 1) for a mean of k."""
    held = n * (2 / rate - 1) if rate else math.inf
    return held / (held + 1) if rate else 1.0


class AlongTheMean:
    """What a write across the mean activation leaves alone: the component of a row along it."""

    def __init__(self) -> None:
        self.line, self.batches = [0.0] * 4, 0
        """Means over rare rows of x = log c, of y, the component along the mean, of x² and of xy."""
        self.unit: Tensor | None = None
        self.first: dict[int, int] = {}
        """The batches before each class came first, where that was seen."""
        self.sums = [0.0, 0.0]
        """Running means over batches, of classes seen once: the sums of n · age and of ages."""
        self.count = 1.0
        """The count that a new class would have by now if it came as often as they do."""

    def see_returning(self, counts: list[int], targets: list[int], batches: int) -> None:
        """Take in a batch, given the counts of all classes before it, and the number of batches before it."""
        share, came, waited = 1 / min(batches + 1, 100), 0, 0
        for i, count in enumerate(counts):
            if count == 1:
                age = batches - self.first.get(i, 0)
                came += age * targets.count(i)
                waited += age
            elif count == 0 and i in targets:
                self.first[i] = batches
        self.sums = [old + share * (new - old) for old, new in zip(self.sums, (came, waited), strict=True)]
        self.count = max(1.0, self.sums[0] / self.sums[1] * batches) if self.sums[1] > 1e-20 else math.inf

    def see(self, mean: Tensor, norm: float, rare_rows: list[tuple[int, Tensor]]) -> None:
        """Take in the mean and the mean norm of centred activations before a batch, and its rare rows with counts."""
        size = sum(float(x) ** 2 for x in mean) ** 0.5
        self.unit = mean / size if size > 0.05 * norm else None
        if self.unit is not None and rare_rows:
            self.batches += 1
            points = [(math.log(count), float(row @ self.unit)) for count, row in rare_rows]
            found = [sum(each) / len(points) for each in zip(*((x, y, x * x, x * y) for x, y in points), strict=True)]
            self.line = [old + (new - old) / min(self.batches, 100) for old, new in zip(self.line, found, strict=True)]

    def usual(self) -> float:
        """Return where the line of least squares is at that count, at most the mean; a falling line counts as level."""
        x, y, squares, products = self.line
        slope = max(products - x * y, 0.0) / max(squares - x * x, 0.01)
        return y + slope * min(math.log(self.count) - x, 0.0)

    def kept(self, target: Tensor, row: Tensor, first: bool) -> Tensor:
        """Return what is written for a class: with its row's component, or on its first occurrence with the usual."""
        if self.unit is None:
            return target
        wanted = self.usual() if first and self.batches else float(row @ self.unit)
        return target + (wanted - float(target @ self.unit)) * self.unit


class Oracle:
    """The counts c of Algorithm 1, and its update of θ after the gradient step."""

    def __init__(self, classes: int, gamma: float, limit: int) -> None:
        self.counts = [0] * classes
        self.gamma, self.limit = gamma, limit
        self.rate: Callable[[int, int], float] = lambda count, n: paper_rate(count, gamma, limit)
        self.factor: Callable[[int], float] = lambda i: 1.0
        """What the rate of class i is multiplied by."""
        self.length: Callable[[int, int], float] = lambda count, n: 1.0
        """What the mean of n activations is multiplied by, given the count before them."""
        self.target: Callable[[int, Tensor, Tensor], Tensor] = lambda i, mean, row: mean
        """What is written for class i, given the mean of its activations and its row."""

    def follow(self, literal: bool, gamma: float, limit: int, batches: int | None, strength: float = 1.0) -> None:
        """Take the paper's rate, or the default's: of a step after so many batches, or (None) on demand.

        ``strength`` is the learning rate of the step, over the highest one.
        """

        def rate(count: int, n: int) -> float:
            if literal:
                return paper_rate(count, gamma, limit)
            if batches is None:
                return mean_rate(count, n, gamma, limit)
            return recent_rate(count, n, batches, gamma, limit, strength)

        shortens = batches is not None and not literal
        self.rate, self.length = rate, lambda count, n: shortened(n, rate(count, n)) if shortens else 1.0

    def update(self, theta: Tensor, h: Tensor, y: Tensor) -> Tensor:
        """Return θ_{t+1} for θ̂_{t+0.5}, the softmax inputs (B, d) and the labels (B,)."""
        new = theta.clone()
        for i in range(theta.shape[0]):
            n = sum(1 for label in y.tolist() if label == i)
            if n > 0:
                rate = self.rate(self.counts[i], n) * self.factor(i)
                mean = torch.zeros(theta.shape[1], dtype=theta.dtype)
                for j in range(len(y)):
                    if int(y[j]) == i:
                        mean += h[j].to(theta.dtype) / n
                mean = mean * self.length(self.counts[i], n)
                new[i] = rate * self.target(i, mean, theta[i]) + (1 - rate) * theta[i]
            self.counts[i] += n
        return new


class ManualLoop:
    """Plain training of backbone and nn.Linear head, with the oracle applied by hand after each step."""

    def __init__(self, backbone: nn.Module, linear: nn.Linear, optimizer: torch.optim.Optimizer, oracle: Oracle):
        self.backbone, self.linear, self.optimizer, self.oracle = backbone, linear, optimizer, oracle

    def step(self, x: Tensor, y: Tensor) -> float:
        self.optimizer.zero_grad()
        h = self.backbone(x)
        loss = nn.functional.cross_entropy(self.linear(h), y, ignore_index=IGNORED)
        loss.backward()
        self.optimizer.step()
        with torch.no_grad():
            self.linear.weight.copy_(self.oracle.update(self.linear.weight.detach(), h.detach(), y))
        return loss.item()
