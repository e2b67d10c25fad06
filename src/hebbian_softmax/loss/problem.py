r"""The problem that an engine of the loss is given, and the results that it returns.

An engine is a module with the functions of :class:`Engine`, each over one :class:`Problem`. The gradient with respect
to the logits z = h Wᵀ + bias + prior is always

.. math::
    dZ_i = a_i \,\mathrm{softmax}(z_i) - b_i \,\mathrm{onehot}(y_i)

with a = ``normaliser_scale`` and b = ``target_scale``, both (N,), in the accumulation dtype, and 0 in ignored rows. An
engine computes the entry of the target as :math:`(a_i - b_i) - a_i (1 - p_{y_i})`, with :math:`1 - p_{y_i}` summed over
the other classes, because 1 minus a rounded probability near 1 would lose the gradient. Class weights, the mean and
label smoothing are part of a and b, so engines do not know them (:mod:`hebbian_softmax.loss.weighting`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from hebbian_softmax.loss.dtypes import wide


@dataclass(frozen=True)
class Problem:
    """The operands of one cross-entropy, in the dtype of the matrix products unless it is said otherwise."""

    input: Tensor
    """The activations h, (N, d), contiguous."""
    weight: Tensor
    """The matrix W, (V, d), contiguous."""
    bias: Tensor | None
    """(V,)."""
    target: Tensor
    """The classes y, (N,), int64; -1 in ignored rows."""
    prior: Tensor | None = None
    """(V,), in the accumulation dtype: a constant that is added to the logits; -inf for classes that are masked."""

    @classmethod
    def of(
        cls,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        dtype: torch.dtype,
        prior: Tensor | None = None,
    ) -> Problem:
        """Return the problem of operands in any dtype and layout, detached; ``target`` is -1 in ignored rows."""

        def constant(tensor: Tensor, dtype: torch.dtype = dtype) -> Tensor:
            return tensor.detach().to(dtype).contiguous()

        return cls(
            constant(input),
            constant(weight),
            None if bias is None else constant(bias),
            target,
            None if prior is None else constant(prior, wide(dtype)),
        )

    @property
    def accumulation_dtype(self) -> torch.dtype:
        """The dtype of sums: at least float32."""
        return wide(self.input.dtype)


@dataclass(frozen=True)
class RowTerms:
    """The terms of each row's loss, in the accumulation dtype; 0 in ignored rows."""

    nll: Tensor
    """(N,): logsumexp(z) - z[y], computed without cancellation near p = 1."""
    target_logit: Tensor
    """(N,): z[y]."""
    normaliser: Tensor
    """(N,): logsumexp(z). It is finite even where the target is impossible, with z[y] = -inf and infinite nll."""


@dataclass(frozen=True)
class Needs:
    """The dtype in which each gradient is wanted; None where that gradient is not wanted."""

    input: torch.dtype | None
    weight: torch.dtype | None
    bias: torch.dtype | None

    def any(self) -> bool:
        """Return whether any gradient is wanted."""
        return not (self.input is None and self.weight is None and self.bias is None)


@dataclass(frozen=True)
class Gradients:
    """The gradients of the three operands; None where they were not wanted."""

    input: Tensor | None
    weight: Tensor | None
    bias: Tensor | None


class Engine(Protocol):
    """The functions that chunked.py and gpu/engine.py have in common. ``workspace`` is in bytes."""

    def default_workspace(self, problem: Problem) -> int:
        """Return the workspace to use where the caller gave none."""

    def row_terms(self, problem: Problem, workspace: int) -> RowTerms:
        """Return the terms of every row."""

    def row_terms_and_gradients(
        self, problem: Problem, normaliser_scale: Tensor, target_scale: Tensor, needs: Needs, workspace: int
    ) -> tuple[RowTerms, Gradients]:
        """Return the terms of every row and the wanted gradients, where possible from the same logits."""

    def gradients(
        self,
        problem: Problem,
        terms: RowTerms,
        normaliser_scale: Tensor,
        target_scale: Tensor,
        needs: Needs,
        workspace: int,
    ) -> Gradients:
        """Return the wanted gradients from known terms; the logits are computed again."""
