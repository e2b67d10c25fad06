r"""Two and more steps of MbPA: the logits of the neighbours move along with those of the query.

Let Z (K × V) be the logits of a query's neighbours, :math:`G_{jk} = h_j^\top h_k + 1`, and :math:`E(Z) = Y -
\operatorname{softmax}(Z)`. A step changes C by :math:`-\alpha\beta C + \alpha \operatorname{diag}(w) E` and the logits
of the neighbours by :math:`D = G C`. So C need not be held: from D = 0 and d = 0, a step is

.. math::
    D \leftarrow (1 - \alpha\beta) D + \alpha G \operatorname{diag}(w) E(Z + D), \qquad
    d \leftarrow (1 - \alpha\beta) d + \alpha g^\top \operatorname{diag}(w) E(Z + D),

where d is the change of the query's own logits and :math:`g_k = h^\top h_k + 1`. What this costs:

- Z are rows of the logits of all keys, which are computed once for all queries of a block.
- The change d of the first step is one product for all queries, as it is where there is only one step.
- The last step needs d alone, a weighted sum over the neighbours. So s steps take s - 1 products of K × K times K × V.
  These are the bulk of the work; several queries share a batched product.
- Everything else goes over K × V numbers once for each of: the errors, the log-sum-exps, the weighted sum
  (:mod:`hebbian_softmax.memory.passes`).

A softmax needs all classes. Where the workspace holds only tiles of them, every step goes through all tiles once more
for its normalisers, and makes the steps before it again.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hebbian_softmax import _triton
from hebbian_softmax.memory import passes
from hebbian_softmax.memory.adaptation import Layer, Neighbours, shares_of, step_of
from hebbian_softmax.memory.passes import Moved, errors_of
from hebbian_softmax.memory.products import wide_bmm

ALIGNED = 16
"""Rows of logits have a multiple of so many columns: products and kernels are much faster then."""

PARTS = 8
"""Into how many parts a tile is cut for the product of the first step."""


@dataclass(frozen=True)
class Steps:
    """How the layer is adapted: in ``count`` steps of size ``rate`` with the pull ``l2``."""

    count: int
    rate: float
    l2: float

    def kept(self, steps: int) -> float:
        """Return how much of a change is left after further steps; this may be too large for a float, and then inf."""
        return math.prod([1 - self.rate * self.l2] * steps)


@dataclass(frozen=True)
class Plan:
    """What is computed together: ``rows`` queries share the logits of keys, ``at_once`` of them a batched product.

    A tile of classes has ``width`` columns, a multiple of ``ALIGNED``.
    """

    rows: int
    width: int
    at_once: int


def plan_of(layer: Layer, near: Neighbours, steps: Steps, copies: int, room: int) -> Plan:
    """Return the plan for ``room`` bytes, where a pass makes ``copies`` matrices besides its result.

    All classes make one tile if this is possible for one query at least.
    """
    (n, k), (keys, features) = near.indices.shape, near.keys.shape
    size = layer.weight.element_size()
    changes, errors = (1 if steps.count == 2 else 2), layer.product_dtype.itemsize / size
    matrices = copies + changes + errors
    whole, elements = -(-layer.classes // ALIGNED) * ALIGNED, room // size

    def shared(rows: int) -> float:
        """Return the numbers for each class: the logits of keys and some errors, and logits of queries."""
        return (1 + 1 / PARTS) * min(keys, rows * k) + 3 * rows

    def queries(rows: int, width: int) -> int:
        """Return how many queries fit in the workspace beside the logits of keys."""
        left = elements - width * shared(rows)
        return int(left // (width * matrices * k + k * (3 * k + 2 * features)))

    rows = n
    while rows > 1 and queries(rows, whole) < 1:
        rows = -(-rows // 2)
    if queries(rows, whole) >= 1:
        return Plan(rows, whole, min(rows, queries(rows, whole)))
    width = int(elements / 2 / (shared(n) + matrices * k)) // ALIGNED * ALIGNED
    width = min(max(width, ALIGNED), whole)
    return Plan(n, width, max(1, min(n, queries(n, width))))


def passes_for(layer: Layer) -> Any:
    """Return the module with the passes: kernels where there are some for the layer's dtype and device."""
    weight = layer.weight
    on_gpu = weight.dtype == torch.float32 and type(weight) is Tensor and _triton.runs_on(weight.device)
    return (_triton.load("memory.gpu.passes") if on_gpu else None) or passes


def further_steps(layer: Layer, near: Neighbours, steps: Steps, room: int) -> Iterator[tuple[slice, range, Tensor]]:
    """Yield some queries, a tile of classes, and their logits after two or more steps."""
    plan = plan_of(layer, near, steps, passes_for(layer).COPIES, room)
    n, k = near.indices.shape
    for low in range(0, n, plan.rows):
        high = min(low + plan.rows, n)
        some = near.part(low, high)
        if (high - low) * k < near.keys.shape[0]:
            some = some.compact()
        for tile, logits in adapted_logits(layer, some, steps, plan.width, plan.at_once):
            yield slice(low, high), tile, logits


def adapted_logits(
    layer: Layer, near: Neighbours, steps: Steps, width: int, at_once: int
) -> Iterator[tuple[range, Tensor]]:
    """Yield the logits (Q, tile) of the queries after two or more steps, tile by tile."""
    shares = shares_of(layer, near)
    first_step = step_of(near, shares).mul_(steps.rate).mul_(steps.kept(steps.count - 1))
    shares.mul_(steps.rate)
    groups = [_Group(layer, near, steps, low, at_once) for low in range(0, len(shares), at_once)]
    normalisers = [near.normalisers[near.indices]]
    for step in range(1, steps.count if width < layer.classes else 1):
        total = torch.full_like(normalisers[0], -torch.inf)
        for tile in layer.tiles(width):
            model = layer.logits(near.keys, tile, width)
            for group in groups:
                found = group.normalisers_after(step, model, tile, normalisers)
                total[group.part] = torch.logaddexp(total[group.part], found)
        normalisers.append(total)
    for tile in layer.tiles(width):
        model = layer.logits(near.keys, tile, width)
        logits = layer.logits(near.queries, tile, width)
        _add_first_step(logits, first_step, model, near, tile)
        for group in groups:
            group.add_further_steps(logits[group.part], shares[group.part], model, tile, normalisers)
        yield tile, logits[:, : len(tile)]


def _add_first_step(logits: Tensor, step: Tensor, model: Tensor, near: Neighbours, tile: range) -> None:
    """Add the change by the first step, (Q, M) times the errors (M, tile) of all keys, to the logits of the queries."""
    width = -(-model.shape[1] // (PARTS * ALIGNED)) * ALIGNED
    for low in range(0, model.shape[1], width):
        part = slice(low, low + width)
        errors = errors_of(model[:, part] - near.normalisers.unsqueeze(1), near.labels - tile.start - low)
        logits[:, part].addmm_(step, errors)


class _Group:
    """Some of the queries, whose K × K products are computed together."""

    def __init__(self, layer: Layer, near: Neighbours, steps: Steps, low: int, at_once: int) -> None:
        self.layer, self.near, self.steps = layer, near, steps
        self.part = slice(low, low + at_once)
        self.passes = passes_for(layer)

    def normalisers_after(self, steps: int, model: Tensor, tile: range, normalisers: Sequence[Tensor]) -> Tensor:
        """Return the log-sum-exp over a tile of the neighbours' logits after so many steps, (R, K)."""
        *_, found = (own for _, own in self._states(model, tile, normalisers, steps))
        return found

    def add_further_steps(
        self, logits: Tensor, shares: Tensor, model: Tensor, tile: range, normalisers: Sequence[Tensor]
    ) -> None:
        """Add the changes by all steps after the first to the logits of the queries, (R, tile)."""
        count = self.steps.count
        for step, (moved, own) in enumerate(self._states(model, tile, normalisers, count - 1), start=2):
            logits.add_(self.passes.weighted_errors(moved, own, shares).mul_(self.steps.kept(count - step)))

    def _states(
        self, model: Tensor, tile: range, normalisers: Sequence[Tensor], count: int
    ) -> Iterator[tuple[Moved, Tensor]]:
        """Yield the neighbours' logits in a tile after 1, 2, … ``count`` steps, with their normalisers.

        The normalisers (Q, K) of the first states are given. Those of later states are taken over this tile.
        """
        indices = self.near.indices[self.part]
        own = normalisers[0][self.part]
        moved = Moved(model, indices, self.near.labels[indices] - tile.start)
        operator = self._operator(indices)
        for step in range(1, count + 1):
            errors = self.passes.errors(moved, own, self.layer.product_dtype)
            change = wide_bmm(operator, errors)
            del errors
            if moved.change is not None:
                change.add_(moved.change.mul_(self.steps.kept(1)))
            moved = Moved(model, indices, moved.columns, change)
            known = step < len(normalisers)
            own = normalisers[step][self.part] if known else self.passes.log_sum_exp(moved)
            yield moved, own

    def _operator(self, indices: Tensor) -> Tensor:
        """Return α G diag(w), (R, K, K), by which errors of the neighbours change their logits."""
        keys = self.near.keys[indices]
        weights = self.near.weights[self.part].unsqueeze(1) * self.steps.rate
        return self.layer.kernel(keys, keys).mul_(weights).to(self.layer.product_dtype)
