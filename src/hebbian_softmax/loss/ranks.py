r"""What the ranks that share the rows of the matrix exchange for a loss.

For each row of the batch a rank finds the largest logit M of its own classes other than the target, the sum s of
exp(z - M) over them, and perhaps the target's logit. Over all ranks r these become

.. math::
    M = \max_r M_r, \qquad s = \sum_r s_r\, e^{M_r - M}, \qquad z_y = \sum_r z_{y,r}

where :math:`z_{y,r}` is 0 on all ranks but the one that has the target. After that every rank knows the loss, and
computes the gradient of its own rows. Only the gradient of h is a sum over ranks, and crosses the wire once.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from hebbian_softmax.loss.problem import Gradients, Needs, Problem
from hebbian_softmax.rows import RowPart


class Joined(NamedTuple):
    """The terms of some rows of the batch over all ranks."""

    largest: Tensor
    """M."""
    total: Tensor
    """s."""
    target_logit: Tensor
    """z[y]."""
    excess: Tensor
    """t = Σ (z - M) exp(z - M); 0 where it was not asked for."""
    lower: Tensor
    """exp(M_r - M), by which exp(z - M_r) of this rank is to be multiplied."""


def join(part: RowPart, largest: Tensor, total: Tensor, target_logit: Tensor, excess: Tensor | None = None) -> Joined:
    """Return the terms over all ranks from those of this one; ``largest`` is finite or the terms become NaN."""
    highest = part.max_(largest.clone())
    below = largest - highest
    lower = below.exp()
    mine = [total * lower, target_logit]
    if excess is not None:
        mine.append(torch.where(total > 0, (excess + below * total) * lower, 0))
    found = part.sum_(torch.stack(mine))
    return Joined(highest, found[0], found[1], found[2] if excess is not None else torch.zeros_like(total), lower)


def local_needs(problem: Problem, needs: Needs) -> Needs:
    """Return the gradients that this rank has to compute: that of h in the dtype in which ranks add it up."""
    if problem.part is None or needs.input is None:
        return needs
    return replace(needs, input=torch.promote_types(needs.input, problem.accumulation_dtype))


def join_gradients(problem: Problem, needs: Needs, gradients: Gradients) -> Gradients:
    """Return the gradients from those of this rank: that of h over all ranks, and those of the rows that it has."""
    part = problem.part
    if part is None:
        return gradients
    of_input = None if gradients.input is None else part.sum_(gradients.input).to(needs.input)
    if part.rows == 0:  # The engine had a row in its place.
        of_rows = (None if each is None else each[:0] for each in (gradients.weight, gradients.bias))
        return Gradients(of_input, *of_rows)
    return Gradients(of_input, gradients.weight, gradients.bias)
