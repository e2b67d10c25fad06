# mypy: ignore-errors
"""What a batch is to the rule: which activations take part, their runs of equal classes, the norms of rows."""

import triton
import triton.language as tl

from hebbian_softmax.write.gpu.kernels.step import stepped


@triton.jit
def inspect(
    h, targets, mean, batches, keys, column_sums, norm_sums, kept, nonfinite, share, copy, targets_copy, n, features,
    classes, ignore_index, horizon,
    CENTER: tl.constexpr, COPY: tl.constexpr, STAGES: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Read the activations once: which take part (their class as key, -1 for the others), partial sums.

    With ``COPY`` they are copied on the way.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    column = tl.arange(0, BLOCK)
    inside = column < features
    center = tl.zeros([BLOCK], tl.float32)
    if CENTER:
        center = tl.load(mean + column, mask=inside, other=0.0)
    total = tl.zeros([BLOCK], tl.float32)
    norms = tl.zeros([ROWS], tl.float32)
    many = tl.zeros([ROWS], tl.int32)
    bad = tl.zeros([ROWS], tl.int32)
    for first in tl.range(program * ROWS, n, programs * ROWS, num_stages=STAGES):
        row = first + tl.arange(0, ROWS)
        here = row < n
        target = tl.load(targets + row, mask=here, other=-1)
        at = h + row.to(tl.int64)[:, None] * features + column[None, :]
        x = tl.load(at, mask=here[:, None] & inside[None, :], other=0.0).to(tl.float32)
        if COPY:
            to = copy + row.to(tl.int64)[:, None] * features + column[None, :]
            tl.store(to, x.to(copy.dtype.element_ty), mask=here[:, None] & inside[None, :])
            tl.store(targets_copy + row, target, mask=here)
        known = here & (target != ignore_index) & (target >= 0) & (target < classes)
        finite = tl.sum(x * x, 1) < float("inf")  # not so for a NaN either
        keep = known & finite
        tl.store(keys + row, tl.where(keep, target, -1).to(keys.dtype.element_ty), mask=here)
        away = x - center[None, :]
        norms += tl.where(keep, tl.sqrt_rn(tl.sum(away * away, 1)), 0.0)
        total += tl.sum(tl.where(keep[:, None], x, 0.0), 0)
        many += keep.to(tl.int32)
        bad += (known & (finite == 0)).to(tl.int32)
    tl.store(column_sums + program * features + column, total, mask=inside)
    tl.store(norm_sums + program, tl.sum(norms, 0))
    tl.store(kept + program, tl.sum(many, 0))
    tl.store(nonfinite + program, tl.sum(bad, 0))
    if program == 0:  # ``statistics`` advances batches, so what its programs share is left here
        seen = tl.load(batches + 1) + 1
        tl.store(share, tl.div_rn(1.0, tl.minimum(seen, horizon).to(tl.float32)))


WINDOW = tl.constexpr(128)
"""Sorted keys that are looked at together for the end of a run."""


@triton.jit
def find_runs(
    keys, counts, weight, before_out, n_out, rate_out, norm_out, batches, all_norms, all_rows, n, features, classes,
    gamma, limit, slots, grad, first, second, step, lr, decay, rest1, keep2, rest2, log1, log2, eps,
    UPDATE: tl.constexpr, LR_TENSOR: tl.constexpr, RATE: tl.constexpr, LIMITED: tl.constexpr, MATCH: tl.constexpr,
    SLOTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program a sorted position. At the start of a run: n[i], c[i], λ[i] and ‖θ̂[i]‖; elsewhere n = 0.

    Given a step that is still to be made, θ̂ is what it will leave. ``slots`` tells a row where its run starts.
    With ``MATCH`` the programs beyond n look at all rows.
    """
    position = tl.program_id(0)
    if MATCH:
        if position >= n:
            _see_all_rows(
                position - n, tl.num_programs(0) - n, counts, weight, batches, all_norms, all_rows, features, classes,
                grad, first, second, step, lr, decay, rest1, keep2, rest2, log1, log2, eps, UPDATE, LR_TENSOR, BLOCK,
            )  # fmt: skip
            return
    key = tl.load(keys + position).to(tl.int32)
    previous = tl.load(keys + position - 1, mask=position > 0, other=-1)
    before = tl.zeros([], tl.int64)
    many = tl.zeros([], tl.int32)
    if (key != previous) & (key >= 0):
        before = tl.load(counts + key)
        found = many + WINDOW
        while found == WINDOW:  # most runs end within the first window
            at = position + many + tl.arange(0, WINDOW)
            found = tl.sum((tl.load(keys + at, mask=at < n, other=-1) == key).to(tl.int32), 0)
            many += found
        if SLOTS:
            tl.store(slots + key, position)
        if RATE != 0:
            tl.store(rate_out + position, _rate(before, many, gamma, limit, RATE, LIMITED))
        if MATCH:
            if before > 0:
                column = tl.arange(0, BLOCK)
                at = key.to(tl.int64) * features + column
                row, _m, _v = stepped(
                    weight, at, column < features, grad, first, second, step, lr, decay, rest1, keep2, rest2, log1,
                    log2, eps, UPDATE, LR_TENSOR,
                )  # fmt: skip
                tl.store(norm_out + position, tl.sqrt_rn(tl.sum(row * row, 0)))
    tl.store(n_out + position, many)
    tl.store(before_out + position, before)


@triton.jit
def _rate(before, n, gamma, limit, RATE: tl.constexpr, LIMITED: tl.constexpr):
    """Equation 4. 1/c is divided in float64 and rounded once, so λ has the bits of the float64 rate rounded."""
    count = before
    if RATE == 2:
        count = before + n
    rate = gamma
    if RATE != 3:
        inverse = 1.0 / tl.maximum(count, 1).to(tl.float64)
        rate = tl.maximum(inverse.to(tl.float32), gamma)
    if LIMITED:
        rate = tl.where(count < limit, rate, 0.0)
    return rate


@triton.jit
def _see_all_rows(
    program, programs, counts, weight, batches, norm_sums, rows_out, features, classes, grad, first, second, step, lr,
    decay, rest1, keep2, rest2, log1, log2, eps,
    UPDATE: tl.constexpr, LR_TENSOR: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The norms of all familiar rows, as long as no norm of rows is known; afterwards nothing."""
    if tl.load(batches) == 0:
        column = tl.arange(0, BLOCK)
        inside = column < features
        total = tl.zeros([], tl.float32)
        rows = tl.zeros([], tl.int32)
        for each in range(program, classes, programs):
            if tl.load(counts + each) > 0:
                at = tl.cast(each, tl.int64) * features + column
                row, _m, _v = stepped(
                    weight, at, inside, grad, first, second, step, lr, decay, rest1, keep2, rest2, log1, log2, eps,
                    UPDATE, LR_TENSOR,
                )  # fmt: skip
                total += tl.sqrt_rn(tl.sum(row * row, 0))
                rows += 1
        tl.store(norm_sums + program, total)
        tl.store(rows_out + program, rows)
