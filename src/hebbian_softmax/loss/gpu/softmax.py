r"""The softmax of tiles of logits and its gradient, for the chunked engine on GPUs: kernels and their launchers.

The chunked engine computes logits u in any dtype by a product of cuBLAS. In place of a dozen of torch's operations, two
launches finish the logits z of a tile of rows, find their terms, and overwrite them with dU. The first one
(``row_sums``) finds for each row and each slice of its classes, without the target,

.. math::
    M = \max_v z_v, \qquad s = \sum_v e^{z_v - M}, \qquad t = \sum_v (z_v - M)\, e^{z_v - M} \quad
    \text{(for the entropy only)}

and the second one (``finish_rows``) joins the slices and computes what :mod:`hebbian_softmax.loss.chunked` does, in
float32. Slices are always joined in the same order, so the same input gives the same bits. Nothing waits for the
device.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hebbian_softmax._triton import processors
from hebbian_softmax.loss.gpu.rows import find_target_logits
from hebbian_softmax.loss.gpu.scores import capped, shape_of_logits, switches
from hebbian_softmax.loss.problem import Problem, RowTerms, Scales

__all__ = ["differentiate", "find_target_logits", "settle"]

LOWEST = tl.constexpr(-3.4028234663852886e38)
TINY = tl.constexpr(1.1754943508222875e-38)
LEAST_LOG = tl.constexpr(-1e4)
"""Below this, exp is 0."""

_BLOCK = 2048
_MOST_SLICES = 64
_PROGRAMS = 8
"""Programs for each processor that are enough to keep it busy."""


def settle(
    problem: Problem, z: Tensor, rows: slice, terms: RowTerms, known: bool, scales: Scales | None = None
) -> None:
    """Store the terms of some rows, given their logits u of all classes; with ``scales``, overwrite u with dU.

    ``known`` says that ``terms.target_logit`` is there already, more exactly than u has it.
    """
    count, classes = z.shape
    if count == 0:
        return
    slices = _slices(z)
    sums = z.new_empty(3, slices, count, dtype=torch.float32)
    with torch.cuda.device_of(z):
        row_sums[(count, slices)](
            z, problem.column, problem.prior, terms.target_logit, sums, rows.start, count, classes,
            -(-classes // slices), z.stride(0), *shape_of_logits(problem),
            KNOWN=known, ENTROPY=terms.entropy is not None, BLOCK=_BLOCK, **_switches(problem),
        )  # fmt: skip
        _finish(problem, z, rows, slice(0, classes), terms, scales, sums)


def differentiate(problem: Problem, z: Tensor, rows: slice, classes: slice, terms: RowTerms, scales: Scales) -> None:
    """Overwrite the logits u of some rows and classes with dU, where the terms of the rows are known."""
    if z.shape[0]:
        with torch.cuda.device_of(z):
            _finish(problem, z, rows, classes, terms, scales, None)


def _switches(problem: Problem) -> dict[str, bool]:
    """Return the constants by which a kernel leaves out what is done to logits; the product has added the bias."""
    return {name: value for name, value in switches(problem).items() if name != "HAS_BIAS"}


def _slices(z: Tensor) -> int:
    """Return into how many slices a row is cut, so that there are enough programs."""
    wanted = -(-_PROGRAMS * processors(z.device) // z.shape[0])
    return max(1, min(_MOST_SLICES, z.shape[1] // _BLOCK, wanted))


def _finish(
    problem: Problem,
    z: Tensor,
    rows: slice,
    classes: slice,
    terms: RowTerms,
    scales: Scales | None,
    sums: Tensor | None,
) -> None:
    slices = 1 if scales is None else _slices(z)
    parts = 0 if sums is None else sums.shape[1]
    prior = problem.prior if problem.prior is None else problem.prior[classes]
    a, b, square, of_entropy = (
        (None,) * 4 if scales is None else (scales.normaliser, scales.target, scales.square, scales.entropy)
    )
    finish_rows[(z.shape[0], slices)](
        z, problem.target, problem.column, prior, sums, terms.nll, terms.target_logit, terms.normaliser, terms.entropy,
        a, b, square, of_entropy, rows.start, z.shape[0], z.shape[1], classes.start, -(-z.shape[1] // slices), parts,
        z.stride(0), *shape_of_logits(problem),
        JOIN=sums is not None, GRADIENT=scales is not None, SQUARE=square is not None,
        ENTROPY=terms.entropy is not None, OF_ENTROPY=of_entropy is not None,
        PARTS=_MOST_SLICES, BLOCK=_BLOCK, **_switches(problem),
    )  # fmt: skip


@triton.jit
def _finished(u, prior_ptr, at, inside, scale, cap, HAS_PRIOR: tl.constexpr, SCALED: tl.constexpr,
              CAPPED: tl.constexpr):  # fmt: skip
    """Return the logits z of some u, -inf where there is no class, and the derivative of a softcap (1 without one)."""
    z = u.to(tl.float32)
    slope = 1.0
    if CAPPED:
        z, slope = capped(z, cap)
    if SCALED:
        z *= scale
    if HAS_PRIOR:
        z += tl.load(prior_ptr + at, inside, other=0.0)
    return tl.where(inside, z, float("-inf")), slope


@triton.jit(do_not_specialize=["start", "count", "classes", "width"])
def row_sums(
    z_ptr, column_ptr, prior_ptr, logit_ptr, sums_ptr, start, count, classes, width, stride, scale, cap,
    KNOWN: tl.constexpr, ENTROPY: tl.constexpr, BLOCK: tl.constexpr, HAS_PRIOR: tl.constexpr,
    SCALED: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """Store M, s and perhaps t of one slice of a row; unless it is known, also the logit of the target.

    Each column of a block carries its own M, s and t along, so that columns are joined only once.
    """
    row, part = tl.program_id(0), tl.program_id(1)
    target = tl.load(column_ptr + start + row)
    first, last = part * width, tl.minimum(part * width + width, classes)
    largest = tl.full((BLOCK,), LOWEST, tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    excess = tl.zeros((BLOCK,), tl.float32)
    own = tl.zeros((BLOCK,), tl.float32)
    for some in range(first, last, BLOCK):
        at = some + tl.arange(0, BLOCK)
        inside = at < last
        u = tl.load(z_ptr + row.to(tl.int64) * stride + at, inside, other=0.0)
        z, _ = _finished(u, prior_ptr, at, inside, scale, cap, HAS_PRIOR, SCALED, CAPPED)
        is_target = at == target
        if not KNOWN:
            own = tl.where(is_target, z, own)
        z = tl.where(is_target, float("-inf"), z)
        higher = tl.maximum(largest, z)
        lower, e = tl.exp(largest - higher), tl.exp(z - higher)
        if ENTROPY:
            moved = tl.where(total > 0, (excess + (largest - higher) * total) * lower, 0.0)
            excess = moved + tl.where(e > 0, (z - higher) * e, 0.0)
        total = total * lower + e
        largest = higher
    highest = tl.max(largest, 0)
    lower = tl.exp(largest - highest)
    at_sums = sums_ptr + part * count + row
    slices = tl.num_programs(1)
    tl.store(at_sums, highest)
    tl.store(at_sums + slices * count, tl.sum(total * lower, 0))
    if ENTROPY:
        moved = tl.where(total > 0, (excess + (largest - highest) * total) * lower, 0.0)
        tl.store(at_sums + 2 * slices * count, tl.sum(moved, 0))
    if not KNOWN:
        here = (target >= first) & (target < last)
        nobody = (part == 0) & ((target < 0) | (target >= classes))
        tl.store(logit_ptr + start + row, tl.sum(own, 0), here | nobody)


@triton.jit(do_not_specialize=["start", "count", "classes", "first_class", "width", "parts"])
def finish_rows(
    z_ptr, target_ptr, column_ptr, prior_ptr, sums_ptr, nll_ptr, logit_ptr, normaliser_ptr, entropy_ptr,
    a_ptr, b_ptr, square_ptr, of_entropy_ptr, start, count, classes, first_class, width, parts, stride, scale, cap,
    JOIN: tl.constexpr, GRADIENT: tl.constexpr, SQUARE: tl.constexpr, ENTROPY: tl.constexpr, OF_ENTROPY: tl.constexpr,
    PARTS: tl.constexpr, BLOCK: tl.constexpr, HAS_PRIOR: tl.constexpr, SCALED: tl.constexpr,
    CAPPED: tl.constexpr,
):  # fmt: skip
    """Find the terms of a row from its slices, or load them; overwrite one slice of its u with dU."""
    row, part = tl.program_id(0), tl.program_id(1)
    at_row = start + row
    counted = tl.load(target_ptr + at_row) >= 0
    own_logit = tl.load(logit_ptr + at_row)
    if JOIN:
        some = tl.arange(0, PARTS)
        at_sums = sums_ptr + some * count + row
        largest = tl.load(at_sums, some < parts, other=LOWEST)
        highest = tl.max(largest, 0)
        lower = tl.exp(largest - highest)
        totals = tl.load(at_sums + parts * count, some < parts, other=0.0)
        total = tl.sum(totals * lower, 0)
        others = tl.log(total) + highest
        x = tl.where(own_logit == float("inf"), float("nan"), others - own_logit)
        small = tl.exp(-tl.abs(x))
        above = 1.0 + small  # log(1 + small) to full precision, because above - 1 has exactly the error of above.
        near = tl.where(above == 1.0, small, tl.log(above) * (small / (above - 1.0)))
        nll = tl.where(x > 0, x, 0.0) + near
        miss = 1.0 / (1.0 + tl.exp(-x))  # 1 - p of the target
        # Not z_y + nll, which for an unlikely target has the rounding of two large numbers.
        joined = tl.maximum(others, own_logit) + near
        normaliser = tl.where(own_logit == float("-inf"), others, joined)
        if ENTROPY:
            excess = tl.load(at_sums + 2 * parts * count, some < parts, other=0.0)
            moved = tl.where(totals > 0, (excess + (largest - highest) * totals) * lower, 0.0)
            rest = miss * (normaliser - highest - tl.sum(moved, 0) / total)
            entropy = tl.where(nll < float("inf"), nll * tl.exp(-nll), 0.0) + tl.where(total > 0, rest, 0.0)
            tl.store(entropy_ptr + at_row, tl.where(counted, entropy, 0.0), part == 0)
        tl.store(nll_ptr + at_row, tl.where(counted, nll, 0.0), part == 0)
        tl.store(normaliser_ptr + at_row, tl.where(counted, normaliser, 0.0), part == 0)
    else:
        nll, normaliser = tl.load(nll_ptr + at_row), tl.load(normaliser_ptr + at_row)
        # Where 1 - exp(-nll) would cancel, its series is used.
        series = nll * (1.0 - nll * (0.5 - nll * (1.0 / 6.0 - nll * (1.0 / 24.0))))
        miss = tl.where(nll < 0.03, series, 1.0 - tl.exp(-nll))
    if GRADIENT:
        a, b = tl.load(a_ptr + at_row), tl.load(b_ptr + at_row)
        if SQUARE:
            a += tl.where(counted, tl.load(square_ptr + at_row) * normaliser, 0.0)
        rest = tl.where(counted, a * miss, 0.0)
        at_target = (a - b) - rest
        e_scale, of_entropy, entropy_term = 0.0, 0.0, 0.0
        if JOIN:
            e_scale = rest / tl.maximum(total, TINY)
        if OF_ENTROPY:
            of_entropy, entropy_term = tl.load(of_entropy_ptr + at_row), tl.load(entropy_ptr + at_row)
            share = tl.where(nll < float("inf"), (entropy_term - nll) * tl.exp(-nll), 0.0)
            at_target -= of_entropy * share
        target = tl.load(column_ptr + at_row) - first_class
        for some in range(part * width, tl.minimum(part * width + width, classes), BLOCK):
            at = some + tl.arange(0, BLOCK)
            inside = at < tl.minimum(part * width + width, classes)
            place = z_ptr + row.to(tl.int64) * stride + at
            z, slope = _finished(
                tl.load(place, inside, other=0.0), prior_ptr, at, inside, scale, cap, HAS_PRIOR, SCALED, CAPPED
            )
            if JOIN:
                dz = tl.exp(z - highest) * e_scale
            else:
                # z - z_y - nll is more exact than z - normaliser, but with an impossible target it is NaN.
                possible = own_logit > float("-inf")
                log_p = tl.where(possible, z - own_logit - nll, z - normaliser)
                factor = a
                if OF_ENTROPY:
                    factor = a - of_entropy * tl.maximum(log_p + entropy_term, LEAST_LOG)
                dz = tl.exp(log_p) * factor
            dz = tl.where(at == target, at_target, dz)
            if CAPPED:
                dz *= slope
            tl.store(place, tl.where(counted, dz, 0.0).to(z_ptr.dtype.element_ty), inside)
