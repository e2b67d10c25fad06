r"""What a trained head knows about its activations, and the rows that it gives to new classes.

In a trained head the norms of rows and activations say nothing about each other, but the logits do. So a row for a new
class is made to give a good *logit*. With :math:`\ell(h) = \log \sum_j e^{\theta_j h + b_j}` over all rows,

.. math::
    \ell(h) \approx a \cdot h + b_0, \qquad
    d_i = \frac{c_i}{c_i + k} (\bar h_i - m), \qquad
    u_i = s A d_i

.. math::
    \theta_i = a + u_i, \qquad
    b_i = b_0 + \log \pi_i - u_i \cdot m - \tfrac{1}{2} d_i \cdot u_i

The line :math:`(a, b_0)` and the log prior :math:`\log \pi_i` give the class its frequency wherever it is asked for.
The memory :math:`u_i` is that of a Gaussian class with the mean :math:`d_i`, which is shrunk while the class was seen a
few times only; :math:`A` is the identity, or the inverse of the covariance of activations. The scale :math:`s` lets a
well-known new class gain as much from its memory as familiar classes gain from their rows on average, which is the
mutual information of activation and class, :math:`H(Y) - H(Y | h)`. Without a bias, :math:`b_i v` is added to the row,
where :math:`v` is the vector whose product with activations is closest to 1.

All of it follows from second moments of the activations and their logits, which :meth:`Calibration.see` gathers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hebbian_softmax.checks import check_flag, check_integer, check_number

_SOFTENING = 10
"""What is added to the covariance before it is inverted, in mean variances of a feature."""
_LOGITS_AT_ONCE = 2**24
_LEAST_GAIN = 0.01
"""What an activation tells about its class, at least, in nats; less means that the head was not trained."""
_IMAGINED = 256
_IMAGINED_ENTROPY = 0.1
"""How many activations of familiar classes are imagined, and how unsure the head is of their classes, in nats."""
_EXTRA = 3
"""Beside the features, the moments have the constant 1, the log normaliser and the entropy of the classes."""


@dataclass(frozen=True)
class NewClasses:
    """How a trained head writes the rows of classes that are added to it.

    Args:
        whiten: whether memories are multiplied by the inverse of the covariance of activations, as in linear
            discriminant analysis, or only scaled.
        shrinkage: k; a class seen c times gets c/(c + k) of its memory. None means 2, or 1 without whitening.
        prior: ``"counts"`` expects a new class as often as it was seen among all activations; ``"even"`` expects all
            classes equally often, as in a balanced test set.
        gradients_from: gradients do not move the row of a new class that was seen fewer times than this, so that such
            rows are left to the write.

    >>> NewClasses(whiten=False).shrunk_by
    1.0
    """

    whiten: bool = True
    shrinkage: float | None = None
    prior: str = "counts"
    gradients_from: int = 0

    def __post_init__(self) -> None:
        check_flag("whiten", self.whiten)
        if self.shrinkage is not None:
            check_number("shrinkage", self.shrinkage, 0)
        if self.prior not in ("counts", "even"):
            raise ValueError(f'prior must be "counts" or "even", got {self.prior!r}')
        check_integer("gradients_from", self.gradients_from, 0)

    @property
    def shrunk_by(self) -> float:
        """The k in use."""
        if self.shrinkage is None:
            return 2.0 if self.whiten else 1.0
        return float(self.shrinkage)


def check_new_classes(settings: Any) -> NewClasses:
    """Return settings of that kind, or the usual ones for None."""
    if settings is not None and not isinstance(settings, NewClasses):
        raise TypeError(f"new_classes must be of the class NewClasses, got {type(settings).__name__}")
    return NewClasses() if settings is None else settings


class FamiliarRows(NamedTuple):
    """The rows of the classes that a head was trained on."""

    weight: Tensor
    bias: Tensor | None
    which: Tensor
    """Of all classes of the head, those that these are."""


class Prepared(NamedTuple):
    """What turns memories into rows, in float64."""

    slope: Tensor
    """a (features,)"""
    constant: Tensor
    """b₀"""
    mean: Tensor
    """m (features,)"""
    one: Tensor
    """v (features,): its product with activations is about 1."""
    precision: Tensor
    """s·A (features, features), or s alone."""
    spread: Tensor
    """The inverse of ``precision``."""
    least: Tensor
    """The log prior of the least likely familiar class."""

    def influence(self, memories: Tensor) -> Tensor:
        """Return u = s A d for memories d (K, features)."""
        return memories * self.precision if self.precision.dim() == 0 else memories @ self.precision

    def memory_in(self, influence: Tensor) -> Tensor:
        """Return the memories d whose influence is u."""
        return influence * self.spread if self.spread.dim() == 0 else influence @ self.spread

    def constants(self, memories: Tensor, log_prior: Tensor) -> Tensor:
        """Return b of memories d (K, features) and log priors (K,)."""
        influence = self.influence(memories)
        return self.constant + log_prior - influence @ self.mean - (memories * influence).sum(1) / 2


class Calibration(nn.Module):
    """The moments of what a trained head has seen, and the constants that it has written.

    The buffers are empty until activations are seen. They stay float64 when the model's dtype changes.
    """

    moments: Tensor
    """Σ x xᵀ over activations, where x is (h, 1, log normaliser, entropy)."""
    expected: Tensor
    """Σ of the probabilities of each class over the same activations."""
    familiar: Tensor
    """Whether the row of each class was trained before. Classes beyond its end were added since, and are new."""
    constants: Tensor
    """b of each class whose row was written from here, 0 for others; there may be fewer than there are classes."""
    memorized: Tensor
    """How many activations were memorised, those of familiar classes included."""
    imagined: Tensor
    """1 where the logits behind the moments are imagined, until the head sees some activations of familiar classes."""

    def __init__(self, familiar: Tensor) -> None:
        super().__init__()
        device = familiar.device
        double: Any = {"dtype": torch.float64, "device": device}
        self.register_buffer("moments", torch.zeros(0, 0, **double))
        self.register_buffer("expected", torch.zeros(0, **double))
        self.register_buffer("constants", torch.zeros(0, **double))
        self.register_buffer("familiar", familiar)
        for name in ("memorized", "imagined"):
            self.register_buffer(name, torch.zeros((), dtype=torch.int64, device=device))
        self._prepared: tuple[Any, Prepared] | None = None

    @property
    def ready(self) -> bool:
        """Whether activations were seen, so that rows can be written."""
        return self.moments.numel() > 0

    def seen(self) -> int:
        """Return the number of activations that the moments are of."""
        return int(self.moments[-_EXTRA, -_EXTRA]) if self.ready else 0

    def see(self, h: Tensor, rows: FamiliarRows, group: dist.ProcessGroup | None = None) -> None:
        """Take in activations (N, features), of all ranks of ``group``, with their logits of familiar classes."""
        sums = _empty_sums(rows)
        for part in h.split(max(1, _LOGITS_AT_ONCE // max(1, rows.weight.shape[0]))):
            _add(sums, part, *_predictions(part, rows))
        if bool(self.imagined):
            self.forget_moments()
        self._take_in(sums, rows, group)

    def imagine(self, h: Tensor, rows: FamiliarRows) -> None:
        """Take in activations (N, features) of new classes, of all ranks, when none of familiar classes are known.

        They show where activations lie and how much they vary. But the head is not sure of any class there, so their
        logits say nothing about those of familiar classes, which are imagined: see :func:`_imagined_level`.
        """
        level = self.moments[-2, -_EXTRA] / self.moments[-_EXTRA, -_EXTRA] if self.ready else _imagined_level(h, rows)
        slope = rows.weight.mean(0, dtype=torch.float64)
        log_normaliser = level + (h.double() - h.double().mean(0)) @ slope
        even = torch.full((1, 1), 1 / rows.weight.shape[0], device=h.device).expand(h.shape[0], rows.weight.shape[0])
        sums = _empty_sums(rows)
        _add(sums, h, log_normaliser.unsqueeze(1), even, torch.full_like(log_normaliser, _IMAGINED_ENTROPY))
        self._take_in(sums, rows, None)
        self.imagined = torch.ones_like(self.imagined)

    def _take_in(self, sums: tuple[Tensor, Tensor], rows: FamiliarRows, group: dist.ProcessGroup | None) -> None:
        if group is not None:
            for each in sums:
                dist.all_reduce(each, group=group)
        moments, expected = sums
        if moments[-_EXTRA, -_EXTRA] == 0:
            return
        self.moments = self.moments + moments if self.ready else moments
        self.expected = padded(self.expected, rows.which.shape[0]).clone()
        self.expected[rows.which] += expected

    def forget_moments(self) -> None:
        """Forget the activations that were seen, but not what was written."""
        self.moments, self.expected = self.moments.new_zeros(0, 0), self.expected.new_zeros(0)
        self.imagined = torch.zeros_like(self.imagined)

    def prepared(self, settings: NewClasses) -> Prepared:
        """Return what follows from the moments."""
        key = id(self.moments), self.moments._version, settings
        if self._prepared is None or self._prepared[0] != key:
            self._prepared = key, _prepare(self.moments, self.expected, settings)
        return self._prepared[1]

    def familiar_of(self, classes: int) -> Tensor:
        """Return for each class whether its row was trained before it could be written from here."""
        self.familiar = padded(self.familiar, classes)
        return self.familiar

    def constants_of(self, classes: int) -> Tensor:
        """Return the constants of all classes, of which some may have been added since."""
        self.constants = padded(self.constants, classes)
        return self.constants

    def unseen(self, weight: Tensor, bias: Tensor | None, settings: NewClasses) -> tuple[Tensor, Tensor]:
        """Return the row and the bias of a class that was never seen, as unlikely as the least likely familiar one.

        While no activations were seen, these are the mean of all rows, which is no more likely than other classes are
        on average, and the least bias.
        """
        if not self.ready:
            least = weight.new_zeros(()) if bias is None else bias.min()
            return weight.mean(0, dtype=torch.promote_types(weight.dtype, torch.float32)), least
        prepared = self.prepared(settings)
        constant = prepared.constant + prepared.least
        return prepared.slope if bias is not None else prepared.slope + constant * prepared.one, constant

    def log_prior(self, counts: Tensor, classes: int, settings: NewClasses) -> Tensor:
        """Return the log prior of new classes that were seen ``counts`` times."""
        if settings.prior == "even":
            return torch.full_like(counts, -math.log(classes), dtype=torch.float64)
        total = torch.maximum(self.moments[-_EXTRA, -_EXTRA], self.memorized)
        return counts.clamp_min(1).double().log() - total.log()

    def fit_to(self, state: Mapping[str, Any], prefix: str, features: int) -> None:
        """Give the buffers the shapes that they have in a state."""
        for name, buffer in list(self.named_buffers()):
            found = tuple(state.get(prefix + name, buffer).shape)
            fits = len(found) == (0 if name in ("memorized", "imagined") else 1)
            if name == "moments":
                fits = found in {(0, 0), (features + _EXTRA,) * 2}
            if not fits:
                raise ValueError(f"{prefix}{name} of the loaded state has shape {found}, which fits no such head")
            setattr(self, name, buffer.new_zeros(found))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Calibration:
        before = {name: getattr(self, name) for name in ("moments", "expected", "constants")}
        super()._apply(fn, recurse)
        for name, old in before.items():
            if not old.is_meta:
                setattr(self, name, old.to(getattr(self, name).device))
        return self

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        for name in ("moments", "expected", "constants"):  # with assign=True a state of another dtype is taken as it is
            setattr(self, name, getattr(self, name).double())
        self.memorized, self.imagined = self.memorized.long(), self.imagined.long()


def padded(values: Tensor, classes: int) -> Tensor:
    """Return ``values`` with zeros for classes that were added since."""
    missing = classes - values.shape[0]
    return torch.cat([values, values.new_zeros(missing)]) if missing > 0 else values


def _empty_sums(rows: FamiliarRows) -> tuple[Tensor, Tensor]:
    double: Any = {"dtype": torch.float64, "device": rows.weight.device}
    size = rows.weight.shape[1] + _EXTRA
    return torch.zeros(size, size, **double), torch.zeros(rows.weight.shape[0], **double)


def _predictions(h: Tensor, rows: FamiliarRows) -> tuple[Tensor, Tensor, Tensor]:
    """Return log normalisers (N, 1), probabilities (N, classes) and their entropies (N,)."""
    logits = nn.functional.linear(h.to(rows.weight.dtype), rows.weight, rows.bias)
    log_prob = logits.to(torch.promote_types(logits.dtype, torch.float32))
    log_normaliser = log_prob.logsumexp(1, keepdim=True)
    log_prob = log_prob - log_normaliser
    prob = log_prob.exp()
    return log_normaliser, prob, torch.special.entr(prob).sum(1)


def _add(sums: tuple[Tensor, Tensor], h: Tensor, log_normaliser: Tensor, prob: Tensor, entropy: Tensor) -> None:
    """Add the moments of activations (N, features) and the probabilities of the classes to ``sums``."""
    one = torch.ones_like(log_normaliser)
    x = torch.cat([each.double() for each in (h, one, log_normaliser, entropy.unsqueeze(1))], 1)
    sums[0].add_(x.T @ x)
    sums[1].add_(prob.sum(0, dtype=torch.float64))


def _imagined_level(h: Tensor, rows: FamiliarRows) -> Tensor:
    """Return the mean log normaliser of activations that familiar classes may have.

    Such an activation is one of ``h`` turned towards the row of a class, as far as it takes for the head to recognise
    that class with a loss of ``_IMAGINED_ENTROPY``: a trained head recognises its classes.
    """
    weight, stride = rows.weight, -(-rows.weight.shape[0] // _IMAGINED)
    labels = torch.arange(0, weight.shape[0], stride, device=weight.device)
    h = h.double()
    mean = h.sum(0) / (h.shape[0] + 1)
    aside = (h - mean)[torch.arange(len(labels), device=h.device) % h.shape[0]]
    towards = nn.functional.normalize(weight[labels].double() - weight.mean(0, dtype=torch.float64), dim=1)
    towards = towards * (h - mean).pow(2).sum(1).mean().sqrt()
    low, high = 0.0, 1.0
    for _ in range(10):
        cosine = (low + high) / 2
        imagined = (mean + cosine * towards + (1 - cosine**2) ** 0.5 * aside).to(weight.dtype)
        logits = nn.functional.linear(imagined, weight, rows.bias).double()
        loss = nn.functional.cross_entropy(logits, labels)
        low, high = (cosine, high) if float(loss) > _IMAGINED_ENTROPY else (low, cosine)
    return logits.logsumexp(1).mean()


def _prepare(moments: Tensor, expected: Tensor, settings: NewClasses) -> Prepared:
    total, features = moments[-_EXTRA, -_EXTRA], moments.shape[0] - _EXTRA
    log_normaliser, entropy = moments[-_EXTRA, -2] / total, moments[-_EXTRA, -1] / total
    # A zero activation with the same logits is among the others, so that a single one has something to differ from.
    averages = moments[:-_EXTRA] / (total + 1)
    second, mean = averages[:, :-_EXTRA], averages[:, -_EXTRA]
    covariance = second - mean.outer(mean)
    smallest = torch.finfo(torch.float64).tiny ** 0.5
    typical = covariance.diagonal().mean().clamp_min(smallest)
    identity = torch.eye(features, dtype=mean.dtype, device=mean.device)
    ridge = typical * (features / (2 * (total + 1))).clamp_max(1) * identity
    slope = torch.linalg.solve(covariance + ridge, averages[:, -2] - mean * log_normaliser)
    one = torch.linalg.solve(second + ridge, mean)
    spread = covariance + _SOFTENING * typical * identity if settings.whiten else torch.ones_like(total)
    precision = torch.linalg.inv(spread) if settings.whiten else spread
    squared = (precision * covariance).sum() if settings.whiten else covariance.diagonal().sum()
    # A well-known class gains half its squared length in log-probability; class means have 1/(1 + k) of the variance.
    frequency = expected / total
    gained = torch.special.entr(frequency).sum() - entropy
    scale = 2 * gained.clamp_min(_LEAST_GAIN) * (1 + settings.shrunk_by) / squared.clamp_min(smallest)
    least = frequency[frequency > 0].min().log()
    constant = log_normaliser - slope @ mean
    along = (one @ mean).clamp_min(smallest)
    return Prepared(slope, constant, mean, one / along, precision * scale, spread / scale, least)
