"""NeuralCache: the last n activations and the classes that followed them (the paper's equation 1)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hebbian_softmax.checks import check_integer
from hebbian_softmax.loss.dtypes import wide
from hebbian_softmax.memory import checks
from hebbian_softmax.memory.banded import RunningSums, banded_log_prob, kernel_for, tile_shape
from hebbian_softmax.memory.history import Memory, Timeline
from hebbian_softmax.memory.products import wide_bmm


class NeuralCache(Memory):
    r"""A distribution over the classes that followed similar activations in the last n steps (Grave et al. 2016).

    .. math::
        p_c(w \mid h_t) \propto \sum_{i = t - n}^{t - 1} e^{\theta\, h_t^\top h_i} \, \mathbb{I}\{y_i = w\}

    This is the paper's equation 1. The cache predicts from the first stored entry on. While nothing is stored there is
    no distribution: probabilities are NaN (0/0), and :func:`~hebbian_softmax.memory.mix` then leaves those of the
    model. A class that is not in the cache has log-probability -inf.

    Activations are (d,), (T, d) for one stream, or (B, T, d) for B independent streams. Targets have the same shape
    without the last dimension. Products and sums use at least float32.

    Args:
        size: n, the number of entries that each stream keeps.
        theta: θ, the inverse temperature, above 0 and within the range of float32. The larger it is, the more of the
            distribution goes to the entries with the largest inner product, and it may go there entirely.

    >>> cache = NeuralCache(size=2000, theta=0.3)
    >>> h, targets = torch.randn(5, 8), torch.tensor([3, 1, 3, 3, 7])
    >>> log_prob = cache.sequence_log_prob(h, targets)  # Each position sees the ones before it.
    >>> log_prob.isnan().tolist(), log_prob.isinf().tolist()
    ([True, False, False, False, False], [False, True, False, False, True])
    >>> len(cache)
    5
    """

    def __init__(self, size: int, theta: float) -> None:
        self.size = check_integer("size", size, 1)
        self.theta = checks.check_positive("theta", theta)
        super().__init__(self.size)

    def __repr__(self) -> str:
        return f"NeuralCache(size={self.size}, theta={self.theta:g})"

    @checks.evaluating
    def log_prob(self, h: Tensor, targets: Tensor, *, workspace: int | None = None) -> Tensor:
        """Return log p_c(target | h) given the entries stored now, which every position of ``h`` sees alike."""
        streams, labels = self._checked(h, targets)
        keys, stored = self._history.window(streams)
        parts = []
        rows, columns = tile_shape(streams, self.size, None, checks.check_workspace(workspace, h.device))
        for queries, wanted in zip(streams.split(rows, 1), labels.split(rows, 1), strict=True):
            like = queries.new_empty(0, dtype=wide(h.dtype))
            every, match = (RunningSums(wanted.shape, [self.theta], like) for _ in range(2))
            for near, classes in zip(keys.split(columns, 1), stored.split(columns, 1), strict=True):
                if near.shape[1]:
                    scores = wide_bmm(queries, near.mT)
                    every.add(scores)
                    match.add(scores.masked_fill_(wanted.unsqueeze(2) != classes.unsqueeze(1), -torch.inf))
            parts.append(match.log_share_in(every)[0])
        return torch.cat(parts, 1).reshape(targets.shape)

    @checks.evaluating
    def probabilities(self, h: Tensor, num_classes: int) -> Tensor:
        """Return p_c(· | h) given the entries stored now, (..., num_classes)."""
        num_classes = check_integer("num_classes", num_classes, 1)
        streams = checks.check_activations(h)
        self._history.check(streams)
        keys, stored = self._history.window(streams)
        checks.check_classes("the stored targets, with num_classes", stored, num_classes)
        result = streams.new_zeros(*streams.shape[:2], num_classes, dtype=wide(h.dtype))
        if len(self) == 0:
            return result.fill_(torch.nan).reshape(*h.shape[:-1], num_classes)
        rows, columns = tile_shape(streams, len(self), None, checks.check_workspace(None, h.device))
        rows = max(1, rows * columns // len(self))
        for queries, part in zip(streams.split(rows, 1), result.split(rows, 1), strict=True):
            scores = wide_bmm(queries, keys.mT)
            attention = scores.sub_(scores.amax(-1, keepdim=True)).mul_(self.theta).softmax(-1)
            part.scatter_add_(2, stored.unsqueeze(1).expand(attention.shape), attention)
        return result.reshape(*h.shape[:-1], num_classes)

    @checks.evaluating
    def sequence_log_prob(
        self,
        h: Tensor,
        targets: Tensor,
        *,
        thetas: Sequence[float] | None = None,
        sizes: Sequence[int] | None = None,
        block: int | None = None,
        workspace: int | None = None,
    ) -> Tensor:
        """Return log p_c of each target given the n positions before it, and store the sequence.

        The result is that of ``log_prob`` followed by ``observe``, position by position: the entries stored before
        the sequence count, too.

        Args:
            thetas: several θ at once, from the same products; the result is then (len(thetas), ...).
            sizes: several n at once, each at most ``size``; the result is then (..., len(sizes), *targets.shape).
            block: the number of positions computed together. Speed and memory depend on it; the result does not. The
                GPU's kernel, for one θ and one n in half precision, does not use it.
            workspace: the bytes that may be held besides inputs and results, approximately: one column of a block is
                always held. The default is 32 MiB on a CPU and 1 GiB on a GPU.

        >>> cache = NeuralCache(size=100, theta=0.3)
        >>> h, targets = torch.randn(50, 8), torch.randint(10, (50,))
        >>> cache.sequence_log_prob(h, targets, thetas=[0.1, 0.2, 0.3], sizes=[10, 100]).shape
        torch.Size([3, 2, 50])
        """
        streams, labels = self._checked(h, targets)
        chosen = [self.theta] if thetas is None else checks.check_list("thetas", thetas)
        chosen = [checks.check_positive("thetas", theta) for theta in chosen]
        windows = [self.size] if sizes is None else checks.check_list("sizes", sizes)
        windows = [check_integer("sizes", size, 1) for size in windows]
        if max(windows) > self.size:
            raise ValueError(f"sizes must be at most the cache's size, {self.size}, got {max(windows)}")
        block = None if block is None else check_integer("block", block, 1)
        workspace = checks.check_workspace(workspace, h.device)
        timeline = Timeline(self._history.window(streams), (streams, labels))
        found = banded_log_prob(timeline, chosen, windows, block, workspace, kernel_for(timeline))
        self._history.append(streams, labels)
        found = found.reshape(*found.shape[:2], *targets.shape)
        if sizes is None:
            found = found.squeeze(1)
        return found.squeeze(0) if thetas is None else found
