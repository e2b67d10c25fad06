"""The inner objectives of section 3.3, which decide what is written into the row of a class.

The rule mixes w* = argmax_w g(w) into the row, where g depends on the activation h̄ and, for SVM and Smax, on
the k rows nearest to h̄ that belong to other classes, which are held fixed::

    g_L2(w)   = −‖w − h̄‖
    g_IP(w)   = wᵀh̄
    g_SVM(w)  = wᵀh̄ − Σ_j ξ · wᵀθ_j · 1{wᵀθ_j > ε}
    g_Smax(w) = exp(wᵀh̄) / Σ_j exp(wᵀθ_j)

All but the first are maximised over the closed ball ‖w‖ ≤ 10. An objective is any callable
``(h, rows, classes, weight) -> w*``. It is given activations (K, features), the current rows of their classes
(K, features), the classes (K,) and the whole matrix (classes, features).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hebbian_softmax.checks import check_integer, check_number

Objective = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""``(h, rows, classes, weight) -> w*``, as this module describes it."""


def project(w: Tensor, radius: float) -> Tensor:
    """Return the nearest point of the ball ‖w‖ ≤ radius for each row; rows inside the ball keep their bits."""
    inside = torch.linalg.vector_norm(w, dim=-1, keepdim=True) <= radius  # true: a row whose norm overflows is outside
    return torch.where(inside, w, _onto_sphere(w, radius))


def _onto_sphere(w: Tensor, radius: float) -> Tensor:
    """Return radius · w / ‖w‖, never outside the sphere, even where ‖w‖ would over- or underflow; 0 for w = 0."""
    largest = w.abs().amax(-1, keepdim=True)
    w = w / torch.where(largest == 0, 1, largest)
    norm = torch.linalg.vector_norm(w, dim=-1, keepdim=True)
    w = w * (radius / torch.where(norm == 0, 1, norm))
    # Rounding can leave a row outside by a unit in the last place.
    outside = torch.linalg.vector_norm(w, dim=-1, keepdim=True) > radius
    return torch.where(outside, w * (1 - 4 * torch.finfo(w.dtype).eps), w)


def _check_positive(name: str, value: float) -> None:
    if not 0 < check_number(name, value, 0) < math.inf:
        raise ValueError(f"{name} must be positive and finite, got {value!r}")


@dataclass(frozen=True)
class Euclidean:
    """``l2``: w* = h̄, Algorithm 1 itself. ``radius`` adds the ball of section 3.3: w* = h̄ projected into it.

    >>> h, weight, classes = torch.tensor([[3.0, 4.0]]), torch.eye(2), torch.tensor([0])
    >>> Euclidean()(h, weight[classes], classes, weight)
    tensor([[3., 4.]])
    >>> Euclidean(radius=2.5)(h, weight[classes], classes, weight)
    tensor([[1.5000, 2.0000]])
    """

    radius: float | None = None

    def __post_init__(self) -> None:
        if self.radius is not None:
            _check_positive("radius", self.radius)

    def __call__(self, h: Tensor, rows: Tensor, classes: Tensor, weight: Tensor) -> Tensor:
        return h if self.radius is None else project(h, self.radius)


@dataclass(frozen=True)
class InnerProduct:
    """``ip``: w* = radius · h̄ / ‖h̄‖, the point of the ball with the largest inner product (0 for h̄ = 0).

    >>> h, weight, classes = torch.tensor([[3.0, 4.0]]), torch.eye(2), torch.tensor([0])
    >>> InnerProduct(radius=10)(h, weight[classes], classes, weight)
    tensor([[6., 8.]])
    """

    radius: float = 10.0

    def __post_init__(self) -> None:
        _check_positive("radius", self.radius)

    def __call__(self, h: Tensor, rows: Tensor, classes: Tensor, weight: Tensor) -> Tensor:
        return _onto_sphere(h, self.radius)


@dataclass(frozen=True)
class _Ascent(ABC):
    """Projected gradient ascent that starts at h̄ projected into the ball, with the k nearest rows of other classes."""

    radius: float = 10.0
    neighbours: int = 32
    steps: int = 20
    workspace: int = field(default=2**24, kw_only=True, repr=False)
    """Elements of the largest temporary tensor: classes are handled in chunks that fit."""

    def __post_init__(self) -> None:
        _check_positive("radius", self.radius)
        check_integer("neighbours", self.neighbours, 1)
        check_integer("steps", self.steps, 0)
        check_integer("workspace", self.workspace, 1)

    def __call__(self, h: Tensor, rows: Tensor, classes: Tensor, weight: Tensor) -> Tensor:
        k = min(self.neighbours, weight.shape[0] - 1)
        if k == 0 or h.shape[0] == 0:
            return InnerProduct(self.radius)(h, rows, classes, weight)
        weight = weight.to(h.dtype)
        chunk = max(1, self.workspace // max(weight.shape[0], k * weight.shape[1]))
        parts = []
        for part, own in zip(h.split(chunk), classes.split(chunk), strict=True):
            near = weight[nearest_rows(part, own, weight, k)]
            parts.append(self._ascend(part, near))
        return torch.cat(parts)

    @abstractmethod
    def _ascend(self, h: Tensor, near: Tensor) -> Tensor:
        """Return w* for activations (K, features) and their near rows (K, k, features)."""


@dataclass(frozen=True)
class SVM(_Ascent):
    """``svm``: moves towards h̄, and away, with weight ξ, from each near row it would be confused with (wᵀθ_j > ε).

    g jumps where wᵀθ_j crosses ε, so a step can lower g. Therefore the best point of the path, including its start, is
    returned. The paper gives no values for ξ and ε; ξ = 1/32 makes the penalty the mean over the 32 neighbours.

    >>> h, weight, classes = torch.tensor([[1.0, 1.0]]), torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([0])
    >>> w = SVM(xi=1.0)(h, weight[classes], classes, weight)  # The row of class 1 takes away its direction.
    >>> w.tolist()[0][0] > w.tolist()[0][1]
    True
    """

    xi: float = 1 / 32
    epsilon: float = 0.0
    step_size: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_positive("step_size", self.step_size)
        for name in ("xi", "epsilon"):
            if not math.isfinite(check_number(name, getattr(self, name), -math.inf)):
                raise ValueError(f"{name} must be a finite number, got {getattr(self, name)!r}")

    def value(self, w: Tensor, h: Tensor, near: Tensor) -> Tensor:
        """Return g_SVM(w) for w and h (K, features) and near rows (K, k, features)."""
        inner = _inner(w, near)
        return (w * h).sum(-1) - self.xi * torch.where(inner > self.epsilon, inner, 0).sum(-1)

    def gradient(self, w: Tensor, h: Tensor, near: Tensor) -> Tensor:
        """Return the gradient of g_SVM at w."""
        confused = (_inner(w, near) > self.epsilon).to(h.dtype)
        return h - self.xi * _weighted(confused, near)

    def _ascend(self, h: Tensor, near: Tensor) -> Tensor:
        w = best = project(h, self.radius)
        highest = self.value(w, h, near)
        for _ in range(self.steps):
            w = project(w + self.step_size * self.gradient(w, h, near), self.radius)
            value = self.value(w, h, near)
            better = value > highest
            best = torch.where(better.unsqueeze(-1), w, best)
            highest = torch.where(better, value, highest)
        return best


@dataclass(frozen=True)
class SparseSoftmax(_Ascent):
    """``smax``: makes h̄ most likely under a softmax over w and the near rows, by ascending log g.

    log g has the same argmax as g and is concave. It is L-smooth with L = max_j ‖θ_j − θ̄‖² over the near rows. The step
    is 1/L unless ``step_size`` is given, so every step raises log g, and enough steps reach the optimum.

    >>> h, weight, classes = torch.tensor([[1.0, 1.0]]), torch.eye(3)[:, :2], torch.tensor([0])
    >>> w = SparseSoftmax(radius=2.0)(h, weight[classes], classes, weight)  # The row of class 1 is the second axis.
    >>> w.tolist()[0][0] > w.tolist()[0][1]
    True
    """

    step_size: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.step_size is not None:
            _check_positive("step_size", self.step_size)

    def value(self, w: Tensor, h: Tensor, near: Tensor) -> Tensor:
        """Return log g_Smax(w) for w and h (K, features) and near rows (K, k, features)."""
        return (w * h).sum(-1) - torch.logsumexp(_inner(w, near), dim=-1)

    def gradient(self, w: Tensor, h: Tensor, near: Tensor) -> Tensor:
        """Return the gradient of log g_Smax at w."""
        return h - _weighted(torch.softmax(_inner(w, near), dim=-1), near)

    def _ascend(self, h: Tensor, near: Tensor) -> Tensor:
        w = project(h, self.radius)
        step = self._step(near)
        for _ in range(self.steps):
            w = project(w + step * self.gradient(w, h, near), self.radius)
        return w

    def _step(self, near: Tensor) -> Tensor | float:
        if self.step_size is not None:
            return self.step_size
        spread: Tensor = torch.linalg.vector_norm(near - near.mean(1, keepdim=True), dim=-1).amax(1, keepdim=True)
        # Without curvature, where the near rows coincide, any long step ends on the surface of the ball.
        return 1 / spread.square().clamp_min(1e-6)


def nearest_rows(h: Tensor, classes: Tensor, weight: Tensor, k: int) -> Tensor:
    """Return indices (K, k) of the rows of ``weight`` nearest to each h, by Euclidean distance, but never its own."""
    distance = weight.square().sum(1) - 2 * (h @ weight.T)  # ‖h‖² is left out: it is the same for all rows
    distance.scatter_(1, classes.unsqueeze(1), torch.inf)
    return distance.topk(k, dim=1, largest=False).indices


def _inner(w: Tensor, near: Tensor) -> Tensor:
    return (near @ w.unsqueeze(-1)).squeeze(-1)


def _weighted(coefficients: Tensor, near: Tensor) -> Tensor:
    return (coefficients.unsqueeze(-2) @ near).squeeze(-2)


_BY_NAME: dict[str, Objective] = {"l2": Euclidean(), "ip": InnerProduct(), "svm": SVM(), "smax": SparseSoftmax()}


def resolve_objective(objective: str | Objective) -> Objective:
    """Return the objective with a given name (``l2``, ``ip``, ``svm``, ``smax``), or the given callable itself.

    >>> resolve_objective("svm")
    SVM(radius=10.0, neighbours=32, steps=20, xi=0.03125, epsilon=0.0, step_size=0.1)
    """
    if isinstance(objective, str):
        if objective not in _BY_NAME:
            raise ValueError(f"objective must be one of {', '.join(_BY_NAME)} or a callable, got {objective!r}")
        return _BY_NAME[objective]
    if not callable(objective):
        raise TypeError(
            f"objective must be a name or a callable (h, rows, classes, weight) -> w*, got {type(objective).__name__}"
        )
    return objective


def needs_whole_matrix(objective: Objective) -> bool:
    """Return whether the objective may look at rows of other classes, which may be on other ranks."""
    return not isinstance(objective, Euclidean | InnerProduct)
