"""The likeliest classes of a linear layer, without its logits."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hebbian_softmax import _torch
from hebbian_softmax.checks import check_integer
from hebbian_softmax.loss import checks, reference
from hebbian_softmax.loss.checks import Options
from hebbian_softmax.loss.dtypes import product_dtype, wide
from hebbian_softmax.loss.graphs import outside_of_graphs
from hebbian_softmax.loss.problem import Problem
from hebbian_softmax.loss.tiles import Plan, Tiles, largest_workspace, ranges
from hebbian_softmax.rows import RowPart

_COPIES = 5
"""A tile takes this many times its logits: their ranks with 8 bytes each, two masks, and what ``topk`` sorts."""


@outside_of_graphs(only_with="rows")
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
    rows: RowPart | None = None,
) -> tuple[Tensor, Tensor]:
    """Return ``torch.topk(F.linear(input, linear_weight, linear_bias), k)`` without the N × V logits.

    The values and the classes are (k,) or (N, k), largest first. Among equal logits the lowest class comes first, where
    ``torch.topk`` leaves the order open. There are no gradients, and NaN has no place in the order. The other
    arguments are those of :func:`~hebbian_softmax.linear_cross_entropy`. With prior, temperature or softcap the values
    are at least in float32, and -inf where fewer than k classes are left. Ranks that share the rows all get the
    likeliest of all classes; N × k values and classes of each rank then exist at once, whatever ``workspace`` is.

    >>> h, W = torch.tensor([1.0, 0.0]), torch.tensor([[1.0, 0.0], [3.0, 1.0], [2.0, 0.0], [3.0, 0.0]])
    >>> values, classes = linear_topk(h, W, 3)
    >>> values.tolist(), classes.tolist()
    ([3.0, 3.0, 2.0], [1, 3, 2])
    """
    options = Options(prior=prior, temperature=temperature, softcap=softcap)
    with checks.agreement(rows, input) as alike:
        checks.check_how("auto", workspace)
        if rows is not None:
            checks.check_part(rows, "auto", linear_weight, linear_bias, input)
        checks.check_operands(input, linear_weight, linear_bias)
        options.check(linear_weight, (), rows)
        k, classes = check_integer("k", k, 1), linear_weight.shape[0] if rows is None else rows.total
        if k > classes:
            raise ValueError(f"k must be at most the number of classes, {classes}, got {k}")
        if rows is not None:
            alike += tuple(input.shape), product_dtype(input), options.decisive(), k
    h = input if input.dim() == 2 else input.unsqueeze(0)
    dtype = product_dtype(input)
    target = h.new_empty(h.shape[0], dtype=torch.int64)
    problem = Problem.of(h, linear_weight, linear_bias, target, dtype, options, rows)
    operands = problem.input, problem.weight, problem.bias, problem.prior
    results = dtype if prior is None and temperature == 1 and softcap is None else wide(dtype)
    with torch.autocast(input.device.type, enabled=False):
        if any(_torch.is_vmapped(each) for each in operands if each is not None):
            logits = F.linear(problem.input, problem.weight, problem.bias)
            logits = reference.shaped(logits.to(results), temperature, softcap)
            logits = logits if problem.prior is None else logits + problem.prior
            values, indices = _ordered(*_topk_of_tile(logits, k))
        else:
            fewer = min(k, problem.weight.shape[0])
            values, indices = _topk(problem, fewer, results, workspace or largest_workspace(input.device))
            if rows is not None:
                values, indices = _topk_of_ranks(rows, values, indices, k)
    return values.reshape(*input.shape[:-1], k), indices.reshape(*input.shape[:-1], k)


def _topk(problem: Problem, k: int, dtype: torch.dtype, workspace: int) -> tuple[Tensor, Tensor]:
    """Return the k largest logits of each row, in ``dtype``, and their classes, tile by tile."""
    plan = Plan.of(problem, workspace // _COPIES)
    tiles = Tiles(problem, plan)
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


def _topk_of_ranks(part: RowPart, values: Tensor, classes: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k largest logits of all ranks and their classes, from those of the rows that this rank has."""
    dtype, width = values.dtype, min(k, part.largest)
    # Every rank sends as many, in a dtype that every backend has. What it does not have is -inf, after every class.
    sent = values.new_full((len(values), width), -torch.inf, dtype=wide(dtype))
    named = classes.new_full(sent.shape, part.total)
    if part.rows:
        sent[:, : values.shape[1]] = values
        named[:, : classes.shape[1]] = classes + part.start
    found, where = torch.cat(part.gather(sent), 1), torch.cat(part.gather(named), 1)
    where, order = where.sort(dim=1, stable=True)
    found, where = _ordered(found.gather(1, order), where)
    return found[:, :k].to(dtype), where[:, :k]


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
