"""The three passes over the logits of neighbours that a further step of MbPA needs, in torch.

The logits of the K neighbours of R queries under their adapted layers are R × K × V numbers: the model's logits of the
keys, which all queries share, and a change. Both are read in each pass and their sum is never stored.
:mod:`hebbian_softmax.memory.gpu.passes` has the same functions as kernels.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

COPIES = 2
"""How many R × K × V matrices a pass makes besides its result."""


@dataclass(frozen=True)
class Moved:
    """The logits model[indices] + change of R queries' K neighbours, for one tile of classes."""

    model: Tensor
    """The logits of all keys under the model, (M, tile)."""
    indices: Tensor
    """Which keys are the neighbours, (R, K)."""
    columns: Tensor
    """Where in the tile the neighbours' own classes are, (R, K); outside of it, if they are in another tile."""
    change: Tensor | None = None
    """The change of the neighbours' logits, (R, K, tile); None is 0."""

    def logits(self) -> Tensor:
        """Return the sum, (R, K, tile)."""
        gathered = self.model.index_select(0, self.indices.flatten()).reshape(*self.indices.shape, -1)
        return gathered if self.change is None else gathered.add_(self.change)


def log_sum_exp(moved: Moved) -> Tensor:
    """Return the log-sum-exp of the logits over the tile, (R, K)."""
    return moved.logits().logsumexp(2)


def errors(moved: Moved, normalisers: Tensor, dtype: torch.dtype) -> Tensor:
    """Return 1{y = v} − p(v) of the neighbours, (R, K, tile), where log p is the logits less ``normalisers``."""
    return errors_of(moved.logits().sub_(normalisers.unsqueeze(2)), moved.columns).to(dtype)


def weighted_errors(moved: Moved, normalisers: Tensor, weights: Tensor) -> Tensor:
    """Return Σ_k weights_k (1{y_k = v} − p_k(v)) of each query, (R, tile), for weights (R, K)."""
    found = errors(moved, normalisers, normalisers.dtype)
    return torch.bmm(weights.unsqueeze(1), found).squeeze(1)


def errors_of(log_prob: Tensor, columns: Tensor) -> Tensor:
    """Return 1{y = v} − p(v) for log p (..., tile), in its memory; ``columns`` (...) is as in :class:`Moved`."""
    errors = log_prob.exp_().neg_()
    last = errors.shape[-1] - 1
    inside = (columns >= 0) & (columns <= last)
    return errors.scatter_add_(-1, columns.clamp(0, last).unsqueeze(-1), inside.unsqueeze(-1).to(errors.dtype))
