r"""The output layer after gradient steps on K neighbours, without a copy of it.

A step of size α from θ = (W, b) on :math:`\sum_k w_k \log p(y_k \mid h_k, \tilde\theta) - \frac\beta2 \|\tilde\theta -
\theta\|^2` adds to row v a combination of the neighbours. So after any number of steps

.. math::
    \tilde W_v = W_v + \sum_k C_{kv} h_k, \qquad \tilde b_v = b_v + \sum_k C_{kv}, \qquad
    C_{kv} \leftarrow (1 - \alpha\beta)\, C_{kv} + \alpha w_k (\mathbb{I}\{y_k = v\} - \tilde p_k(v))

from C = 0, and the logits of any h move by :math:`\sum_k (h^\top h_k + 1)\, C_{kv}`, a change of rank K (the 1 is the
bias's and is left out where there is none). At the first step :math:`\tilde p_k` is the model's own, the same for every
query, and the pull to θ is zero: for Q queries and M keys the change is one product of a Q × M matrix, K entries a
row, with the M × V matrix of :math:`\mathbb{I}\{y_k = v\} - p_k(v)`. Later steps need, for each query, the neighbours'
logits under its own C: a K × K times K × V product.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Layer:
    """The output layer, worked through in tiles of classes."""

    weight: Tensor
    bias: Tensor | None

    @property
    def classes(self) -> int:
        return self.weight.shape[0]

    def tiles(self, width: int) -> Iterator[range]:
        for low in range(0, self.classes, width):
            yield range(low, min(low + width, self.classes))

    def logits(self, h: Tensor, tile: range) -> Tensor:
        """(..., d) -> (..., len(tile))."""
        z = h @ self.weight[tile.start : tile.stop].T
        return z if self.bias is None else z.add_(self.bias[tile.start : tile.stop])

    def kernel(self, h: Tensor, keys: Tensor) -> Tensor:
        """h·k + 1: how far a unit of C moves the logit of h (Q, d) or (Q, n, d); keys (M, d) or (Q, n, d)."""
        inner = h @ keys.mT
        return inner if self.bias is None else inner.add_(1)


@dataclass(frozen=True)
class Neighbours:
    """For each of Q queries (Q, d) its K neighbours among M keys (M, d)."""

    queries: Tensor
    keys: Tensor
    labels: Tensor
    """(M,)"""
    normalisers: Tensor
    """(M,): log Σ_v exp(z_v) of the keys under the model."""
    indices: Tensor
    """(Q, K)"""
    weights: Tensor
    """(Q, K): w_k; they sum to 1, or to 0 where there is no neighbour."""

    def compact(self) -> Neighbours:
        """Without the keys that are nobody's neighbour."""
        used, indices = self.indices.unique(return_inverse=True)
        return Neighbours(
            self.queries, self.keys[used], self.labels[used], self.normalisers[used], indices, self.weights
        )


def _errors(log_prob: Tensor, labels: Tensor, tile: range) -> Tensor:
    """1{y = v} − p(v) for log-probabilities (..., tile) of entries with labels (...); overwrites them."""
    errors = log_prob.exp_().neg_()
    inside = (labels >= tile.start) & (labels < tile.stop)
    column = (labels - tile.start).clamp(0, len(tile) - 1).unsqueeze(-1)
    return errors.scatter_add_(-1, column, inside.unsqueeze(-1).to(errors.dtype))


def one_step(layer: Layer, near: Neighbours, rate: float, width: int) -> Iterator[tuple[range, Tensor]]:
    """Logits (Q, tile) of the queries after one step, tile by tile. 2QMV + 2(Q + M)dV operations."""
    change = step_of(layer, near).mul_(rate)
    for tile in layer.tiles(width):
        yield tile, layer.logits(near.queries, tile).addmm_(change, _model_errors(layer, near, tile))


def one_step_grid(
    layer: Layer, nears: Sequence[Neighbours], rates: Sequence[float], width: int
) -> Iterator[tuple[range, Iterator[Tensor]]]:
    """The same for several sets of neighbours among the same keys and several rates: all pairs, the rates inner.

    The neighbours' softmaxes are shared by all, and the change of the logits, which is proportional to the rate, by all
    rates. The logits of a pair are to be used before those of the next: they share their memory.
    """
    changes = [step_of(layer, near) for near in nears]
    for tile in layer.tiles(width):
        errors = _model_errors(layer, nears[0], tile)
        plain = layer.logits(nears[0].queries, tile)

        def pairs(errors: Tensor = errors, plain: Tensor = plain) -> Iterator[Tensor]:
            logits = torch.empty_like(plain)
            for change in changes:
                moved = change @ errors
                for rate in rates:
                    yield torch.add(plain, moved, alpha=rate, out=logits)

        yield tile, pairs()


def step_of(layer: Layer, near: Neighbours) -> Tensor:
    """(Q, M): w_k (h·h_k + 1) where key k is a neighbour of the query, 0 elsewhere."""
    change = layer.kernel(near.queries, near.keys)
    picked = change.gather(1, near.indices).mul_(near.weights)
    return change.zero_().scatter_(1, near.indices, picked)


def _model_errors(layer: Layer, near: Neighbours, tile: range) -> Tensor:
    """1{y = v} − p(v) of all keys under the model, (M, tile)."""
    return _errors(layer.logits(near.keys, tile).sub_(near.normalisers.unsqueeze(1)), near.labels, tile)


def several_steps(
    layer: Layer, near: Neighbours, rate: float, l2: float, steps: int, width: int
) -> Iterator[tuple[range, Tensor]]:
    """The same after ``steps`` steps; for two, 2K²V + 2KdV operations a query, twice that in more than one tile.

    C and the neighbours' logits are held for one tile of classes at a time. A softmax needs all tiles: where there are
    several, each step goes through them once for its normalisers, with the steps before it done again.
    """
    keys, labels = near.keys[near.indices], near.labels[near.indices]
    gram = layer.kernel(keys, keys)
    kernel = layer.kernel(near.queries.unsqueeze(1), keys)
    normalisers = [near.normalisers[near.indices]]

    def coefficients(tile: range, plain: Tensor, taken: int) -> Tensor:
        c = torch.zeros_like(plain)
        for step in range(taken):
            logits = plain.clone() if step == 0 else torch.baddbmm(plain, gram, c)
            normaliser = normalisers[step] if step < len(normalisers) else logits.logsumexp(2)
            errors = _errors(logits.sub_(normaliser.unsqueeze(2)), labels, tile)
            c.mul_(1 - rate * l2).addcmul_(errors, near.weights.unsqueeze(2), value=rate)
        return c

    for step in range(1, steps if width < layer.classes else 1):
        total = torch.full_like(normalisers[0], -torch.inf)
        for tile in layer.tiles(width):
            plain = layer.logits(keys, tile)
            total = torch.logaddexp(total, torch.baddbmm(plain, gram, coefficients(tile, plain, step)).logsumexp(2))
        normalisers.append(total)
    for tile in layer.tiles(width):
        c = coefficients(tile, layer.logits(keys, tile), steps)
        yield tile, layer.logits(near.queries, tile) + torch.bmm(kernel, c).squeeze(1)


class TargetLogProb:
    """log p of the targets from logits that come for some of the queries and a tile of classes at a time."""

    def __init__(self, targets: Tensor, like: Tensor) -> None:
        self.targets = targets
        self.normaliser = like.new_full(targets.shape, -torch.inf)
        self.at_target = torch.zeros_like(self.normaliser)

    def add(self, part: slice, tile: range, logits: Tensor) -> None:
        self.normaliser[part] = torch.logaddexp(self.normaliser[part], logits.logsumexp(1))
        column = self.targets[part] - tile.start
        inside = (column >= 0) & (column < len(tile))
        value = logits.gather(1, column.clamp(0, len(tile) - 1).unsqueeze(1)).squeeze(1)
        self.at_target[part] = torch.where(inside, value, self.at_target[part])

    @property
    def value(self) -> Tensor:
        return self.at_target - self.normaliser
