r"""The cache of a whole sequence as a banded matrix product.

Position t attends to the n positions before it, which is a band below the diagonal of :math:`H H^\top`. The band is
computed in tiles. Of each row and θ only two pairs are kept, the largest score m and the sum s: over all of the row's
entries, and over the entries that hold the row's target y:

.. math::
    m = \max_i h_t^\top h_i, \qquad s = \sum_i e^{\theta (h_t^\top h_i - m)}, \qquad
    \log p_c(y_t \mid h_t) = \theta (m_y - m) + \log s_y - \log s, \qquad t - n \le i < t

Scores are multiplied by θ only after m is subtracted, so no θ can overflow.

Windows of several sizes :math:`n_1 < n_2 < \dots` are nested. So the band is cut into rings of lags :math:`(n_{l-1},
n_l]`, which are taken in one after the other: a sweep over sizes costs as much as its largest size, and a sweep over θ
needs no further products.

On a GPU, a kernel computes the band of one θ and one size in half precision (:mod:`hebbian_softmax.memory.gpu.cache`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hebbian_softmax import _triton
from hebbian_softmax.loss.dtypes import wide
from hebbian_softmax.memory.history import Timeline
from hebbian_softmax.memory.products import wide_bmm

Kernel = Callable[[Timeline, float, int, int], Tensor]
"""A function that returns log p_c of a timeline's targets, (B, T), for one θ and one size within a workspace."""

_KERNEL_THETAS = 1e-30, 2500.0
"""The θ for which the kernel works: with them θ h·h stays in the range of float32 (``checks.check_activations``)."""


class RunningSums:
    """The largest score m and Σ exp(θ (s - m)) over the last dimension of scores s that come in tiles, for several θ.

    Where there are no scores, the sum is 0 and m is the lowest number, with which no difference is NaN.
    """

    def __init__(self, rows: Sequence[int], thetas: Sequence[float], like: Tensor) -> None:
        self.thetas = thetas
        self.largest = like.new_full(tuple(rows), torch.finfo(like.dtype).min)
        self.sums = like.new_zeros(len(thetas), *rows)

    def add(self, scores: Tensor) -> None:
        """Take in a tile of scores; those of -inf do not count."""
        largest = torch.maximum(self.largest, scores.amax(-1))
        change, below = self.largest - largest, scores - largest.unsqueeze(-1)
        for total, theta in zip(self.sums, self.thetas, strict=True):
            total.mul_((change * theta).exp_()).add_((below * theta).exp_().sum(-1))
        self.largest = largest

    def log_share_in(self, every: RunningSums) -> Tensor:
        """Return the log of this part of the sums of ``every``, (len(thetas), ...): -inf without scores.

        It is NaN where ``every`` has no scores either. Where there are scores it is finite, however large θ is.
        """
        thetas = self.sums.new_tensor(self.thetas).reshape(-1, *[1] * self.largest.dim())
        below = (thetas * (self.largest - every.largest)).clamp_(min=torch.finfo(thetas.dtype).min)
        return (below + (self.sums.log() - every.sums.log())).clamp_(max=0)


def banded_log_prob(
    timeline: Timeline,
    thetas: Sequence[float],
    sizes: Sequence[int],
    block: int | None,
    workspace: int,
    kernel: Kernel | None,
) -> Tensor:
    """Return log p_c of the targets, (len(thetas), len(sizes), B, T): -inf where not in the window, NaN without one.

    ``kernel`` computes it where there is one θ, of a usual size, and one window.
    """
    if kernel is not None and len(thetas) == len(sizes) == 1 and _KERNEL_THETAS[0] <= thetas[0] <= _KERNEL_THETAS[1]:
        return kernel(timeline, thetas[0], sizes[0], workspace)[None, None]
    whole = timeline.keys(timeline.start, timeline.end)
    streams, length, _ = whole.shape
    order = sorted(set(sizes))
    result = whole.new_empty(len(thetas), len(sizes), streams, length, dtype=wide(whole.dtype))
    where = [order.index(size) for size in sizes]
    rows, columns = tile_shape(whole, order[-1], block, workspace)
    for first in range(timeline.start, timeline.end, rows):
        last = min(first + rows, timeline.end)
        found = _block(timeline, first, last, thetas, order, columns, result)
        result[..., first - timeline.start : last - timeline.start] = found[:, where]
    return result


def kernel_for(timeline: Timeline) -> Kernel | None:
    """Return the GPU's kernel where it works on this timeline."""
    gpu = _triton.load("memory.gpu.cache") if timeline.sequence[0].is_cuda else None
    return gpu.log_prob if gpu is not None and gpu.available(timeline) else None


def tile_shape(h: Tensor, size: int, block: int | None, workspace: int) -> tuple[int, int]:
    """Return how many queries (rows) and keys (columns) a tile has, for activations (B, T, d).

    Scores of a tile are held about four times over, with 16 bytes of masks, and its keys twice.
    """
    streams, length, features = h.shape
    itemsize = wide(h.dtype).itemsize
    score, key = 4 * streams * itemsize + 16, 2 * streams * features * itemsize
    rows = block or max(1, min(int((workspace / score) ** 0.5), max(64, size // 4), length))
    return rows, max(1, workspace // (rows * score + key))


def _block(
    timeline: Timeline, first: int, last: int, thetas: Sequence[float], sizes: list[int], columns: int, like: Tensor
) -> Tensor:
    """Return log p_c of the queries first … last - 1, (len(thetas), len(sizes), B, last - first)."""
    queries, targets = timeline.keys(first, last), timeline.labels(first, last)
    rows = queries.shape[0], last - first
    every, match = RunningSums(rows, thetas, like), RunningSums(rows, thetas, like)
    found = []
    near = 0
    for far in sizes:
        end = max(0, last - 1 - near)  # One past the newest key that any of the queries reaches.
        for low in range(max(0, first - far), end, columns):
            high = min(low + columns, end)
            scores = wide_bmm(queries, timeline.keys(low, high).mT)
            if first - (high - 1) <= near or last - 1 - low > far:
                t = torch.arange(first, last, device=scores.device).unsqueeze(1)
                lag = t - torch.arange(low, high, device=scores.device)
                scores.masked_fill_((lag <= near) | (lag > far), -torch.inf)
            every.add(scores)
            other = targets.unsqueeze(2) != timeline.labels(low, high).unsqueeze(1)
            match.add(scores.masked_fill_(other, -torch.inf))
        found.append(match.log_share_in(every))
        near = far
    return torch.stack(found, 1)
