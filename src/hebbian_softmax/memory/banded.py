r"""The cache of a whole sequence as a banded matrix product.

Position t attends to the n positions before it, a band below the diagonal of :math:`H H^\top`. The band is worked
through in tiles. Of each only two numbers a row and θ are kept, the running log-sum-exp over all of its
entries and over those that hold the row's target:

.. math::
    \log p_c(y_t \mid h_t) = \log \sum_{i:\, y_i = y_t} e^{\theta h_t^\top h_i} - \log \sum_i e^{\theta h_t^\top h_i},
    \qquad t - n \le i < t

Windows of several sizes :math:`n_1 < n_2 < \dots` are nested: the band is cut into rings of lags
:math:`(n_{l-1}, n_l]`, whose sums add up. A sweep over sizes so costs as much as its largest size, and one over θ needs
no further products.

On a GPU, one θ and one size in half precision are left to a kernel (:mod:`hebbian_softmax.memory.fused`).
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from hebbian_softmax.memory.checks import wide_dtype
from hebbian_softmax.memory.history import Timeline


class RunningLogSumExp:
    """log Σ exp(θ s) over the last dimension of scores that come in tiles, for several θ; -inf where all were."""

    def __init__(self, rows: Sequence[int], thetas: Sequence[float], like: Tensor) -> None:
        self.thetas = thetas
        self.value = like.new_full((len(thetas), *rows), -torch.inf)

    def add(self, scores: Tensor) -> None:
        for value, theta in zip(self.value, self.thetas, strict=True):
            torch.logaddexp(value, (scores * theta).logsumexp(-1), out=value)


def scores_of(queries: Tensor, keys: Tensor) -> Tensor:
    """Inner products (B, q, k) in at least float32; CUDA multiplies half precision as it is, and sums in float32."""
    dtype = wide_dtype(queries)
    if queries.dtype != dtype and queries.is_cuda:
        return torch.bmm(queries, keys.mT, out_dtype=dtype)
    return torch.bmm(queries.to(dtype), keys.to(dtype).mT)


def banded_log_prob(
    timeline: Timeline, thetas: Sequence[float], sizes: Sequence[int], block: int | None, workspace: int
) -> Tensor:
    """log p_c of the targets (len(thetas), len(sizes), B, T): -inf where not in the window, NaN where that is empty."""
    engine = fused(timeline) if len(thetas) == len(sizes) == 1 else None
    if engine is not None:
        single: Tensor = engine.log_prob(timeline, thetas[0], sizes[0], workspace)
        return single[None, None]
    whole = timeline.keys(timeline.start, timeline.end)
    streams, length, _ = whole.shape
    order = sorted(set(sizes))
    result = whole.new_empty(len(thetas), len(sizes), streams, length, dtype=wide_dtype(whole))
    where = [order.index(size) for size in sizes]
    rows, columns = tile_shape(whole, order[-1], block, workspace)
    for first in range(timeline.start, timeline.end, rows):
        last = min(first + rows, timeline.end)
        found = _block(timeline, first, last, thetas, order, columns, result)
        result[..., first - timeline.start : last - timeline.start] = found[:, where]
    return result


def fused(timeline: Timeline) -> Any:
    """The module whose kernel suits this timeline, if there is one."""
    engine = _triton() if timeline.sequence[0].is_cuda else None
    return engine if engine is not None and engine.available(timeline) else None


@cache
def _triton() -> Any:
    """Imported when it is first wanted: Triton is not everywhere, and takes long to import."""
    try:
        return importlib.import_module("hebbian_softmax.memory.fused")
    except ImportError:
        return None


def tile_shape(h: Tensor, size: int, block: int | None, workspace: int) -> tuple[int, int]:
    """Queries (rows) and keys (columns) of a tile for activations (B, T, d).

    Its scores are held about four times over, with 16 bytes of masks, and its keys twice.
    """
    streams, length, features = h.shape
    itemsize = wide_dtype(h).itemsize
    score, key = 4 * streams * itemsize + 16, 2 * streams * features * itemsize
    rows = block or max(1, min(int((workspace / score) ** 0.5), max(64, size // 4), length))
    return rows, max(1, workspace // (rows * score + key))


def _block(
    timeline: Timeline, first: int, last: int, thetas: Sequence[float], sizes: list[int], columns: int, like: Tensor
) -> Tensor:
    """(len(thetas), len(sizes), B, last - first) for the queries first … last - 1."""
    queries, targets = timeline.keys(first, last), timeline.labels(first, last)
    rows = queries.shape[0], last - first
    every = like.new_full((len(thetas), *rows), -torch.inf)
    match = every.clone()
    found = []
    near = 0
    for far in sizes:
        ring = RunningLogSumExp(rows, thetas, like), RunningLogSumExp(rows, thetas, like)
        end = max(0, last - 1 - near)  # the newest key that any of the queries reaches, and one
        for low in range(max(0, first - far), end, columns):
            high = min(low + columns, end)
            scores = scores_of(queries, timeline.keys(low, high))
            if first - (high - 1) <= near or last - 1 - low > far:
                t = torch.arange(first, last, device=scores.device).unsqueeze(1)
                lag = t - torch.arange(low, high, device=scores.device)
                scores.masked_fill_((lag <= near) | (lag > far), -torch.inf)
            ring[0].add(scores)
            other = targets.unsqueeze(2) != timeline.labels(low, high).unsqueeze(1)
            ring[1].add(scores.masked_fill_(other, -torch.inf))
        every, match = torch.logaddexp(every, ring[0].value), torch.logaddexp(match, ring[1].value)
        found.append((match - every).clamp_max(0))  # rounding aside; -inf - -inf = NaN where there is no window
        near = far
    return torch.stack(found, 1)
