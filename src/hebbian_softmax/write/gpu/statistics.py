"""Taking a batch into the running values."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hebbian_softmax._triton import power_of_two
from hebbian_softmax.write.gpu.inspect import PartialSums
from hebbian_softmax.write.running import FORGOTTEN, HORIZON, LEAST_SPREAD, SAMPLED
from hebbian_softmax.write.settling import CAUGHT_UP, LEAST_FIT, RECENT

if TYPE_CHECKING:
    from hebbian_softmax.layer import HebbianSoftmax

_COLUMNS = 32
_LEAST_SPREAD = tl.constexpr(LEAST_SPREAD)
_FORGOTTEN = tl.constexpr(FORGOTTEN)


def advance(
    head: HebbianSoftmax,
    sums: PartialSums,
    keys: Tensor,
    before: Tensor,
    many: Tensor,
    norms: Tensor,
    all_norms: Tensor,
    all_rows: Tensor,
    fits: tuple[Tensor, Tensor] | None,
    components: Tensor,
    direction: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Advance the running values as ``RunningStatistics`` does.

    Return the center before the batch, the scale, and for writes across the mean the ``usual_component`` of a first
    write and whether that is known, float32 (2,).

    Each run has a key, a count ``before`` the batch, and ``many`` occurrences in it. ``norms`` are the norms of rows
    whose count is not 0; ``all_norms`` and ``all_rows`` are partial sums over all familiar rows, which are needed as
    long as no norm of rows is known. ``fits`` are the cosines of classes that are measured, and which those are, where
    the head waits for features to settle. ``components`` are the products of familiar rows with the mean, and
    ``direction`` is one over the mean's norm.
    """
    running, (n,) = head.running, before.shape
    (features,), (parts,), (row_parts,) = running.mean.shape, sums.kept.shape, all_rows.shape
    match = head.scale == "match"
    center, scale, along = torch.empty_like(running.mean), sums.share.new_empty(1), sums.share.new_empty(2)
    stride = running.grow(head.num_classes)
    across = Along(
        components, direction, running.along, running.along_batches, keys, head.counts, running.first,
        running.returning, along, running.first.shape[0], stride, head.limit,
    )  # fmt: skip
    numbers = 2 if head.write == "across" else 1  # programs for single numbers
    statistics_kernel[(-(-features // _COLUMNS) + numbers,)](
        sums, before, many, norms, all_norms, all_rows, running.mean, running.norms, running.batches,
        head.nonfinite_count, center, scale, _fit(head, fits), across, running.seen, n, features, parts, row_parts,
        1.0 if match else head.scale, HORIZON, RECENT, CAUGHT_UP, LEAST_FIT, ACROSS=head.write == "across",
        MATCH=match, FIT=fits is not None,
        CENTER=head.write != "literal", PARTS=power_of_two(parts),
        ALL_PARTS=power_of_two(row_parts), COLUMNS=_COLUMNS, POSITIONS=min(8192, power_of_two(n)),
        MOST_SAMPLED=SAMPLED, num_warps=16,
    )  # fmt: skip
    torch.autograd.graph.increment_version((*running.buffers(), head.nonfinite_count))
    return center, scale, along


class Along(NamedTuple):
    """What ``see_along`` and ``see_returning`` of ``RunningStatistics`` need and change; the entry for the result."""

    components: Tensor
    direction: Tensor
    along: Tensor
    batches: Tensor
    keys: Tensor
    counts: Tensor
    first: Tensor
    returning: Tensor
    out: Tensor
    sampled: int
    stride: int
    limit: int


class Fit(NamedTuple):
    """The cosines of measured runs (N,), which those are (N,), and what ``Settling`` makes of them."""

    cosines: Tensor
    measured: Tensor
    fit: Tensor
    recent: Tensor
    batches: Tensor
    began: Tensor


def _fit(head: HebbianSoftmax, fits: tuple[Tensor, Tensor] | None) -> Fit:
    settling = head.settling
    if settling is None or fits is None:  # nothing reads them
        return Fit(*[head.running.batches] * len(Fit._fields))
    torch.autograd.graph.increment_version((settling.fit, settling.recent, settling.batches, settling.began))
    return Fit(*fits, settling.fit, settling.recent, settling.batches, settling.began)


@triton.jit
def statistics_kernel(
    sums, before, n_of_runs, row_norms, all_norm_sums, all_rows, mean, norms, batches, nonfinite_count, center,
    scale_out, fit, across, seen_in_all, n, features, parts, all_parts, scale, horizon, few_batches, caught_up,
    least_fit, ACROSS: tl.constexpr, MATCH: tl.constexpr, FIT: tl.constexpr, CENTER: tl.constexpr,
    PARTS: tl.constexpr, ALL_PARTS: tl.constexpr, COLUMNS: tl.constexpr, POSITIONS: tl.constexpr,
    MOST_SAMPLED: tl.constexpr,
):  # fmt: skip
    """Advance the mean in one program for each block of columns, and single numbers in the programs after those.

    One of these has the line through rare rows, where rows are written across the mean; the other has all the rest.
    """
    program = tl.program_id(0)
    blocks = tl.cdiv(features, COLUMNS)
    part = tl.arange(0, PARTS)
    many = tl.sum(tl.load(sums.kept + part, mask=part < parts, other=0), 0)
    weight_of_batch = tl.load(sums.share)
    if program < blocks:
        column = program * COLUMNS + tl.arange(0, COLUMNS)
        inside = column < features
        at = sums.columns + part[:, None] * features + column[None, :]
        total = tl.sum(tl.load(at, mask=(part < parts)[:, None] & inside[None, :], other=0.0), 0)
        old = tl.load(mean + column, mask=inside, other=0.0)
        tl.store(center + column, old if CENTER else tl.zeros([COLUMNS], tl.float32), mask=inside)
        if many > 0:
            tl.store(mean + column, old + weight_of_batch * (tl.div_rn(total, many.to(tl.float32)) - old), mask=inside)
    elif program > blocks:
        if ACROSS:
            if many > 0:
                _see_along(across, before, n_of_runs, n, sums, horizon, POSITIONS, MOST_SAMPLED)
    else:
        bad = tl.sum(tl.load(sums.nonfinite + part, mask=part < parts, other=0), 0)
        tl.store(nonfinite_count, tl.load(nonfinite_count) + bad)
        if many > 0:
            activations, row_norm = tl.load(norms + 1), tl.load(norms)
            seen = tl.load(batches)
            tl.debug_barrier()  # every warp has read what one thread changes below
            norm_sum = tl.sum(tl.load(sums.norms + part, mask=part < parts, other=0.0), 0)
            activations += weight_of_batch * (tl.div_rn(norm_sum, many.to(tl.float32)) - activations)
            tl.store(norms + 1, activations)
            batches_before, seen_before = tl.load(batches + 1), tl.load(seen_in_all)
            if FIT:
                if tl.load(fit.began) < 0:
                    _take_in_fit(fit, before, n, batches_before, horizon, few_batches, caught_up, least_fit, POSITIONS)
            tl.debug_barrier()
            tl.store(batches + 1, batches_before + 1)
            tl.store(seen_in_all, seen_before + many)
            if MATCH:
                if seen == 0:
                    every = tl.arange(0, ALL_PARTS)
                    row_sum = tl.sum(tl.load(all_norm_sums + every, mask=every < all_parts, other=0.0), 0)
                    rows = tl.sum(tl.load(all_rows + every, mask=every < all_parts, other=0), 0)
                else:
                    row_sum, rows = _norms_of_familiar_rows(before, row_norms, n, POSITIONS)
                if rows > 0:
                    seen += 1
                    rate = tl.div_rn(1.0, tl.minimum(seen, horizon).to(tl.float32))
                    row_norm += rate * (tl.div_rn(row_sum, rows.to(tl.float32)) - row_norm)
                    tl.store(norms, row_norm)
                    tl.store(batches, seen)
                known = (seen > 0) & (activations > 0)
                ratio = tl.div_rn(row_norm, tl.where(known, activations, 1.0))
                tl.store(scale_out, tl.where(known, ratio, 1.0))
            else:
                tl.store(scale_out, scale)


@triton.jit
def _norms_of_familiar_rows(before, row_norms, n, POSITIONS: tl.constexpr):
    """Return the sum of the norms of the batch's familiar rows, and their number."""
    norms, rows = tl.zeros([POSITIONS], tl.float32), tl.zeros([POSITIONS], tl.int32)
    for first in range(0, n, POSITIONS):
        position = first + tl.arange(0, POSITIONS)
        familiar = tl.load(before + position, mask=position < n, other=0) > 0
        # What is loaded for other positions has no meaning, but nothing waits for the count.
        norms += tl.where(familiar, tl.load(row_norms + position, mask=position < n, other=0.0), 0.0)
        rows += familiar.to(tl.int32)
    return tl.sum(norms, 0), tl.sum(rows, 0)


@triton.jit
def _see_along(across, before, n_of_runs, n, sums, horizon, POSITIONS: tl.constexpr, SAMPLED: tl.constexpr):
    """Advance the line through rows that were seen fewer than T times, and store where a first write reads it.

    It is known by the means of x = log c, of y, the component along the mean, of x² and of xy. It is read at c*, as
    ``RunningStatistics.usual_component`` says.
    """
    zeros, came = tl.zeros([POSITIONS], tl.float32), tl.zeros([POSITIONS], tl.int64)
    xs, ys, x_squares, xys, rare_rows = zeros, zeros, zeros, zeros, tl.zeros([POSITIONS], tl.int32)
    batches_before = tl.load(sums.before)
    slot = tl.arange(0, SAMPLED)
    here = slot < across.sampled
    once = tl.load(across.counts + slot.to(tl.int64) * across.stride, mask=here, other=0) == 1
    waited = tl.sum(tl.where(once, batches_before - tl.load(across.first + slot, mask=here, other=0), 0), 0)
    for first in range(0, n, POSITIONS):
        position = first + tl.arange(0, POSITIONS)
        count = tl.load(before + position, mask=position < n, other=0)
        found = tl.load(across.components + position, mask=position < n, other=0.0)
        many = tl.load(n_of_runs + position, mask=position < n, other=0)
        rare = (count > 0) & (count < across.limit)
        each_x = tl.log(tl.where(rare, count, 1).to(tl.float32))
        each_y = tl.where(rare, found, 0.0)  # not yet divided by the norm of the mean
        xs += each_x
        ys += each_y
        x_squares += each_x * each_x
        xys += each_x * each_y
        rare_rows += rare.to(tl.int32)
        key = tl.load(across.keys + position, mask=position < n, other=0).to(tl.int64)
        sampled = (many > 0) & (key % across.stride == 0)
        first_of = across.first + tl.where(sampled, key // across.stride, 0)
        age = batches_before - tl.load(first_of, mask=sampled & (count == 1), other=0)
        came += tl.where(sampled & (count == 1), age * many, 0)
        # What is loaded matters for classes seen once only, and this is stored for classes never seen.
        tl.store(first_of, batches_before, mask=sampled & (count == 0))
    x_sum, y_sum, square_sum, product_sum = tl.sum(xs, 0), tl.sum(ys, 0), tl.sum(x_squares, 0), tl.sum(xys, 0)
    rows = tl.sum(rare_rows, 0)
    direction, seen = tl.load(across.direction), tl.load(across.batches)
    x, y = tl.load(across.along), tl.load(across.along + 1)
    squares, products = tl.load(across.along + 2), tl.load(across.along + 3)
    mean_came, mean_waited = tl.load(across.returning), tl.load(across.returning + 1)
    tl.debug_barrier()  # every warp has read what one thread changes below
    if (rows > 0) & (direction > 0):
        seen += 1
        many_rows, batches = rows.to(tl.float32), tl.minimum(seen, horizon).to(tl.float32)
        x += tl.div_rn(tl.div_rn(x_sum, many_rows) - x, batches)
        y += tl.div_rn(tl.div_rn(y_sum * direction, many_rows) - y, batches)
        squares += tl.div_rn(tl.div_rn(square_sum, many_rows) - squares, batches)
        products += tl.div_rn(tl.div_rn(product_sum * direction, many_rows) - products, batches)
        tl.store(across.along, x)
        tl.store(across.along + 1, y)
        tl.store(across.along + 2, squares)
        tl.store(across.along + 3, products)
        tl.store(across.batches, seen)
    weight_of_batch = tl.load(sums.share)
    mean_came += weight_of_batch * (tl.sum(came, 0).to(tl.float32) - mean_came)
    mean_waited += weight_of_batch * (waited.to(tl.float32) - mean_waited)
    tl.store(across.returning, mean_came)
    tl.store(across.returning + 1, mean_waited)
    known = mean_waited > _FORGOTTEN
    often = tl.div_rn(mean_came, tl.where(known, mean_waited, 1.0))
    usual = tl.maximum(often * batches_before.to(tl.float32), 1.0)
    below = tl.where(known, tl.minimum(tl.log(usual) - x, 0.0), 0.0)  # the mean of rare rows
    slope = tl.div_rn(tl.maximum(products - x * y, 0.0), tl.maximum(squares - x * x, _LEAST_SPREAD))
    tl.store(across.out, y + slope * below)
    tl.store(across.out + 1, (seen > 0).to(tl.float32))


@triton.jit
def _take_in_fit(
    fit, before, n, batches_before, horizon, few_batches, caught_up, least_fit, POSITIONS: tl.constexpr
):  # fmt: skip
    """Advance both means of the fit by the mean cosine of measured classes seen before; note when features settled."""
    cosines = tl.zeros([POSITIONS], tl.float32)
    classes = tl.zeros([POSITIONS], tl.int32)
    for first in range(0, n, POSITIONS):
        position = first + tl.arange(0, POSITIONS)
        here = tl.load(fit.measured + position, mask=position < n, other=0) > 0
        here = here & (tl.load(before + position, mask=position < n, other=0) > 0)
        cosines += tl.where(here, tl.load(fit.cosines + position, mask=here, other=0.0), 0.0)
        classes += here.to(tl.int32)
    many = tl.sum(classes, 0)
    if many > 0:
        value, recent = tl.load(fit.fit), tl.load(fit.recent)
        seen, began = tl.load(fit.batches) + 1, tl.load(fit.began)
        found = tl.div_rn(tl.sum(cosines, 0), many.to(tl.float32))
        tl.debug_barrier()  # every warp has read what one thread changes below
        value += tl.div_rn(found - value, tl.minimum(seen, horizon).to(tl.float32))
        recent += tl.div_rn(found - recent, tl.minimum(seen, few_batches).to(tl.float32))
        tl.store(fit.fit, value)
        tl.store(fit.recent, recent)
        tl.store(fit.batches, seen)
        settled = (value >= least_fit) & (value >= caught_up * recent) & (seen >= horizon)
        tl.store(fit.began, tl.where((began < 0) & settled, batches_before + 1, began))
