r"""Class weights, token weights, the mean, label smoothing and the z-loss, for any engine.

With class weights w (1 without), smoothing ε and V classes, :math:`\Omega = \sum_v w_v`, :math:`u = \sum_v w_v W_v` and
:math:`c = \sum_v w_v (\mathrm{bias}_v + \mathrm{prior}_v)`, a row that is not ignored has the loss of
``F.cross_entropy``,

.. math::
    \ell_i = (1 - ε)\, w_{y_i}\, \mathrm{nll}_i + \frac{ε}{V} (\Omega\, \mathrm{lse}_i - h_i \cdot u - c).

So for an upstream gradient :math:`g_i` and :math:`r_i = g_i ε / V`, the gradient of the logits is that of the engines
with :math:`b_i = (1 - ε) w_{y_i} g_i` and :math:`a_i = b_i + \Omega r_i`, less :math:`r_i w`. The latter has rank one
and is never built. Smoothing goes to the classes that the prior does not mask: V is their number, and w is 0 elsewhere.

The z-loss ζ adds :math:`ζ\, \mathrm{lse}_i^2` to the loss of a row, and :math:`2 ζ g_i\, \mathrm{lse}_i` to a. Then the
weight of the row's token multiplies all of it. A temperature divides the logits but not the prior, and all factors of
the gradient. A softcap changes the sum :math:`h_i \cdot u + c` and makes :math:`r_i w` a matrix of full rank, so the
chunked engine computes both.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hebbian_softmax.loss.checks import Options
from hebbian_softmax.loss.problem import Gradients, Problem, RowTerms, Scales

_BLOCK = {"cpu": 2**20, "cuda": 2**25}
"""The number of elements that are converted to the accumulation dtype at a time: on a CPU those that stay in its cache,
on a GPU enough to make launches rare, in less memory than the default workspace, which is free again by then."""


@dataclass(frozen=True)
class Weighting:
    """How the losses of rows are made of their terms, and summed."""

    class_weight: Tensor | None = None
    """(V,), in the accumulation dtype; of the classes of all ranks."""
    smoothing: float = 0.0
    token_weight: Tensor | None = None
    """(N,), in the accumulation dtype."""
    z_loss: float = 0.0
    prior: Tensor | None = None
    """(V,), of the classes of all ranks; masked ones have no share of the smoothing."""

    @classmethod
    def of(cls, options: Options, dtype: torch.dtype) -> Weighting:
        """Return the weighting that the options of a loss ask for, in the accumulation dtype."""
        class_weight = None if options.weight is None else options.weight.to(dtype)
        token_weight = None if options.token_weight is None else options.token_weight.reshape(-1).to(dtype)
        return cls(class_weight, float(options.label_smoothing), token_weight, float(options.z_loss), options.prior)

    def completed(self, problem: Problem) -> Problem:
        """Return the problem with the weights that an engine needs for label smoothing behind a softcap."""
        if problem.softcap is None or not self.smoothing:
            return problem
        return replace(problem, spread=self._weights(problem))

    def row_weight(self, target: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the weight of each row's class; 0 in ignored rows."""
        counted = target >= 0
        if self.class_weight is None:
            return counted.to(dtype)
        return torch.where(counted, self.class_weight[target.clamp(min=0)], 0)

    def total_weight(self, target: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the sum of all rows' weights."""
        if self.class_weight is None and self.token_weight is None:
            return (target >= 0).sum(dtype=dtype)
        weight = self.row_weight(target, dtype)
        return (weight if self.token_weight is None else weight * self.token_weight).sum()

    def scales(self, problem: Problem, upstream: Tensor) -> Scales:
        """Return the factors for a gradient ``upstream`` of each row's loss, () or (N,)."""
        if self.token_weight is not None:
            upstream = upstream * self.token_weight
        if problem.scale != 1:
            upstream = upstream * problem.scale
        # A product with the mask would be NaN where upstream is infinite, in a mean over no target.
        counted = problem.target >= 0
        weight = upstream if self.class_weight is None else self.row_weight(problem.target, upstream.dtype) * upstream
        b = torch.where(counted, weight, 0)
        square = torch.where(counted, upstream * (2 * self.z_loss), 0) if self.z_loss else None
        if not self.smoothing:
            return Scales(b, b, None, square)
        b = (1 - self.smoothing) * b
        r = torch.where(counted, upstream * (self.smoothing / self._possible_classes(problem)), 0)
        return Scales(b + r * self._total(problem), b, r, square)

    def sum_of_rows(self, problem: Problem) -> Tensor | None:
        """Return u, the weighted sum of the matrix's rows, (d,); None where label smoothing does not need it."""
        if not self.smoothing or problem.spread is not None:
            return None
        if problem.weight.is_cuda and self.class_weight is None and problem.prior is None:
            return problem.weight.sum(0, dtype=problem.accumulation_dtype)
        return _vecmat(self._weights(problem), problem.weight)

    def losses(self, problem: Problem, terms: RowTerms, sum_of_rows: Tensor | None) -> Tensor:
        """Return the loss of each row, before any reduction."""
        losses = self._cross_entropies(problem, terms, sum_of_rows)
        if self.z_loss:
            losses = losses + self.z_loss * terms.normaliser.square()
        return losses if self.token_weight is None else torch.where(problem.target >= 0, losses * self.token_weight, 0)

    def _cross_entropies(self, problem: Problem, terms: RowTerms, sum_of_rows: Tensor | None) -> Tensor:
        nll = terms.nll if self.class_weight is None else terms.nll * self.row_weight(problem.target, terms.nll.dtype)
        if not self.smoothing:
            return nll
        others = self._total(problem) * terms.normaliser - self._sum_of_logits(problem, terms, sum_of_rows)
        others = torch.where(problem.target >= 0, others, 0)
        return (1 - self.smoothing) * nll + self.smoothing / self._possible_classes(problem) * others

    def _sum_of_logits(self, problem: Problem, terms: RowTerms, sum_of_rows: Tensor | None) -> Tensor:
        """Return Σ_v w_v z_v over the classes that are not masked."""
        total = self._sum_of_own_logits(problem, terms, sum_of_rows)
        return total if problem.part is None else problem.part.sum_(total)

    def _sum_of_own_logits(self, problem: Problem, terms: RowTerms, sum_of_rows: Tensor | None) -> Tensor:
        if terms.spread is not None:
            return terms.spread
        assert sum_of_rows is not None
        total = _matvec(problem.input, sum_of_rows)
        if problem.bias is not None:
            total += self._dot(problem, problem.bias)
        if problem.scale != 1:
            total *= problem.scale
        return total if problem.prior is None else total + self._dot(problem, problem.prior)

    def corrected(
        self, problem: Problem, scales: Scales, gradients: Gradients, sum_of_rows: Tensor | None
    ) -> Gradients:
        """Subtract the rank-one part of label smoothing from the engine's gradients in place, and return them.

        Where ranks share the rows, each subtracts that of its own classes, before the gradients of h are added up.
        """
        r = scales.smoothing
        if r is None or sum_of_rows is None:
            return gradients
        if gradients.input is not None:
            _subtract_outer(gradients.input, r, sum_of_rows)
        if gradients.weight is not None:
            _subtract_outer(gradients.weight, self._weights(problem), _vecmat(r, problem.input))
        if gradients.bias is not None:
            gradients.bias.sub_((self._weights(problem) * r.sum()).to(gradients.bias.dtype))
        return gradients

    def _own_class_weight(self, problem: Problem) -> Tensor | None:
        """Return the weights of the problem's own classes."""
        part = problem.part
        if self.class_weight is None or part is None:
            return self.class_weight
        return self.class_weight[part.start : part.stop] if part.rows else self.class_weight.new_zeros(1)

    def _weights(self, problem: Problem) -> Tensor:
        """Return the weights of the problem's own classes, 0 for those that are masked."""
        weights = self._own_class_weight(problem)
        if weights is None:
            weights = problem.weight.new_ones(problem.weight.shape[0], dtype=problem.accumulation_dtype)
        return weights if problem.prior is None else weights.masked_fill(problem.prior == -torch.inf, 0)

    def _total(self, problem: Problem) -> Tensor | int:
        """Return Ω, the weight of all classes that are not masked."""
        if self.prior is None:
            return problem.all_classes if self.class_weight is None else self.class_weight.sum()
        possible = self.prior > -torch.inf
        weights = possible.to(problem.accumulation_dtype)
        return (weights if self.class_weight is None else torch.where(possible, self.class_weight, 0)).sum()

    def _possible_classes(self, problem: Problem) -> Tensor | int:
        """Return the number of classes that are not masked, or 1 where there are none."""
        if self.prior is None:
            return problem.all_classes
        return (self.prior > -torch.inf).sum(dtype=problem.accumulation_dtype).clamp(min=1)

    def _dot(self, problem: Problem, offset: Tensor) -> Tensor:
        """Return Σ w_v offset_v over the classes that are not masked."""
        offset = offset.to(problem.accumulation_dtype)
        if problem.prior is not None:
            offset = offset.masked_fill(problem.prior == -torch.inf, 0)
        class_weight = self._own_class_weight(problem)
        return offset.sum() if class_weight is None else torch.dot(offset, class_weight)


def _block_rows(matrix: Tensor) -> int:
    """Return the number of rows of a matrix that are converted at a time."""
    return max(_BLOCK.get(matrix.device.type, _BLOCK["cpu"]) // max(matrix.shape[1], 1), 1)


def _vecmat(vector: Tensor, matrix: Tensor) -> Tensor:
    """Return vector @ matrix in the vector's wider dtype, a block of rows at a time."""
    size = _block_rows(matrix)
    total = vector.new_zeros(matrix.shape[1])
    for part, rows in zip(vector.split(size), matrix.split(size), strict=True):
        total += part @ rows.to(vector.dtype)
    return total


def _matvec(matrix: Tensor, vector: Tensor) -> Tensor:
    """Return matrix @ vector in the vector's wider dtype, a block of rows at a time."""
    return torch.cat([rows.to(vector.dtype) @ vector for rows in matrix.split(_block_rows(matrix))])


def _subtract_outer(matrix: Tensor, left: Tensor, right: Tensor) -> None:
    """Subtract left ⊗ right from the matrix in the vectors' wider dtype, and round once."""
    if matrix.is_cuda:  # One kernel converts each element by itself, for which a CPU would copy the whole matrix.
        matrix.addcmul_(left.unsqueeze(1), right, value=-1)
        return
    size = _block_rows(matrix)
    for rows, part in zip(matrix.split(size), left.split(size), strict=True):
        rows.sub_(torch.outer(part, right))
