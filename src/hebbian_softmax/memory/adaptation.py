r"""The output layer after gradient steps on K neighbours, without a copy of it.

A step of size α from θ = (W, b) on :math:`\sum_k w_k \log p(y_k \mid h_k, \tilde\theta) - \frac\beta2 \|\tilde\theta -
\theta\|^2` adds to row v a combination of the neighbours. So after any number of steps

.. math::
    \tilde W_v = W_v + \sum_k C_{kv} h_k, \qquad \tilde b_v = b_v + \sum_k C_{kv}, \qquad
    C_{kv} \leftarrow (1 - \alpha\beta)\, C_{kv} + \alpha w_k (\mathbb{I}\{y_k = v\} - \tilde p_k(v))

from C = 0, and the logits of any h move by :math:`\sum_k (h^\top h_k + 1)\, C_{kv}`, which has rank K (the 1 comes from
the bias, and is left out where there is none). At the first step :math:`\tilde p_k` is the model's distribution, the
same for every query, and the pull to θ is zero. So for Q queries and M keys the change is one product of a Q × M
matrix, with K entries in each row, and the M × V matrix of :math:`\mathbb{I}\{y_k = v\} - p_k(v)`.
:mod:`hebbian_softmax.memory.further` makes the later steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hebbian_softmax.memory.passes import errors_of


@dataclass(frozen=True)
class Layer:
    """The output layer, used in tiles of classes."""

    weight: Tensor
    bias: Tensor | None
    product_dtype: torch.dtype
    """The dtype in which further steps multiply."""

    @property
    def classes(self) -> int:
        """The number of classes."""
        return self.weight.shape[0]

    def tiles(self, width: int) -> Iterator[range]:
        """Yield the classes in tiles of ``width``."""
        for low in range(0, self.classes, width):
            yield range(low, min(low + width, self.classes))

    def logits(self, h: Tensor, tile: range, width: int | None = None) -> Tensor:
        """Return the logits (N, len(tile)) of activations (N, d); or (N, width), those beyond the tile -inf."""
        z = h.new_empty(h.shape[0], len(tile) if width is None else width)
        z[:, len(tile) :] = -torch.inf
        inside = z[:, : len(tile)]
        torch.mm(h, self.weight[tile.start : tile.stop].T, out=inside)
        if self.bias is not None:
            inside.add_(self.bias[tile.start : tile.stop])
        return z

    def kernel(self, h: Tensor, keys: Tensor) -> Tensor:
        """Return h·k + 1, by which a unit of C moves the logit of h: (Q, M), or (Q, n, m) for (Q, n, d) and (Q, m, d).

        Without a bias it is h·k.
        """
        inner = h @ keys.mT
        return inner if self.bias is None else inner.add_(1)


@dataclass(frozen=True)
class Neighbours:
    """Q queries (Q, d), each with K neighbours among M keys (M, d)."""

    queries: Tensor
    keys: Tensor
    labels: Tensor
    """The classes of the keys, (M,)."""
    normalisers: Tensor
    """log Σ_v exp(z_v) of the keys under the model, (M,)."""
    indices: Tensor
    """Which keys are the neighbours of each query, (Q, K)."""
    weights: Tensor
    """w_k, (Q, K); those of a query sum to 1, or to 0 where it has no neighbour."""

    def part(self, low: int, high: int) -> Neighbours:
        """Return the same for the queries ``low`` … ``high`` - 1 only."""
        part = slice(low, high)
        return replace(self, queries=self.queries[part], indices=self.indices[part], weights=self.weights[part])

    def compact(self) -> Neighbours:
        """Return the same without the keys that are no neighbour of any query."""
        used, indices = self.indices.unique(return_inverse=True)
        known = {"keys": self.keys[used], "labels": self.labels[used], "normalisers": self.normalisers[used]}
        return replace(self, indices=indices, **known)


def one_step(layer: Layer, near: Neighbours, rate: float, width: int) -> Iterator[tuple[range, Tensor]]:
    """Yield the logits (Q, tile) of the queries after one step, tile by tile, in 2QMV + 2(Q + M)dV operations."""
    change = step_of(near, shares_of(layer, near)).mul_(rate)
    for tile in layer.tiles(width):
        yield tile, layer.logits(near.queries, tile).addmm_(change, _model_errors(layer, near, tile))


def one_step_grid(
    layer: Layer, nears: Sequence[Neighbours], rates: Sequence[float], width: int
) -> Iterator[tuple[range, Iterator[Tensor]]]:
    """Yield for each tile the logits after one step for every pair of neighbours and rate, the rates innermost.

    All sets of neighbours are among the same keys, so they share the keys' softmaxes. All rates share the change of the
    logits, which is proportional to the rate. The logits of all pairs share their memory, so the caller must use those
    of one pair before asking for the next.
    """
    changes = [step_of(near, shares_of(layer, near)) for near in nears]
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


def shares_of(layer: Layer, near: Neighbours) -> Tensor:
    """Return w_k (h·h_k + 1) of the neighbours, (Q, K), by which their errors move the logits of the query."""
    return layer.kernel(near.queries, near.keys).gather(1, near.indices).mul_(near.weights)


def step_of(near: Neighbours, shares: Tensor) -> Tensor:
    """Return the shares of all keys, (Q, M): 0 for those that are no neighbour of the query."""
    step = shares.new_zeros(near.queries.shape[0], near.keys.shape[0])
    return step.scatter_(1, near.indices, shares)


def _model_errors(layer: Layer, near: Neighbours, tile: range) -> Tensor:
    """Return 1{y = v} − p(v) of all keys under the model, (M, tile)."""
    log_prob = layer.logits(near.keys, tile).sub_(near.normalisers.unsqueeze(1))
    return errors_of(log_prob, near.labels - tile.start)


class TargetLogProb:
    """log p of the targets, from logits that come for some of the queries and one tile of classes at a time."""

    def __init__(self, targets: Tensor, like: Tensor) -> None:
        self.targets = targets
        self.normaliser = like.new_full(targets.shape, -torch.inf)
        self.at_target = torch.zeros_like(self.normaliser)

    def add(self, part: slice, tile: range, logits: Tensor) -> None:
        """Take in the logits of some queries and one tile."""
        self.normaliser[part] = torch.logaddexp(self.normaliser[part], logits.logsumexp(1))
        column = self.targets[part] - tile.start
        inside = (column >= 0) & (column < len(tile))
        value = logits.gather(1, column.clamp(0, len(tile) - 1).unsqueeze(1)).squeeze(1)
        self.at_target[part] = torch.where(inside, value, self.at_target[part])

    @property
    def value(self) -> Tensor:
        """log p of the targets, once all tiles were taken in."""
        return self.at_target - self.normaliser
