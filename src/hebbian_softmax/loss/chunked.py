r"""The engine in plain torch, for every device: it holds a tile of the logits instead of all of them.

Let M be the largest logit of the classes other than the target, and s the sum of exp(z - M) over them. Then with
:math:`x = M + \log s - z_y`

.. math::
    \mathrm{nll} = \log(1 + e^x), \qquad 1 - p_y = \sigma(x), \qquad p_v = \sigma(x)\, e^{z_v - M} / s \quad (v \ne y)

and nothing cancels, however close p_y is to 1. In half precision the logits of a tile are rounded, whose errors mostly
cancel in the sum s, but not in z_y; so z_y is a dot product of its own, in float32.

Where every logit is -inf, or one is +inf or NaN, there is no distribution, and x is NaN.

Whatever N and V are, the memory held besides inputs, results and vectors of N or V numbers stays below ``workspace``
(see :class:`~hebbian_softmax.loss.tiles.Plan`; the smallest tile is one row by 64 classes). A gradient in half
precision that is added up over several tiles is summed in float32, so a float32 tensor of its size is held, too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hebbian_softmax import _triton
from hebbian_softmax.loss.problem import Gradients, Needs, Problem, RowTerms, Scales
from hebbian_softmax.loss.ranks import join
from hebbian_softmax.loss.tiles import Plan, Tiles, largest_workspace, padded, ranges

_LEAST_WORKSPACE = 2**23
"""Bytes on a CPU that are not worth saving."""
_LEAST_LOG = -1e4
"""Below this, exp is 0 in every dtype."""


def default_workspace(problem: Problem, needs: Needs) -> int:
    """Return the largest useful workspace; on a CPU the bytes of half of the logits, with at least 64 whole rows.

    In half precision a CPU gets a quarter of the logits. Then 64 rows mostly do not fit, and the vocabulary is split,
    so that no float32 sum of the matrix's gradient is held.
    """
    most = largest_workspace(problem.input.device)
    if problem.input.device.type != "cpu":
        return most
    count, size = len(problem.target), problem.input.element_size()
    rows = -(-count // 4) if size < 4 else max(-(-count // 2), min(count, 64))
    return min(most, max(_LEAST_WORKSPACE, rows * padded(problem.planned_classes) * size))


def row_terms(problem: Problem, workspace: int, *, entropy: bool = False) -> RowTerms:
    """Return the terms of every row; M, s and, for the entropy, t = Σ (z - M) exp(z - M) go along from tile to tile."""
    plan = Plan.of(problem, workspace, entropy)
    tiles = Tiles(problem, plan)
    terms = _empty_terms(problem, entropy)
    kernels = _kernels(problem)
    if kernels is not None and plan.classes >= problem.weight.shape[0]:
        are_known = _find_target_logits(kernels, tiles, terms)
        for rows in ranges(len(problem.target), plan.rows):
            kernels.settle(problem, tiles.logits(rows, slice(0, problem.weight.shape[0])), rows, terms, are_known)
        return terms
    lowest = torch.finfo(terms.nll.dtype).min  # M must be finite, even where no other class is possible.
    for rows in ranges(len(problem.target), plan.rows):
        target, column = problem.target[rows, None], problem.column[rows, None]
        known = tiles.target_logits(rows)
        target_logit = torch.zeros_like(target, dtype=terms.nll.dtype) if known is None else known
        largest = torch.full_like(target_logit, lowest)
        total, excess = torch.zeros_like(target_logit), torch.zeros_like(target_logit)
        for classes in ranges(problem.weight.shape[0], plan.classes):
            z = tiles.logits(rows, classes)
            inside, local = _in_tile(column, classes)
            for group, e, _ in tiles.groups(z, classes, back=False):
                here, y = inside[group], local[group]
                _add_spread(terms, slice(rows.start + group.start, rows.start + group.stop), e, problem, classes)
                at_target = e.gather(1, y)
                if known is None:
                    target_logit[group] = torch.where(here, at_target, target_logit[group])
                e.scatter_(1, y, torch.where(here, -torch.inf, at_target))
                m = torch.maximum(largest[group], e.amax(1, keepdim=True))
                lower, e = largest[group] - m, e.sub_(m)
                if entropy:
                    before = (excess[group] + lower * total[group]) * lower.exp()
                    excess[group] = torch.where(total[group] > 0, before, 0) + _weighted_sum(e)
                total[group] = total[group] * lower.exp() + e.exp_().sum(1, keepdim=True)
                largest[group] = m
        if problem.part is not None:
            joined = join(problem.part, largest, total, target_logit, excess if entropy else None)
            largest, total, target_logit, excess, _ = joined
        others = total.log().add_(largest)
        x = (others - target_logit).masked_fill_(target_logit == torch.inf, torch.nan)
        _store(terms, rows, target, target_logit, others, x)
        if terms.entropy is not None:
            nll = terms.nll[rows, None]
            own = torch.where(nll < torch.inf, nll * (-nll).exp(), 0)
            rest = -torch.expm1(-nll) * (terms.normaliser[rows, None] - largest - excess / total)
            terms.entropy[rows, None] = torch.where(target < 0, 0, own + torch.where(total > 0, rest, 0))
    return terms


def _weighted_sum(z: Tensor) -> Tensor:
    """Return Σ z exp(z) of each row, where z is at most 0 and may be -inf."""
    return z.exp().mul_(z.clamp(min=torch.finfo(z.dtype).min)).sum(1, keepdim=True)


def row_terms_and_gradients(
    problem: Problem, scales: Scales, needs: Needs, workspace: int
) -> tuple[RowTerms, Gradients]:
    """Return both; while whole rows of logits fit, in one pass, so that every logit is computed once."""
    plan = Plan.of(problem, workspace)
    if plan.classes < problem.planned_classes:
        terms = row_terms(problem, workspace)
        return terms, gradients(problem, terms, scales, needs, workspace)
    tiles = Tiles(problem, plan)
    terms = _empty_terms(problem)
    sums = _Sums(tiles, needs)
    limits = torch.finfo(terms.nll.dtype)
    everything = slice(0, problem.weight.shape[0])
    kernels = _kernels(problem, needs)
    if kernels is not None:
        are_known = _find_target_logits(kernels, tiles, terms)
        for rows in ranges(len(problem.target), plan.rows):
            z = tiles.logits(rows, everything)
            kernels.settle(problem, z, rows, terms, are_known, scales)
            sums.add_bias(z, everything)
            sums.add(z, rows, everything)
        return terms, sums.gradients()
    for rows in ranges(len(problem.target), plan.rows):
        z = tiles.logits(rows, everything)
        a, b, target = scales.normaliser[rows, None], scales.target[rows, None], problem.target[rows, None]
        inside, y = _in_tile(torch.where(target < 0, 0, problem.column[rows, None]), everything)
        known = tiles.target_logits(rows)
        target_logit = torch.empty_like(target, dtype=tiles.wide) if known is None else known
        x, others = torch.empty_like(target_logit), torch.empty_like(target_logit)
        for group, e, slope in tiles.groups(z, everything):
            at = slice(rows.start + group.start, rows.start + group.stop)
            _add_spread(terms, at, e, problem, everything)
            at_target = e.gather(1, y[group])
            if known is None:
                target_logit[group] = torch.where(inside[group], at_target, 0)
            e.scatter_(1, y[group], torch.where(inside[group], -torch.inf, at_target))
            m = e.amax(1, keepdim=True).clamp_(min=limits.min)  # M must be finite, even without another class.
            s = e.sub_(m).exp_().sum(1, keepdim=True)
            lower: Tensor | int = 1
            if problem.part is not None:
                m, s, target_logit[group], _, lower = join(problem.part, m, s, target_logit[group])
            log_s = s.log()
            x[group], others[group] = log_s + (m - target_logit[group]), log_s + m
            x[group].masked_fill_(target_logit[group] == torch.inf, torch.nan)
            scale = a[group]
            if scales.square is not None:
                normaliser = torch.logaddexp(others[group], target_logit[group])
                scale = scale + torch.where(target[group] < 0, 0, scales.square[at, None] * normaliser)
            rest = torch.where(target[group] < 0, 0, scale * x[group].sigmoid())  # In ignored rows x may be NaN.
            s.clamp_(min=limits.tiny)
            e.mul_(rest / s * lower)
            at_target = torch.where(inside[group], (scale - b[group]) - rest, e.gather(1, y[group]))
            e.scatter_(1, y[group], at_target)
            _through_softcap(e, slope, problem, everything, scales, at)
            sums.add_bias(e, everything)
        _store(terms, rows, target, target_logit, others, x)
        sums.add(z, rows, everything)
    return terms, sums.gradients()


def gradients(problem: Problem, terms: RowTerms, scales: Scales, needs: Needs, workspace: int) -> Gradients:
    """Return the wanted gradients; classes are the outer loop, so that each row of dW is written once."""
    plan = Plan.of(problem, workspace, scales.entropy is not None)
    tiles = Tiles(problem, plan)
    sums = _Sums(tiles, needs)
    kernels = _kernels(problem, needs)
    if kernels is not None:
        for classes in ranges(problem.weight.shape[0], plan.classes):
            for rows in ranges(len(problem.target), plan.rows):
                z = tiles.logits(rows, classes)
                kernels.differentiate(problem, z, rows, classes, terms, scales)
                sums.add_bias(z, classes)
                sums.add(z, rows, classes)
        return sums.gradients()
    # exp(z - z_y - nll) is more exact than exp(z - normaliser), but with an impossible target it is NaN.
    impossible = terms.target_logit == -torch.inf
    shift = torch.where(impossible, terms.normaliser, terms.target_logit)
    rest_of_shift = terms.nll.masked_fill(impossible, 0)
    rest_of_shift.masked_fill_(problem.target < 0, torch.inf)  # In ignored rows p is 0, whatever the logits are.
    normaliser_scale, entropy_scale = scales.with_square(terms.normaliser), scales.entropy
    rest = normaliser_scale * -torch.expm1(-terms.nll)
    at_target = ((normaliser_scale - scales.target) - rest)[:, None]
    if entropy_scale is not None:
        assert terms.entropy is not None
        share = torch.where(terms.nll < torch.inf, (terms.entropy - terms.nll) * (-terms.nll).exp(), 0)
        at_target = at_target - (entropy_scale * share)[:, None]
    for classes in ranges(problem.weight.shape[0], plan.classes):
        for rows in ranges(len(problem.target), plan.rows):
            z = tiles.logits(rows, classes)
            for group, e, slope in tiles.groups(z, classes):
                at = slice(rows.start + group.start, rows.start + group.stop)
                e.sub_(shift[at, None]).sub_(rest_of_shift[at, None])
                if entropy_scale is None:
                    e.exp_().mul_(normaliser_scale[at, None])
                else:
                    assert terms.entropy is not None
                    # Where log p is below the clamp, p is 0.
                    factor = (e + terms.entropy[at, None]).clamp_(min=_LEAST_LOG).mul_(-entropy_scale[at, None])
                    e.exp_().mul_(factor.add_(normaliser_scale[at, None]))
                inside, y = _in_tile(problem.column[at, None], classes)
                e.scatter_(1, y, torch.where(inside, at_target[at], e.gather(1, y)))
                _through_softcap(e, slope, problem, classes, scales, at)
                sums.add_bias(e, classes)
            sums.add(z, rows, classes)
    return sums.gradients()


def _kernels(problem: Problem, needs: Needs | None = None) -> Any:
    """Return the kernels that do what follows the products of a tile; None where there are none for the problem.

    Ranks that share rows exchange between the passes over a tile, label smoothing behind a softcap needs one more, and
    the gradient of a bias is summed before dZ is rounded to half precision.
    """
    rounds = problem.accumulation_dtype != problem.input.dtype and needs is not None and needs.bias is not None
    plain = problem.part is None and problem.spread is None and problem.accumulation_dtype == torch.float32
    works = plain and not rounds and _triton.works_on(problem.input) and _triton.works_on(problem.weight)
    return _triton.load("loss.gpu.softmax") if works else None


def _find_target_logits(kernels: Any, tiles: Tiles, terms: RowTerms) -> bool:
    """Store the logits of the targets where the tiles will have them less exactly; return whether that is so."""
    if tiles.dtype == tiles.wide:
        return False
    kernels.find_target_logits(tiles.problem, terms.target_logit, torch.empty_like(terms.target_logit))
    return True


class _Sums:
    """The gradients while they are added up over tiles."""

    def __init__(self, tiles: Tiles, needs: Needs) -> None:
        self.tiles, self.needs = tiles, needs
        problem, plan, wide = tiles.problem, tiles.plan, tiles.wide
        n, v = len(problem.target), problem.weight.shape[0]
        self.input = self.weight = self.bias = None
        if needs.input is not None:
            self.input = _total(problem.input, needs.input, wide, plan.classes >= v)
        if needs.weight is not None:
            self.weight = _total(problem.weight, needs.weight, wide, plan.rows >= n)
        if needs.bias is not None:
            self.bias = problem.weight.new_zeros(v, dtype=torch.promote_types(needs.bias, wide))
        if n == 0 and self.weight is not None:
            self.weight.zero_()

    def add(self, z: Tensor, rows: slice, classes: slice) -> None:
        """Add the products of a tile of dZ."""
        if self.input is not None:
            self.tiles.add_input_gradient(self.input[rows], z, classes, classes.start == 0)
        if self.weight is not None:
            self.tiles.add_weight_gradient(self.weight[classes], z, rows, rows.start == 0)

    def add_bias(self, dz: Tensor, classes: slice) -> None:
        """Add to the bias's gradient, apart from the rest: while rows of dZ are in the cache and not rounded yet."""
        if self.bias is not None:
            self.bias[classes] += dz.sum(0, dtype=self.bias.dtype)

    def gradients(self) -> Gradients:
        """Return the sums, each in the dtype in which it is wanted."""
        pairs = ((self.input, self.needs.input), (self.weight, self.needs.weight), (self.bias, self.needs.bias))
        return Gradients(*(None if total is None else total.to(dtype) for total, dtype in pairs))


def _total(like: Tensor, dtype: torch.dtype, wide: torch.dtype, alone: bool) -> Tensor:
    """Return room for a sum: at least float32, unless one product is ``alone`` in it and is rounded once either way."""
    return like.new_empty(like.shape, dtype=dtype if alone else torch.promote_types(dtype, wide))


def _empty_terms(problem: Problem, entropy: bool = False) -> RowTerms:
    """Return room for the terms of all rows."""
    nll = problem.input.new_empty(len(problem.target), dtype=problem.accumulation_dtype)
    spread = None if problem.spread is None else torch.zeros_like(nll)
    of_entropy = torch.empty_like(nll) if entropy else None
    return RowTerms(nll, torch.empty_like(nll), torch.empty_like(nll), spread, of_entropy)


def _add_spread(terms: RowTerms, rows: slice, z: Tensor, problem: Problem, classes: slice) -> None:
    """Add Σ_v spread_v z_v of some classes, where it is wanted; masked classes have no share."""
    if problem.spread is not None:
        assert terms.spread is not None
        terms.spread[rows] += z.clamp(min=torch.finfo(z.dtype).min) @ problem.spread[classes]


def _through_softcap(
    dz: Tensor, slope: Tensor | None, problem: Problem, classes: slice, scales: Scales, rows: slice
) -> None:
    """Make dU of dZ in place, in some rows and classes; without a softcap they are the same."""
    if problem.spread is not None:
        assert scales.smoothing is not None
        dz.addr_(scales.smoothing[rows], problem.spread[classes], alpha=-1)
    if slope is not None:
        dz.mul_(slope)


def _in_tile(column: Tensor, classes: slice) -> tuple[Tensor, Tensor]:
    """Return whether each target is among these classes, and its column in the tile (0 where it is not)."""
    inside = (column >= classes.start) & (column < classes.stop)
    return inside, torch.where(inside, column - classes.start, 0)


def _store(terms: RowTerms, rows: slice, target: Tensor, target_logit: Tensor, others: Tensor, x: Tensor) -> None:
    """Store the terms of some rows; ``others`` is the logsumexp of the other classes, and x = others - z_y."""
    counted = target >= 0
    terms.nll[rows, None] = torch.where(counted, torch.logaddexp(x, torch.zeros_like(x)), 0)
    terms.target_logit[rows, None] = torch.where(counted, target_logit, 0)
    normaliser = torch.logaddexp(others, target_logit).masked_fill_(target_logit == torch.inf, torch.nan)
    terms.normaliser[rows, None] = torch.where(counted, normaliser, 0)
