"""Algorithm 1 of the paper as pure functions: the mixing rate λ, the class sums of a batch, the row write.

Nothing here knows about modules, optimizers or processes. For one iteration with activations h, targets y
and counts c taken *before* the batch::

    n[i]  = Σ_j 1{y_j = i}
    λ[i]  = max(1 / c[i], γ) · 1{c[i] < T}                 (equation 4; 1 where c[i] = 0)
    h̄[i]  = 1 / n[i] · Σ_j h_j · 1{y_j = i}
    θ[i] <- λ[i] · h̄[i] + (1 − λ[i]) · θ̂[i]                (equation 3)
    c[i] <- c[i] + n[i]                                    (never beyond the largest int64)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from typing import NamedTuple

import torch
from torch import Tensor

from hebbian_softmax import checks
from hebbian_softmax.checks import check_integer, check_number

Rate = Callable[[Tensor, Tensor], Tensor]
"""``(counts_before, n) -> λ``: both are int64 with one entry for each class; λ is floating point in [0, 1]."""

LARGEST_COUNT = 2**63 - 1
"""Counts that reach this stay there: one that went on would be negative, and its class new."""

GAMMA, LIMIT = 0.2, 100
"""The usual γ and T; docs/study.md says where they come from."""

RARE_AMONG, RARE_IN_TIME = 4, 20
"""A class counts as rare while it was seen less often than the mean class divided by the first, and than the batches
divided by the second."""

LATER, LAST_BATCHES = 3, 150
"""The two weights of a new occurrence in the running mean of a class. It weighs as much as three earlier ones. In long
trainings whose learning rate falls, a batch weighs as much as one of the last 150 batches."""

FALLEN = 10
"""The second weight is whole once the learning rate has lost one over this of its highest value."""


def add_counts(counts: Tensor, n: Tensor) -> Tensor:
    """Return ``counts + n``, or ``LARGEST_COUNT`` where that is less.

    >>> add_counts(torch.tensor([3, LARGEST_COUNT - 1]), torch.tensor([2, 2])).tolist() == [5, LARGEST_COUNT]
    True
    """
    return counts + torch.minimum(n, LARGEST_COUNT - counts)


def _annealed(counts: Tensor, gamma: float, limit: int | None) -> Tensor:
    """Return max(1/c, γ) where c < limit, else 0; 1/0 counts as 1."""
    rate = counts.clamp_min(1).double().reciprocal().clamp_min(gamma)
    return rate if limit is None else rate * (counts < limit)


@dataclass(frozen=True)
class PaperRate:
    """Equation 4: λ = max(1/c, γ) · 1{c < T}, with c the count before the batch.

    >>> PaperRate(gamma=0.25, limit=10)(torch.tensor([0, 1, 2, 9, 10]), torch.ones(5, dtype=torch.int64))
    tensor([1.0000, 1.0000, 0.5000, 0.2500, 0.0000], dtype=torch.float64)
    """

    gamma: float
    limit: int

    def __post_init__(self) -> None:
        check_number("gamma", self.gamma, 0, 1)
        check_integer("limit", self.limit, 0)

    def __call__(self, counts: Tensor, n: Tensor) -> Tensor:
        return _annealed(counts, self.gamma, self.limit)


@dataclass(frozen=True)
class RecentRate:
    r"""A row is a mean of its class's activations, in which the later ones weigh more. This is the usual rate.

    In an optimizer's steps features move, and early activations are worth less than late ones. With c the count before
    the batch, n the occurrences in it, and B the batches so far,

    .. math::
        \lambda = \max\Big(\frac{3n}{c + 3n},\ \min\Big(\gamma, \frac{rn}{c + rn}\Big)\Big) \cdot
        \mathbb{I}\{c < T\}, \qquad r = \frac{B}{150} \cdot \min(1,\ 10\,(1 - \mathrm{lr} / \max \mathrm{lr}))

    The first term weighs the k-th occurrence by about k². The second is the larger one after 450 batches, where the
    first is below γ and the learning rate has fallen by a tenth: a row whose class comes evenly then forgets with a
    mean age of 150 batches, but not faster than with the rate γ. Such a row follows the features closely and is noisy.
    Writes that fade with the learning rate calm the noise. Nothing calms it while the learning rate stays at its
    highest, if the optimizer has no learning rate, or with ``fade=False``. In these cases the first term alone counts,
    and γ has no effect on steps.

    What is memorised on demand, without steps, has one set of features, so there all occurrences count alike:
    λ = max(n/(c + n), γ). The paper's 1/c forgets the first occurrence at the second.

    A mean of few activations is mostly chance, and so it is longer than the mean of many would be. Steps therefore
    write memories :math:`k/(k + 1)` times as long, with k from :meth:`length`.

    With a ``limit`` that is T. By default T is 100 in short trainings, and grows in long ones:
    T = max(100, min(c̄/4, B/20)), with c̄ the mean count of all classes; both quotients are rounded down. A class that
    has been seen a hundred times is then left to gradient descent, unless it is rare among the classes (it was seen
    less than a quarter as often as the mean class) and rare in time (in less than one batch of twenty). Every class
    passes any fixed number in a long training. In an optimizer's steps the 100 is not more than the number of classes:
    among ten classes that come evenly none is so rare that gradients do not serve it.

    >>> c, n = torch.tensor([0, 1, 8, 9]), torch.tensor([3, 1, 2, 1])
    >>> RecentRate(gamma=0.25, limit=9)(c, n)
    tensor([1.0000, 0.5000, 0.2500, 0.0000], dtype=torch.float64)
    >>> RecentRate(gamma=0.25)(torch.tensor([12, 27, 99]), torch.tensor([1, 1, 1]), batches=1500, classes=500)
    tensor([0.2000, 0.1000, 0.0294], dtype=torch.float64)
    >>> RecentRate(gamma=0.25)(torch.tensor([12, 27, 99]), torch.tensor([1, 1, 1]), 0, 1500, 500, fallen=1.0)
    tensor([0.2500, 0.2500, 0.0917], dtype=torch.float64)
    >>> RecentRate(gamma=0.25)(torch.tensor([99, 100, 124, 125]), n, mean_count=500, batches=4000)
    tensor([0.2500, 0.2500, 0.2500, 0.0000], dtype=torch.float64)
    """

    gamma: float = GAMMA
    limit: int | None = None

    def __post_init__(self) -> None:
        check_number("gamma", self.gamma, 0, 1)
        if self.limit is not None:
            check_integer("limit", self.limit, 0, LARGEST_COUNT)

    def least_limit(self, classes: int | None = None) -> int:
        """Return T, or the least one if it grows; ``classes`` is their number in a step, and None elsewhere."""
        if self.limit is not None:
            return self.limit
        return LIMIT if classes is None else min(LIMIT, classes)

    def __call__(
        self,
        counts: Tensor,
        n: Tensor,
        mean_count: Tensor | int = 0,
        batches: Tensor | int = 0,
        classes: int | None = None,
        fallen: Tensor | float = 0.0,
    ) -> Tensor:
        """Return λ, of a step if ``classes`` says how many there are, else of what is memorised on demand.

        ``fallen`` is the last factor of r above, for a step; it is 0 while the learning rate is at its highest.
        """
        limit: Tensor | int = self.least_limit(classes)
        if self.limit is None:
            among, in_time = (torch.as_tensor(each, device=counts.device) for each in (mean_count, batches))
            limit = torch.minimum(among // RARE_AMONG, in_time // RARE_IN_TIME).clamp_min(limit)
        if classes is None:
            rate = _share(n.double(), counts).clamp_min(self.gamma)
        else:
            recent = _share(n.double() * batches * fallen / LAST_BATCHES, counts)
            rate = torch.maximum(_share(LATER * n.double(), counts), recent.clamp_max(self.gamma))
        return rate * (counts < limit)

    @staticmethod
    def length(n: Tensor, rate: Tensor) -> Tensor:
        """Return k/(k + 1), by which a memory is shortened, with k = n (2/λ - 1).

        The plain mean of k activations varies as much as a running mean into which n are mixed at a time with rate λ.

        >>> RecentRate.length(torch.tensor([1, 3, 1]), torch.tensor([1.0, 1.0, 0.5]))
        tensor([0.5000, 0.7500, 0.7500])
        """
        many = n * (2 - rate)
        return many / (many + rate)


def _share(weight: Tensor, counts: Tensor) -> Tensor:
    """Return the share of ``weight`` occurrences in a class that was seen ``counts`` times before."""
    return weight / (counts + weight).clamp_min(torch.finfo(weight.dtype).tiny)


@dataclass(frozen=True)
class InclusiveRate:
    """Equation 4 with a count that includes the batch: λ = max(1/(c + n), γ) · 1{c + n < T}.

    A new class that appears n times in its first batch starts at λ = 1/n, so its initial row keeps a part.

    >>> InclusiveRate(gamma=0.25, limit=10)(torch.tensor([0, 0, 2, 8]), torch.tensor([1, 2, 1, 2]))
    tensor([1.0000, 0.5000, 0.3333, 0.0000], dtype=torch.float64)
    """

    gamma: float
    limit: int

    def __post_init__(self) -> None:
        check_number("gamma", self.gamma, 0, 1)
        check_integer("limit", self.limit, 0)

    def __call__(self, counts: Tensor, n: Tensor) -> Tensor:
        return _annealed(add_counts(counts, n), self.gamma, self.limit)


@dataclass(frozen=True)
class ConstantRate:
    """λ = value, always or (with ``limit``) while c < limit: the first alternative of section 3.1.

    >>> ConstantRate(0.5, limit=10)(torch.tensor([0, 9, 10]), torch.ones(3, dtype=torch.int64))
    tensor([0.5000, 0.5000, 0.0000], dtype=torch.float64)
    """

    value: float
    limit: int | None = None

    def __post_init__(self) -> None:
        check_number("value", self.value, 0, 1)
        if self.limit is not None:
            check_integer("limit", self.limit, 0)

    def __call__(self, counts: Tensor, n: Tensor) -> Tensor:
        rate = torch.full_like(counts, self.value, dtype=torch.float64)
        return rate if self.limit is None else rate * (counts < self.limit)


@dataclass(frozen=True)
class InverseCountRate:
    """λ = 1/c, always or (with ``limit``) while c < limit: pure annealing, the second alternative of section 3.1.

    >>> InverseCountRate()(torch.tensor([0, 1, 2, 100]), torch.ones(4, dtype=torch.int64))
    tensor([1.0000, 1.0000, 0.5000, 0.0100], dtype=torch.float64)
    """

    limit: int | None = None

    def __post_init__(self) -> None:
        if self.limit is not None:
            check_integer("limit", self.limit, 0)

    def __call__(self, counts: Tensor, n: Tensor) -> Tensor:
        return _annealed(counts, 0.0, self.limit)


class Settings(NamedTuple):
    """What a head is told of the rule, checked and complete."""

    gamma: float
    limit: int
    rate: Rate
    write: str
    scale: float | str
    start: int | str
    fade: bool


def settings_of(
    gamma: float,
    limit: int | None,
    rate: Rate | None,
    write: str,
    scale: float | str | None,
    start: int | str | None,
    fade: bool | None,
) -> Settings:
    """Return the settings of a head; None stands for the paper's value in literal writes, and for ours in others."""
    gamma = check_number("gamma", gamma, 0, 1)
    literal = checks.check_write(write) == "literal"
    given, own = limit, getattr(rate, "limit", None)  # a given rate may have a T, too
    limit = check_integer("limit", limit if limit is not None else LIMIT if own is None else own, 0, LARGEST_COUNT)
    if rate is None:
        rate = PaperRate(gamma, limit) if literal else RecentRate(gamma, given)
    elif isinstance(rate, RecentRate) and rate.limit is None and given is not None:
        rate = replace(rate, limit=given)
    return Settings(
        gamma,
        limit,
        _tried(rate, limit),
        write,
        checks.check_scale((1.0 if literal else "match") if scale is None else scale),
        checks.check_start((0 if literal else "auto") if start is None else start, LARGEST_COUNT),
        checks.check_flag("fade", not literal if fade is None else fade),
    )


def _tried(rate: Rate, limit: int) -> Rate:
    """Return a rate after a trial on counts around T, so that a wrong one fails now and not in the middle of training.

    Those that extend :class:`RecentRate` are called with more arguments than others.
    """
    if not callable(rate):
        raise TypeError(f"rate must be a callable (counts_before, n) -> λ, got {type(rate).__name__}")
    counts = torch.tensor([0, 1, 2, max(limit - 1, 0), limit])
    many = torch.ones_like(counts)
    checks.check_rate_values(rate(counts, many), counts)
    if isinstance(rate, RecentRate):
        try:
            value = rate(counts, many, 0, 0, 1, 0.0)
        except TypeError as error:
            wanted = "(counts, n, mean_count, batches, classes, fallen) -> λ"
            raise TypeError(f"rate extends RecentRate, so it must be a callable {wanted}; {error}") from error
        checks.check_rate_values(value, counts)
    return rate


@dataclass(frozen=True)
class ClassSums:
    """A batch as the rule needs it: for each class seen, in ascending order, its occurrences and activations.

    The activations of a class are summed only when :meth:`of` asks for it, because most classes of a batch are past the
    limit and are not written.
    """

    classes: Tensor
    """int64 (K,): the classes, ascending, each once."""
    n: Tensor
    """int64 (K,): the occurrences of each class, all > 0."""
    rows: Tensor
    """(M, features) in the accumulation dtype: activations, or sums of activations that share a class."""
    order: Tensor
    """int64 (M,): the indices of the ``rows`` of the first class, then of the second, and so on."""
    parts: Tensor
    """int64 (K,): the number of ``rows`` of each class."""
    total: Tensor
    """(features,): the sum of all activations."""
    norms: Tensor
    """Scalar: Σ_j ‖h_j − center‖ over the activations."""
    nonfinite: Tensor
    """int64 scalar: activations left out because they hold an inf or a NaN, or have no finite norm."""

    def of(self, which: Tensor) -> Tensor:
        """Return Σ_j h_j for each class where ``which`` (K,) is true."""
        rows = self.rows[self.order[which.repeat_interleave(self.parts)]]
        lengths = self.parts[which]
        if lengths.numel() == 0:
            return rows
        return torch.segment_reduce(rows, "sum", lengths=lengths, axis=0)

    def folded(self) -> ClassSums:
        """Return the same sums with a single row for each class."""
        everything = torch.ones_like(self.classes, dtype=torch.bool)
        order = torch.arange(self.classes.numel(), device=self.classes.device)
        return replace(self, rows=self.of(everything), order=order, parts=torch.ones_like(self.n))


def accumulation_dtype(weight: Tensor) -> torch.dtype:
    """Return the dtype of sums, means and mixing: float32, or float64 for float64 weights."""
    return torch.promote_types(weight.dtype, torch.float32)


def sum_by_class(
    h: Tensor, targets: Tensor, *, num_classes: int, ignore_index: int, center: Tensor, dtype: torch.dtype
) -> ClassSums:
    """Sum the rows of ``h`` (N, features) by their ``targets`` (N,).

    Ignored and out-of-range targets are left out, and so are non-finite activations, which are counted.
    A stable sort brings equal targets together, so the same input gives the same bits on every device.

    >>> h = torch.tensor([[1., 0.], [0., 1.], [3., 0.]])
    >>> s = sum_by_class(h, torch.tensor([7, 2, 7]), num_classes=9, ignore_index=-100,
    ...                  center=torch.zeros(2), dtype=torch.float32)
    >>> s.classes.tolist(), s.n.tolist(), s.folded().rows.tolist()
    ([2, 7], [1, 2], [[0.0, 1.0], [4.0, 0.0]])
    """
    known = (targets != ignore_index) & (targets >= 0) & (targets < num_classes)
    h = h.to(dtype)
    # Finite entries are not enough: an activation whose norm overflows would end as an inf in a sum.
    finite = torch.isfinite(torch.linalg.vector_norm(h, dim=1))
    keep = known & finite
    if not bool(keep.all()):
        h, targets = h[keep], targets[keep]
    targets, order = targets.long().sort(stable=True)
    classes, n = torch.unique_consecutive(targets, return_counts=True)
    return ClassSums(
        classes=classes,
        n=n,
        rows=h,
        order=order,
        parts=n,
        total=h.sum(0),
        norms=torch.linalg.vector_norm(h - center.to(dtype), dim=1).sum(),
        nonfinite=(known & ~finite).sum(),
    )


def merge_sums(parts: Sequence[ClassSums]) -> ClassSums:
    """Return the class sums of several batches taken together."""
    if len(parts) == 1:
        return parts[0]
    parts = [part.folded() for part in parts]
    classes, order = torch.cat([part.classes for part in parts]).sort(stable=True)
    classes, lengths = torch.unique_consecutive(classes, return_counts=True)
    owner = torch.repeat_interleave(lengths)
    n = torch.cat([part.n for part in parts])[order]
    return ClassSums(
        classes=classes,
        n=torch.zeros_like(classes).index_add_(0, owner, n),
        rows=torch.cat([part.rows for part in parts]),
        order=order,
        parts=lengths,
        total=torch.stack([part.total for part in parts]).sum(0),
        norms=torch.stack([part.norms for part in parts]).sum(),
        nonfinite=torch.stack([part.nonfinite for part in parts]).sum(),
    )


def mix_rows(rows: Tensor, memories: Tensor, rate: Tensor) -> Tensor:
    """Return equation 3, λ·w* + (1 − λ)·θ̂, for rows and memories (K, features) and λ (K,).

    >>> mix_rows(torch.zeros(1, 2), torch.ones(1, 2), torch.tensor([0.25]))
    tensor([[0.2500, 0.2500]])
    """
    rate = rate.to(rows.dtype).unsqueeze(1)
    return rate * memories + (1 - rate) * rows


def suggest_settings(counts: Tensor | Sequence[int], epochs: float) -> tuple[float, int]:
    """Return γ = 1/N_min, at most 1/2, and T = N_min × epochs of section 3.1, over the classes that occur."""
    try:
        occurrences = torch.as_tensor(counts)
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(f"counts must be integers >= 0, got {counts!r}") from None
    if occurrences.numel() and (occurrences.is_floating_point() or bool((occurrences < 0).any())):
        raise ValueError(f"counts must be integers >= 0, got {counts!r}")
    if not bool((occurrences > 0).any()):
        raise ValueError("counts must have a class that occurs at least once")
    if not isinstance(epochs, Real) or not 0 <= epochs < math.inf:
        raise ValueError(f"epochs must be a number of at least 0, got {epochs!r}")
    rarest = int(occurrences[occurrences > 0].min())
    return 1 / max(rarest, 2), min(round(rarest * epochs), LARGEST_COUNT)
