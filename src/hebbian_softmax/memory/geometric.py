"""The infinite cache of section 3.2, and how closely Hebbian rows track it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hebbian_softmax.checks import check_integer, check_number
from hebbian_softmax.memory import checks


class GeometricCache:
    r"""The cache of unlimited size whose entries fade by occurrence of their class: a slow reference.

    With :math:`I_w(j)` the j-th most recent occurrence of class w, of :math:`N_w` in all,

    .. math::
        \tilde p_c(w \mid h) \propto \sum_{j=1}^{N_w} e^{\lambda (1 - \lambda)^{j-1} h^\top h_{I_w(j)}}

    and :meth:`rows` are :math:`\sum_j \lambda (1 - \lambda)^{j-1} h_{I_w(j)}`, what the rule writes at constant rate λ
    into a row that starts at 0 and receives no gradient. Everything is kept: memory and time grow with the stream.

    >>> cache = GeometricCache(rate=0.5)
    >>> cache.observe(torch.tensor([[4.0], [8.0], [2.0]]), torch.tensor([0, 0, 1]))
    >>> cache.rows(3).flatten().tolist()
    [5.0, 1.0, 0.0]
    """

    def __init__(self, rate: float) -> None:
        self.rate = check_number("rate", rate, 0, 1)
        self.reset()

    def reset(self) -> None:
        self._keys: Tensor | None = None
        self._labels: Tensor | None = None

    def observe(self, h: Tensor, targets: Tensor) -> None:
        """Store activations (T, d) and their classes (T,), oldest first."""
        _, labels = checks.check_pair(h, targets)
        keys, labels = h.detach().reshape(-1, h.shape[-1]).clone(), labels.reshape(-1)
        if h.dim() == 3:
            raise ValueError(f"h must have shape (d,) or (T, d), got {tuple(h.shape)}")
        if self._keys is not None and self._labels is not None:
            self._check(h, self._keys)
            keys, labels = torch.cat([self._keys, keys]), torch.cat([self._labels, labels])
        self._keys, self._labels = keys, labels

    def counts(self, num_classes: int) -> Tensor:
        """N_w of each class."""
        _, labels = self._stored(num_classes)
        return torch.bincount(labels, minlength=num_classes)

    def rows(self, num_classes: int) -> Tensor:
        """Σ_j λ(1−λ)^{j−1} h_{I_w(j)} of each class, (num_classes, d)."""
        keys, labels = self._stored(num_classes)
        weighted = keys * self._weights(labels).to(keys.dtype).unsqueeze(1)
        return keys.new_zeros(num_classes, keys.shape[1]).index_add_(0, labels, weighted)

    def probabilities(self, h: Tensor, num_classes: int) -> Tensor:
        """p̃_c(· | h) for h (..., d), (..., num_classes)."""
        keys, labels = self._stored(num_classes)
        checks.check_activations(h)
        self._check(h, keys)
        attention = (h @ keys.T * self._weights(labels).to(h.dtype)).softmax(-1)
        return h.new_zeros(*h.shape[:-1], num_classes).index_add_(-1, labels, attention)

    @staticmethod
    def _check(h: Tensor, keys: Tensor) -> None:
        """That activations (..., d) go with those stored."""
        if h.shape[-1] != keys.shape[1]:
            raise ValueError(f"h must have {keys.shape[1]} features, as those stored, got {h.shape[-1]}")
        if h.dtype != keys.dtype:
            raise TypeError(f"h must have the dtype of those stored, {keys.dtype}, got {h.dtype}")
        if h.device != keys.device:
            raise ValueError(f"h must be on the device of those stored, {keys.device}, got {h.device}")

    def _stored(self, num_classes: int) -> tuple[Tensor, Tensor]:
        num_classes = check_integer("num_classes", num_classes, 1)
        if self._keys is None or self._labels is None:
            raise RuntimeError("the cache is empty; call observe first")
        checks.check_classes("the stored targets, with num_classes", self._labels, num_classes)
        return self._keys, self._labels

    def _weights(self, labels: Tensor) -> Tensor:
        """λ(1−λ)^{j−1} of each entry, in float64."""
        order = labels.flip(0).argsort(stable=True)  # newest first within each class
        sorted_labels = labels.flip(0)[order]
        first = torch.searchsorted(sorted_labels, sorted_labels)
        later = torch.empty_like(labels)
        later[order] = torch.arange(labels.numel(), device=labels.device) - first
        weights: Tensor = self.rate * (1 - self.rate) ** later.flip(0).double()
        return weights


@dataclass(frozen=True)
class Tracking:
    """How close rows are to the geometric averages of their classes, for classes seen ``count`` times."""

    count: int
    classes: int
    cosine: float
    """Mean cosine of row and average."""
    error: float
    """Mean of ‖row − average‖ / ‖average‖."""


@torch.no_grad()
def track(weight: Tensor, cache: GeometricCache) -> list[Tracking]:
    """Compare the rows of an output layer (V, d) with the cache's geometric averages, by occurrences of the class.

    Give both the same activations of a frozen network. At constant rate, from rows of 0 and one activation a
    write, the two are equal; what is left is due to an annealed rate, to a limit, to rows that start elsewhere (their
    part is (1−λ)^{N_w}), to means over a batch or to gradients.
    """
    if not isinstance(weight, Tensor) or weight.dim() != 2:
        what = tuple(weight.shape) if isinstance(weight, Tensor) else type(weight).__name__
        raise ValueError(f"weight must have shape (classes, d), got {what}")
    average = cache.rows(weight.shape[0])
    if average.shape != weight.shape:
        raise ValueError(f"weight must have {average.shape[1]} features, as those stored, got {weight.shape[1]}")
    counts = cache.counts(weight.shape[0])
    rows = weight.to(average.dtype)
    cosine = torch.cosine_similarity(rows, average, dim=1)
    error = torch.linalg.vector_norm(rows - average, dim=1) / torch.linalg.vector_norm(average, dim=1)
    found = []
    for count in counts[counts > 0].unique().tolist():
        of = counts == count
        found.append(Tracking(int(count), int(of.sum()), float(cosine[of].mean()), float(error[of].mean())))
    return found
