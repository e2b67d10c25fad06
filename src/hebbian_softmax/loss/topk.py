"""The likeliest classes of a linear layer, without its logits."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hebbian_softmax import _torch
from hebbian_softmax.checks import check_integer
from hebbian_softmax.loss import checks, reference
from hebbian_softmax.loss.dtypes import product_dtype
from hebbian_softmax.loss.options import Options
from hebbian_softmax.loss.problem import Problem
from hebbian_softmax.loss.tiles import Plan, Tiles, largest_workspace, ranges

_COPIES = 5
"""A tile takes this many times its logits: their ranks with 8 bytes each, two masks, and what ``topk`` sorts."""


@torch.no_grad()
def linear_topk(
    input: Tensor,
    linear_weight: Tensor,
    k: int,
    *,
    linear_bias: Tensor | None = None,
    prior: Tensor | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    workspace: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Return ``torch.topk(F.linear(input, linear_weight, linear_bias), k)`` without the N × V logits.

    The values and the classes are (k,) or (N, k), largest first. Among equal logits the lowest class comes first, where
    ``torch.topk`` leaves the order open. There are no gradients, and NaN has no place in the order. The other
    arguments are those of :func:`~hebbian_softmax.linear_cross_entropy`. With prior, temperature or softcap the values
    are at least in float32, and -inf where fewer than k classes are left.

    >>> h, W = torch.tensor([1.0, 0.0]), torch.tensor([[1.0, 0.0], [3.0, 1.0], [2.0, 0.0], [3.0, 0.0]])
    >>> values, classes = linear_topk(h, W, 3)
    >>> values.tolist(), classes.tolist()
    ([3.0, 3.0, 2.0], [1, 3, 2])
    """
    checks.check_how("auto", workspace)
    checks.check_operands(input, linear_weight, linear_bias)
    options = Options(prior=prior, temperature=temperature, softcap=softcap)
    options.check(linear_weight)
    k = check_integer("k", k, 1)
    if k > linear_weight.shape[0]:
        raise ValueError(f"k must be at most the number of classes, {linear_weight.shape[0]}, got {k}")
    rows = input if input.dim() == 2 else input.unsqueeze(0)
    dtype = product_dtype(input)
    target = rows.new_empty(rows.shape[0], dtype=torch.int64)
    problem = Problem.of(rows, linear_weight, linear_bias, target, dtype, options)
    operands = problem.input, problem.weight, problem.bias, problem.prior
    with torch.autocast(input.device.type, enabled=False):
        if any(_torch.is_vmapped(each) for each in operands if each is not None):
            logits = F.linear(problem.input, problem.weight, problem.bias)
            logits = reference.shaped(logits.to(_dtype(problem)), temperature, softcap)
            logits = logits if problem.prior is None else logits + problem.prior
            values, classes = _ordered(*_topk_of_tile(logits, k))
        else:
            values, classes = _topk(problem, k, workspace or largest_workspace(input.device))
    return values.reshape(*input.shape[:-1], k), classes.reshape(*input.shape[:-1], k)


def _topk(problem: Problem, k: int, workspace: int) -> tuple[Tensor, Tensor]:
    """Return the k largest logits of each row and their classes, tile by tile."""
    plan = Plan.of(problem, workspace // _COPIES)
    tiles = Tiles(problem, plan)
    dtype = _dtype(problem)
    values = problem.input.new_empty(problem.input.shape[0], k, dtype=dtype)
    indices = torch.empty_like(values, dtype=torch.int64)
    for rows in ranges(problem.input.shape[0], plan.rows):
        best: tuple[Tensor, Tensor] | None = None
        for classes in ranges(problem.weight.shape[0], plan.classes):
            # Rounded as F.linear rounds them, before anything else is done to them.
            z = tiles.finish(tiles.logits(rows, classes).to(problem.input.dtype).to(dtype), classes)
            found, where = _topk_of_tile(z, min(k, z.shape[1]))
            where += classes.start
            if best is not None:  # The classes found before are lower, so they stay first among equals.
                found, where = torch.cat([best[0], found], 1), torch.cat([best[1], where], 1)
            found, where = _ordered(found, where)
            best = found[:, :k], where[:, :k]
        assert best is not None
        values[rows], indices[rows] = best
    return values, indices


def _dtype(problem: Problem) -> torch.dtype:
    """Return the dtype of the values: that of ``F.linear``, and at least float32 if the logits are not just that."""
    same = problem.prior is None and problem.scale == 1 and problem.softcap is None
    return problem.input.dtype if same else problem.accumulation_dtype


def _ordered(values: Tensor, classes: Tensor) -> tuple[Tensor, Tensor]:
    """Return values and their classes, largest first; equal ones keep their order."""
    values, order = values.sort(dim=1, descending=True, stable=True)
    return values, classes.gather(1, order)


def _topk_of_tile(z: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k largest, of equal ones those of the lowest index, in order of index."""
    if k < z.shape[1]:
        smallest = z.topk(k, dim=1).values[:, -1:]
        # Which of the logits that equal the k-th largest topk returns is open. So rank all: above it, equal, below.
        rank = torch.arange(z.shape[1], 0, -1, device=z.device).where(z == smallest, 0)
        where = rank.masked_fill_(z > smallest, z.shape[1] + 1).topk(k, dim=1).indices
        where = where.sort(dim=1).values
    else:
        where = torch.arange(k, device=z.device).expand(z.shape[0], k).contiguous()
    return z.gather(1, where), where
