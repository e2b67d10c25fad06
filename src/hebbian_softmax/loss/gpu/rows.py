"""The rows of the GPU's engine: E of a chunk of them, and their terms.

For E and its sums, see :mod:`hebbian_softmax.loss.gpu.scores`. The shift m of a row is the logit of its target, which
one dot product gives beforehand. So no maximum is needed, and 1 - p_y = s / (s + 1) has no cancellation. A factor
common to a whole row costs no precision in floating point as long as nothing overflows. Rows whose target is less
likely than e⁻⁶⁰ are found afterwards, and computed again with the largest logit as their shift.

Where ranks share the rows of the matrix, they exchange the logits of the targets first, so that all have the same
shifts. A rank may compute rows again for itself. Then it has another shift there, and the ranks agree on the largest
one before they add up their sums.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from hebbian_softmax.loss.gpu.schedule import TILE_FEATURES, TILE_ROWS, padded
from hebbian_softmax.loss.gpu.scores import (
    LOG2E,
    capped,
    descriptors,
    finished,
    launch_scores,
    product,
    room_for_sums,
    shape_of_logits,
    switches,
)
from hebbian_softmax.loss.gpu.sums import Sums
from hebbian_softmax.loss.problem import SMALLEST_SCALE, Problem, RowTerms, Scales
from hebbian_softmax.rows import RowPart

LN2 = tl.constexpr(0.6931471805599453)
LIMIT = tl.constexpr(2.0**87)
"""The largest sum of a row's E; a row beyond it is computed again with another shift."""
SHARED_LIMIT = tl.constexpr(2.0**80)
"""The same for the share of one rank: 128 of them together stay below the limit."""
FARTHEST = tl.constexpr(40.0)
"""The most by which the shift of a rank's E may be below the common one where that rank has the target."""
LOWEST = tl.constexpr(-1e30)
"""The lowest shift."""
ALONE, OWN, JOINED = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
"""The phases of ``settle``: all classes at once, or first this rank's and then those of all ranks."""
TINY = tl.constexpr(SMALLEST_SCALE)
_SETTLED_ROWS, _SETTLED_CLASSES = 64, 128
"""The part of a tile that one program settles; small, so that more programs share the work."""


@dataclass(frozen=True)
class Rows:
    """The terms of each row, in float32, and the memory that is needed to find them."""

    problem: Problem
    logit: Tensor
    shift: Tensor
    nll: Tensor
    normaliser: Tensor
    slope: Tensor | None
    """The derivative of a softcap at the target."""
    partial: Tensor
    """Room for several sums of E for each row of a chunk, each over a part of the classes."""
    others: Tensor | None
    """Where ranks share the rows of the matrix, the sum of E for each row of a chunk."""

    @staticmethod
    def of(problem: Problem, chunk: int) -> Rows:
        """Return room for the terms, with the logits of the targets in place; ``chunk`` is the rows of a chunk."""
        rows = problem.input.shape[0]
        logit, shift, nll, normaliser = problem.input.new_empty(4, rows, dtype=torch.float32)
        partial = room_for_sums(problem, chunk, problem.weight.shape[0])
        find_target_logits(problem, logit, shift)
        others = None
        if problem.part is not None:
            others = logit.new_empty(chunk)
            problem.part.sum_(logit)
            shift = torch.where(problem.target < 0, torch.inf, (logit * LOG2E.value).clamp_(min=LOWEST.value))
        return Rows(problem, logit, shift, nll, normaliser, problem.slope_at_target(logit), partial, others)

    def terms(self) -> RowTerms:
        """Return the terms that were found."""
        return RowTerms(self.nll, self.logit, self.normaliser)

    def take_in(
        self,
        start: int,
        stop: int,
        sums: Sums | None = None,
        scales: Scales | None = None,
    ) -> None:
        """Find the terms of the rows ``start`` to ``stop``, and with ``sums`` their E and factors, too."""
        problem = self.problem
        rows, (classes, features) = stop - start, problem.weight.shape
        e = None if sums is None else sums.e
        a, b, square = (None,) * 3 if scales is None else (scales.normaliser, scales.target, scales.square)
        parts = launch_scores(problem, slice(start, stop), slice(0, classes), self.shift, self.partial, e)

        def launch_settle(phase: tl.constexpr, largest: Tensor | None = None) -> None:
            settle[(padded(rows, TILE_ROWS) // _SETTLED_ROWS,)](
                *descriptors(problem, slice(0, classes), _SETTLED_ROWS, _SETTLED_CLASSES),
                problem.bias, problem.prior, problem.target, problem.column, self.shift, largest, self.others,
                self.partial, self.logit, a, b, square, self.slope, problem.input, self.nll, self.normaliser,
                None if sums is None else sums.factor,
                None if sums is None else sums.scaled,
                e, start, rows, parts, classes, features, 0 if e is None else e.stride(0), *shape_of_logits(problem),
                PHASE=phase.value, SQUARE=square is not None, GRADIENT=sums is not None,
                SCALE=sums is not None and sums.scaled is not None,
                ROWS=_SETTLED_ROWS, CLASSES=_SETTLED_CLASSES, FEATURES=TILE_FEATURES,
                PART=64, COLUMNS=128, IEEE=problem.input.dtype == torch.float32, **switches(problem),
                num_warps=8, num_stages=2,
            )  # fmt: skip

        if problem.part is None:
            launch_settle(ALONE)
        else:
            launch_settle(OWN)
            launch_settle(JOINED, self._join(problem.part, slice(start, stop)))

    def _join(self, part: RowPart, chunk: slice) -> Tensor:
        """Add up the sums of a chunk over all ranks, and return the shift to which they then belong."""
        assert self.others is not None
        own = self.shift[chunk]
        largest = part.max_(own.clone())
        below = torch.where(self.problem.target[chunk] < 0, 0, own - largest)
        part.sum_(self.others[: len(own)].mul_(below.exp2_()))
        return largest


def find_target_logits(problem: Problem, logit: Tensor, shift: Tensor) -> None:
    """Store the logits of the targets, in float32 products, and the same in units of log 2."""
    rows, features = problem.input.shape
    if rows == 0:
        return
    with torch.cuda.device_of(problem.input):
        target_logits[(rows,)](
            problem.input, problem.weight, problem.bias, problem.prior, problem.column, shift, logit,
            problem.weight.shape[0], features, *shape_of_logits(problem), BLOCK=512, **switches(problem),
        )  # fmt: skip


@triton.jit
def target_logits(
    h_ptr, w_ptr, bias_ptr, prior_ptr, column_ptr, shift_ptr, logit_ptr, classes, features, scale, cap,
    BLOCK: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_PRIOR: tl.constexpr, SCALED: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """Store z[y] of one row, and the same in units of log 2 as its shift; +inf makes the E of an ignored row 0.

    Where another rank has the target, z[y] is 0.
    """
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(column_ptr + row)
    here = (target >= 0) & (target < classes)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, features, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = (at < features) & here
        h = tl.load(h_ptr + row * features + at, inside, other=0.0).to(tl.float32)
        w = tl.load(w_ptr + target * features + at, inside, other=0.0).to(tl.float32)
        total += h * w
    logit = tl.sum(total, 0)
    if HAS_BIAS:
        logit += tl.load(bias_ptr + target, here, other=0.0).to(tl.float32)
    if CAPPED:
        logit, _ = capped(logit, cap)
    if SCALED:
        logit *= scale
    if HAS_PRIOR:
        logit += tl.load(prior_ptr + target, here, other=0.0)
    tl.store(logit_ptr + row, logit)
    # An impossible target (-inf) is no shift. With the lowest one the sum overflows, and the row is computed again.
    tl.store(shift_ptr + row, tl.where(here, tl.maximum(logit * LOG2E, LOWEST), float("inf")))


@triton.jit(do_not_specialize=["start", "rows", "parts", "classes"])
def settle(
    h_desc, w_desc, bias_ptr, prior_ptr, target_ptr, column_ptr, shift_ptr, largest_ptr, others_ptr, partial_ptr,
    logit_ptr, a_ptr, b_ptr, square_ptr, slope_ptr, h_ptr, nll_ptr, normaliser_ptr, factor_ptr, scaled_ptr, e_ptr,
    start, rows, parts, classes, features, e_stride, scale, cap, PHASE: tl.constexpr, SQUARE: tl.constexpr,
    GRADIENT: tl.constexpr, SCALE: tl.constexpr, ROWS: tl.constexpr, CLASSES: tl.constexpr, FEATURES: tl.constexpr,
    PART: tl.constexpr, COLUMNS: tl.constexpr, IEEE: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_PRIOR: tl.constexpr, SCALED: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """Compute from the sums of a row's tiles: nll, log-normaliser, the factor a / Σ E, factor · h, and E at the target.

    dZ = factor · E: rows of dh are multiplied by the factor afterwards, and for dW the factor goes into h.

    Where ranks share the classes, this is done in two phases. In the first, a rank stores the sum over its own classes
    and the shift of that sum. In the second, it is given both over all ranks.
    """
    first = tl.program_id(0) * ROWS
    at = first + tl.arange(0, ROWS)
    inside = at < rows
    at_row = start + at
    counted = tl.load(target_ptr + at_row, inside, other=-1) >= 0
    target = tl.load(column_ptr + at_row, inside, other=-1)
    z_target = tl.load(logit_ptr + at_row, inside, other=0.0)
    shift = tl.load(shift_ptr + at_row, inside, other=float("inf"))
    below = tl.zeros((ROWS,), tl.float32)
    if PHASE == JOINED:
        largest = tl.load(largest_ptr + at, inside, other=float("inf"))
        below = tl.where(counted, shift - largest, 0.0)
        shift = largest
        others = tl.load(others_ptr + at, inside, other=0.0)
    else:
        others, shift = _sums(
            h_desc, w_desc, bias_ptr, prior_ptr, partial_ptr, e_ptr, target, counted, z_target, shift, at, inside,
            start, rows, parts, classes, features, e_stride, scale, cap, LIMIT if PHASE == ALONE else SHARED_LIMIT,
            GRADIENT, ROWS, CLASSES, FEATURES, PART, IEEE, HAS_BIAS, HAS_PRIOR, SCALED, CAPPED,
        )  # fmt: skip
    if PHASE == OWN:
        tl.store(others_ptr + at, others, inside)
        tl.store(shift_ptr + at_row, shift, inside)
    else:
        _finish(
            a_ptr, b_ptr, square_ptr, slope_ptr, h_ptr, nll_ptr, normaliser_ptr, factor_ptr, scaled_ptr, e_ptr,
            target, counted, z_target, shift, below, others, at, inside, start, classes, features, e_stride,
            PHASE, SQUARE, GRADIENT, SCALE, ROWS, CLASSES, COLUMNS, CAPPED,
        )  # fmt: skip


@triton.jit
def _sums(
    h_desc, w_desc, bias_ptr, prior_ptr, partial_ptr, e_ptr, target, counted, z_target, shift, at, inside, start, rows,
    parts, classes, features, e_stride, scale, cap, limit, GRADIENT: tl.constexpr, ROWS: tl.constexpr,
    CLASSES: tl.constexpr, FEATURES: tl.constexpr, PART: tl.constexpr, IEEE: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_PRIOR: tl.constexpr, SCALED: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """Return Σ E of each row without the target, and its shift; rows beyond the limit are computed again."""
    others = tl.zeros((ROWS,), tl.float32)
    for some in range(0, parts, PART):
        part = some + tl.arange(0, PART)
        where = part[:, None].to(tl.int64) * rows + at[None, :]
        others += tl.sum(tl.load(partial_ptr + where, (part < parts)[:, None] & inside[None, :], other=0.0), 0)
    # Rows with a larger sum are computed again, with the largest logit as shift.
    if tl.max((counted & (others > limit)).to(tl.int32), 0) > 0:
        first = start + tl.program_id(0) * ROWS
        largest = tl.where(counted, tl.maximum(z_target * LOG2E, LOWEST), float("inf"))
        for column in range(0, classes, CLASSES):
            at_column = column + tl.arange(0, CLASSES)
            z = product(h_desc, w_desc, first, column, features, ROWS, CLASSES, FEATURES, IEEE)
            z, _ = finished(z, bias_ptr, prior_ptr, at_column, classes, scale, cap, HAS_BIAS, HAS_PRIOR, SCALED, CAPPED)
            z = tl.where(at_column[None, :] == target[:, None], float("-inf"), z)
            largest = tl.maximum(largest, tl.max(z, 1))
        shift = largest
        others = tl.zeros((ROWS,), tl.float32)
        for column in range(0, classes, CLASSES):
            at_column = column + tl.arange(0, CLASSES)
            z = product(h_desc, w_desc, first, column, features, ROWS, CLASSES, FEATURES, IEEE)
            z, slope = finished(
                z, bias_ptr, prior_ptr, at_column, classes, scale, cap, HAS_BIAS, HAS_PRIOR, SCALED, CAPPED
            )
            e = tl.where(at_column[None, :] == target[:, None], 0.0, tl.exp2(z - shift[:, None]))
            others += tl.sum(e, 1)
            if GRADIENT:
                if CAPPED:
                    e *= slope
                # Not through the descriptor: its stores have no order with the one at the target below.
                where = at[:, None].to(tl.int64) * e_stride + at_column[None, :]
                tl.store(e_ptr + where, e.to(e_ptr.dtype.element_ty), (at_column < e_stride)[None, :])
    return others, shift


@triton.jit
def _finish(
    a_ptr, b_ptr, square_ptr, slope_ptr, h_ptr, nll_ptr, normaliser_ptr, factor_ptr, scaled_ptr, e_ptr,
    target, counted, z_target, shift, below, others, at, inside, start, classes, features, e_stride,
    PHASE: tl.constexpr, SQUARE: tl.constexpr, GRADIENT: tl.constexpr, SCALE: tl.constexpr, ROWS: tl.constexpr,
    CLASSES: tl.constexpr, COLUMNS: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """Store the terms of rows from the sum of their E, and what the gradients need.

    ``below`` is by how much the shift of this rank's E is below that of the sum, in units of log 2.
    """
    at_row = start + at
    logit = z_target * LOG2E
    shift = tl.where(counted, shift, 0.0)
    own = tl.exp2(logit - shift)
    total = others + own
    # This is log(1 + x) to full precision for small x, because u - 1 has exactly the error of u.
    x = others / own
    u = 1.0 + x
    near = tl.where(u == 1.0, x, tl.log(u) * (x / (u - 1.0)))
    far = tl.log(total) + (shift - logit) * LN2
    nll = tl.where(own > 0.5, near, far)
    tl.store(nll_ptr + at_row, tl.where(counted, nll, 0.0), inside)
    normaliser = tl.where(z_target == float("-inf"), tl.log(total) + shift * LN2, z_target + nll)
    tl.store(normaliser_ptr + at_row, tl.where(counted, normaliser, 0.0), inside)
    if GRADIENT:
        a = tl.load(a_ptr + at_row, inside, other=0.0)
        b = tl.load(b_ptr + at_row, inside, other=0.0)
        if SQUARE:
            a += tl.where(counted, tl.load(square_ptr + at_row, inside, other=0.0) * normaliser, 0.0)
            a = tl.where((a == 0) & (b != 0), TINY, a)
        here = inside & counted & (target >= 0) & (target < classes)
        factor = tl.where(counted & (a != 0), a / total, 0.0)
        at_target = tl.where(a != 0, (a - b) / a * total, 0.0) - others
        if PHASE == JOINED:
            below = _lifted(e_ptr, below, here, at, inside, classes, e_stride, CLASSES)
            factor *= tl.exp2(below)
            at_target *= tl.exp2(tl.where(here, -below, 0.0))
        tl.store(factor_ptr + at_row, factor, inside)
        if CAPPED:
            at_target *= tl.load(slope_ptr + at_row, inside, other=0.0)
        tl.debug_barrier()  # E of these rows may just have been stored.
        tl.store(e_ptr + at.to(tl.int64) * e_stride + target, at_target.to(e_ptr.dtype.element_ty), here)
        if SCALE:  # The product is 0 in the rows of the last tile that do not exist.
            for some in range(0, features, COLUMNS):
                feature = some + tl.arange(0, COLUMNS)
                valid = (feature < features)[None, :]
                where = at_row[:, None].to(tl.int64) * features + feature[None, :]
                h = tl.load(h_ptr + where, inside[:, None] & valid, other=0.0).to(tl.float32)
                product = (h * factor[:, None]).to(scaled_ptr.dtype.element_ty)
                tl.store(scaled_ptr + at[:, None].to(tl.int64) * features + feature[None, :], product, valid)


@triton.jit
def _lifted(e_ptr, below, here, at, inside, classes, e_stride, CLASSES: tl.constexpr):
    """Return ``below`` after the shift of rows that are far below was lifted by a whole number, and E with it.

    The entry of the target has the size of the sum over all ranks, and could not be stored beside E without that. In
    rows whose target another rank has, E may stay as it is: there the factor is what becomes small.
    """
    lift = tl.where(here & (below < -FARTHEST), tl.floor(-below), 0.0)
    if tl.max(lift, 0) > 0:
        for column in range(0, classes, CLASSES):
            at_column = column + tl.arange(0, CLASSES)
            where = at[:, None].to(tl.int64) * e_stride + at_column[None, :]
            valid = inside[:, None] & (at_column < classes)[None, :]
            e = tl.load(e_ptr + where, valid, other=0.0).to(tl.float32) * tl.exp2(-lift)[:, None]
            tl.store(e_ptr + where, e.to(e_ptr.dtype.element_ty), valid)
    return below + lift
