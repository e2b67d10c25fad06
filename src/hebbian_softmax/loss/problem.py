r"""What an engine is given and what it returns.

An engine is a module with three functions over one :class:`Problem`: ``row_terms``, ``row_terms_and_gradients`` and
``gradients``. All of them speak of the same gradient with respect to the logits z = h Wᵀ + bias,

.. math::
    dZ_i = a_i \,\mathrm{softmax}(z_i) - b_i \,\mathrm{onehot}(y_i)

with a = ``normaliser_scale`` and b = ``target_scale``, both (N,), in the accumulation dtype, and 0 in ignored rows. The
entry of the target is :math:`(a_i - b_i) - a_i (1 - p_{y_i})`, with :math:`1 - p_{y_i}` from the other classes: 1 minus
a rounded probability near 1 would lose the gradient. Class weights, the mean and label smoothing are folded into a and
b around the engines.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class Problem:
    """One cross-entropy, everything in the dtype the products run in."""

    input: Tensor
    """(N, d), contiguous."""
    weight: Tensor
    """(V, d), row-contiguous."""
    bias: Tensor | None
    """(V,)."""
    target: Tensor
    """(N,), int64; -1 where ignored."""

    @classmethod
    def of(cls, input: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, dtype: torch.dtype) -> Problem:
        """Of constants in any dtype and layout, with target -1 where ignored."""

        def constant(tensor: Tensor) -> Tensor:
            return tensor.detach().to(dtype).contiguous()

        return cls(constant(input), constant(weight), None if bias is None else constant(bias), target)

    @property
    def accumulation_dtype(self) -> torch.dtype:
        return torch.promote_types(self.input.dtype, torch.float32)


@dataclass(frozen=True)
class RowTerms:
    """What is known of each row, in the accumulation dtype; 0 in ignored rows."""

    nll: Tensor
    """(N,): logsumexp(z) - z[y], computed without cancellation near p = 1."""
    target_logit: Tensor
    """(N,): z[y]."""
    normaliser: Tensor
    """(N,): logsumexp(z); finite also where the target is impossible, z[y] = -inf, and nll infinite."""


@dataclass(frozen=True)
class Needs:
    """The dtype each gradient is wanted in; None where it is not wanted."""

    input: torch.dtype | None
    weight: torch.dtype | None
    bias: torch.dtype | None

    def any(self) -> bool:
        return not (self.input is None and self.weight is None and self.bias is None)


@dataclass(frozen=True)
class Gradients:
    input: Tensor | None
    weight: Tensor | None
    bias: Tensor | None


class Engine(Protocol):
    """What chunked.py and fused.py have in common. ``workspace`` is in bytes."""

    def row_terms(self, problem: Problem, workspace: int) -> RowTerms: ...

    def row_terms_and_gradients(
        self, problem: Problem, normaliser_scale: Tensor, target_scale: Tensor, needs: Needs, workspace: int
    ) -> tuple[RowTerms, Gradients]: ...

    def gradients(
        self,
        problem: Problem,
        terms: RowTerms,
        normaliser_scale: Tensor,
        target_scale: Tensor,
        needs: Needs,
        workspace: int,
    ) -> Gradients: ...
