r"""The problem that an engine of the loss is given, and the results that it returns.

An engine is a module with the functions of :class:`Engine`, each over one :class:`Problem`. The logits are

.. math::
    u = h W^\top + \mathrm{bias}, \qquad z = \mathrm{scale} \cdot \mathrm{softcap}(u) + \mathrm{prior}

and the gradient with respect to u is always

.. math::
    dU_i = \mathrm{softcap}'(u_i) \cdot
        \big((a_i + q_i \,\mathrm{lse}_i)\,\mathrm{softmax}(z_i) - b_i \,\mathrm{onehot}(y_i)\big)

with a = ``normaliser_scale``, b = ``target_scale`` and q = ``square_scale`` (of the z-loss; 0 where it is not given).
All are (N,), in the accumulation dtype, 0 in ignored rows, and multiplied by ``scale``. With q as part of a, an
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
from hebbian_softmax.loss.options import Options

SMALLEST_SCALE = 1e-30
"""What a scale of the softmax is set to where the z-loss makes it 0, since kernels divide the target's scale by it."""


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
    scale: float = 1.0
    """1 / temperature."""
    softcap: float | None = None
    """c of c · tanh(u / c); None for u itself."""
    spread: Tensor | None = None
    """(V,), in the accumulation dtype: where smoothing meets a softcap, the weights of the logits in it, else None."""

    @classmethod
    def of(
        cls,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        dtype: torch.dtype,
        options: Options | None = None,
    ) -> Problem:
        """Return the problem of operands in any dtype and layout, detached; ``target`` is -1 in ignored rows."""

        def constant(tensor: Tensor, dtype: torch.dtype = dtype) -> Tensor:
            return tensor.detach().to(dtype).contiguous()

        options = options or Options()
        return cls(
            constant(input),
            constant(weight),
            None if bias is None else constant(bias),
            target,
            None if options.prior is None else constant(options.prior, wide(dtype)),
            1 / options.temperature,
            options.softcap,
        )

    @property
    def accumulation_dtype(self) -> torch.dtype:
        """The dtype of sums: at least float32."""
        return wide(self.input.dtype)

    def slope_at_target(self, target_logit: Tensor) -> Tensor | None:
        """Return the derivative of the softcap at each target, from z[y]; None without a softcap."""
        if self.softcap is None:
            return None
        if self.prior is not None:
            target_logit = target_logit - self.prior[self.target.clamp(min=0)]
        return 1 - (target_logit / (self.scale * self.softcap)) ** 2


@dataclass(frozen=True)
class RowTerms:
    """The terms of each row's loss, in the accumulation dtype; 0 in ignored rows."""

    nll: Tensor
    """(N,): logsumexp(z) - z[y], computed without cancellation near p = 1."""
    target_logit: Tensor
    """(N,): z[y]."""
    normaliser: Tensor
    """(N,): logsumexp(z). It is finite even where the target is impossible, with z[y] = -inf and infinite nll."""
    spread: Tensor | None = None
    """(N,): Σ_v spread_v z_v; None where the problem has no ``spread``."""
    entropy: Tensor | None = None
    """(N,): -Σ_v p_v log p_v; None where it was not asked for."""


def add_square(
    normaliser_scale: Tensor, target_scale: Tensor, square_scale: Tensor | None, normaliser: Tensor
) -> Tensor:
    """Return the scale of the softmax with the share of the z-loss, once the normaliser is known."""
    if square_scale is None:
        return normaliser_scale
    total = normaliser_scale + square_scale * normaliser
    return total.masked_fill((total == 0) & (target_scale != 0), SMALLEST_SCALE)


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

    def row_terms(self, problem: Problem, workspace: int, *, entropy: bool = False) -> RowTerms:
        """Return the terms of every row, with ``entropy`` that one, too, which only the chunked engine has."""

    def row_terms_and_gradients(
        self,
        problem: Problem,
        normaliser_scale: Tensor,
        target_scale: Tensor,
        needs: Needs,
        workspace: int,
        *,
        square_scale: Tensor | None = None,
        spread_scale: Tensor | None = None,
    ) -> tuple[RowTerms, Gradients]:
        """Return the terms of every row and the wanted gradients, where possible from the same logits.

        With ``spread_scale`` r, (N,), the gradient of z is less r_i · ``spread``.
        """

    def gradients(
        self,
        problem: Problem,
        terms: RowTerms,
        normaliser_scale: Tensor,
        target_scale: Tensor,
        needs: Needs,
        workspace: int,
        *,
        spread_scale: Tensor | None = None,
        entropy_scale: Tensor | None = None,
    ) -> Gradients:
        """Return the wanted gradients from known terms; the logits are computed again.

        The share of the z-loss is part of ``normaliser_scale`` here. With ``entropy_scale`` e, (N,), the gradient of z
        is less e_i · p (log p + H_i).
        """
