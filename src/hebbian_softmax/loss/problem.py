r"""The problem that an engine of the loss is given, and the results that it returns.

An engine is a module with the functions of :class:`Engine`, each over one :class:`Problem`. The logits are

.. math::
    u = h W^\top + \mathrm{bias}, \qquad z = \mathrm{scale} \cdot \mathrm{softcap}(u) + \mathrm{prior}

and the gradient with respect to u is always

.. math::
    dU_i = \mathrm{softcap}'(u_i) \cdot
        \big((a_i + q_i \,\mathrm{lse}_i)\,\mathrm{softmax}(z_i) - b_i \,\mathrm{onehot}(y_i)\big)

with the factors a, b and q (of the z-loss) of :class:`Scales`. With q as part of a, an engine computes the entry of the
target as :math:`(a_i - b_i) - a_i (1 - p_{y_i})`, with :math:`1 - p_{y_i}` summed over the other classes, because 1
minus a rounded probability near 1 would lose the gradient. Class weights, the mean and label smoothing are part of a
and b, so engines do not know them (:mod:`hebbian_softmax.loss.weighting`).

Where ranks share the rows of the matrix, a problem has those of this rank, and an engine exchanges the terms of the
batch's rows (:mod:`hebbian_softmax.loss.ranks`) before it computes gradients with them. Its gradient of h is the share
of this rank's classes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from hebbian_softmax.loss.checks import Options
from hebbian_softmax.loss.dtypes import wide
from hebbian_softmax.rows import RowPart

SMALLEST_SCALE = 1e-30
"""What a scale of the softmax is set to where the z-loss makes it 0, since kernels divide the target's scale by it."""


@dataclass(frozen=True)
class Problem:
    """The operands of one cross-entropy, in the dtype of the matrix products unless it is said otherwise."""

    input: Tensor
    """The activations h, (N, d), contiguous."""
    weight: Tensor
    """The matrix W, (V, d), contiguous; where ranks share its rows, this rank's, or one masked row if it has none."""
    bias: Tensor | None
    """(V,)."""
    target: Tensor
    """The classes y among those of all ranks, (N,), int64; -1 in ignored rows."""
    prior: Tensor | None = None
    """(V,), in the accumulation dtype: a constant that is added to the logits; -inf for classes that are masked."""
    scale: float = 1.0
    """1 / temperature."""
    softcap: float | None = None
    """c of c · tanh(u / c); None for u itself."""
    spread: Tensor | None = None
    """(V,), in the accumulation dtype: where smoothing meets a softcap, the weights of the logits in it, else None."""
    part: RowPart | None = None
    """Which of the rows these are, where ranks share them."""

    @classmethod
    def of(
        cls,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        dtype: torch.dtype,
        options: Options | None = None,
        part: RowPart | None = None,
    ) -> Problem:
        """Return the problem of operands in any dtype and layout, detached; ``target`` is -1 in ignored rows.

        With ``part``, matrix and bias are those of this rank, but the options are of all classes.
        """

        def constant(tensor: Tensor, dtype: torch.dtype = dtype) -> Tensor:
            found = tensor.detach().to(dtype).contiguous()
            # The fused engine needs whole units of 16 bytes, and all ranks take the same engine.
            return found.clone() if part is not None and found.is_cuda and found.data_ptr() % 16 else found

        options = options or Options()
        prior = options.prior
        if part is not None:
            prior = None if prior is None else prior[part.start : part.stop]
            if part.rows == 0:  # Kernels have no tile without a class. This one takes no part.
                weight, bias = weight.new_zeros(1, weight.shape[1]), None if bias is None else bias.new_zeros(1)
                prior = weight.new_full((1,), -torch.inf)
        return cls(
            constant(input),
            constant(weight),
            None if bias is None else constant(bias),
            target,
            None if prior is None else constant(prior, wide(dtype)),
            1 / options.temperature,
            options.softcap,
            part=part,
        )

    @property
    def accumulation_dtype(self) -> torch.dtype:
        """The dtype of sums: at least float32."""
        return wide(self.input.dtype)

    @cached_property
    def column(self) -> Tensor:
        """The row of ``weight`` that is each target's, (N,); outside of it where another rank has that, or none."""
        if self.part is None:
            return self.target
        return self.target - (self.part.start if self.part.rows else self.part.total)  # The masked row is no class.

    @property
    def all_classes(self) -> int:
        """The number of classes of all ranks."""
        return self.weight.shape[0] if self.part is None else self.part.total

    @property
    def planned_classes(self) -> int:
        """The number of classes from which tiles are planned: equal on all ranks, so that they exchange alike."""
        return self.weight.shape[0] if self.part is None else max(self.part.largest, 1)

    def slope_at_target(self, target_logit: Tensor) -> Tensor | None:
        """Return the derivative of the softcap at each target that this rank has, from z[y]; None without a softcap."""
        if self.softcap is None:
            return None
        if self.prior is not None:
            target_logit = target_logit - self.prior[self.column.clamp(0, len(self.prior) - 1)]
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


@dataclass(frozen=True)
class Scales:
    """The factors of each row's gradient, (N,), in the accumulation dtype; 0 in ignored rows.

    All are multiplied by the problem's ``scale``.
    """

    normaliser: Tensor
    """a, the factor of the softmax."""
    target: Tensor
    """b, the factor of the target."""
    smoothing: Tensor | None = None
    """r, the factor of label smoothing: the gradient of z is less r_i · ``spread``, where the problem has one."""
    square: Tensor | None = None
    """q, the factor of the z-loss times the log-normaliser."""
    entropy: Tensor | None = None
    """e, the factor of the entropy: the gradient of z is less e_i · p (log p + H_i)."""

    def with_square(self, normaliser: Tensor) -> Tensor:
        """Return the factor of the softmax with the share of the z-loss, once the normaliser is known."""
        if self.square is None:
            return self.normaliser
        total = self.normaliser + self.square * normaliser
        return total.masked_fill((total == 0) & (self.target != 0), SMALLEST_SCALE)


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

    def default_workspace(self, problem: Problem, needs: Needs) -> int:
        """Return the workspace to use for these gradients where the caller gave none."""

    def row_terms(self, problem: Problem, workspace: int, *, entropy: bool = False) -> RowTerms:
        """Return the terms of every row, with ``entropy`` that one, too, which only the chunked engine has."""

    def row_terms_and_gradients(
        self, problem: Problem, scales: Scales, needs: Needs, workspace: int
    ) -> tuple[RowTerms, Gradients]:
        """Return the terms of every row and the wanted gradients, where possible from the same logits."""

    def gradients(self, problem: Problem, terms: RowTerms, scales: Scales, needs: Needs, workspace: int) -> Gradients:
        """Return the wanted gradients from known terms; the logits are computed again."""
