# mypy: ignore-errors
"""What a batch is to the rule: its runs of equal classes, and what it adds to the running values."""

import triton
import triton.language as tl


@triton.jit
def inspect(
    h,
    targets,
    mean,
    batches,
    keys,
    column_sums,
    norm_sums,
    kept,
    nonfinite,
    share,
    n,
    features,
    classes,
    ignore_index,
    horizon,
    CENTER: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Read the activations once: which take part (their class as key, ``classes`` for the others), partial sums."""
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
    for first in range(program * ROWS, n, programs * ROWS):
        row = first + tl.arange(0, ROWS)
        here = row < n
        target = tl.load(targets + row, mask=here, other=-1)
        at = h + row.to(tl.int64)[:, None] * features + column[None, :]
        x = tl.load(at, mask=here[:, None] & inside[None, :], other=0.0).to(tl.float32)
        known = here & (target != ignore_index) & (target >= 0) & (target < classes)
        finite = tl.sum(x * x, 1) < float("inf")  # not so for a NaN either
        keep = known & finite
        tl.store(keys + row, tl.where(keep, target, classes).to(tl.int32), mask=here)
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


@triton.jit
def find_runs(
    keys,
    counts,
    weight,
    before_out,
    n_out,
    rate_out,
    norm_out,
    n,
    features,
    classes,
    gamma,
    limit,
    RATE: tl.constexpr,
    LIMITED: tl.constexpr,
    MATCH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program a sorted position. At the start of a run: n[i], c[i], λ[i] and ‖θ[i]‖; elsewhere n = 0."""
    position = tl.program_id(0)
    key = tl.load(keys + position)
    previous = tl.load(keys + position - 1, mask=position > 0, other=-1)
    before = tl.zeros([], tl.int64)
    many = tl.zeros([], tl.int32)
    if (key != previous) & (key < classes):
        low, high = position + 1, position * 0 + n
        while low < high:  # the first position with another key
            middle = (low + high) // 2
            same = tl.load(keys + middle) == key
            low = tl.where(same, middle + 1, low)
            high = tl.where(same, high, middle)
        many = low - position
        before = tl.load(counts + key)
        if RATE != 0:
            tl.store(rate_out + position, _rate(before, many, gamma, limit, RATE, LIMITED))
        if MATCH:
            if before > 0:
                column = tl.arange(0, BLOCK)
                at = weight + key.to(tl.int64) * features + column
                row = tl.load(at, mask=column < features, other=0.0).to(tl.float32)
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
def see_all_rows(counts, weight, batches, norm_sums, rows_out, features, classes, BLOCK: tl.constexpr):
    """The norms of all familiar rows, as long as no norm of rows is known; afterwards nothing."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    if tl.load(batches) == 0:
        column = tl.arange(0, BLOCK)
        inside = column < features
        total = tl.zeros([], tl.float32)
        rows = tl.zeros([], tl.int32)
        for each in range(program, classes, programs):
            if tl.load(counts + each) > 0:
                at = weight + tl.cast(each, tl.int64) * features + column
                row = tl.load(at, mask=inside, other=0.0).to(tl.float32)
                total += tl.sqrt_rn(tl.sum(row * row, 0))
                rows += 1
        tl.store(norm_sums + program, total)
        tl.store(rows_out + program, rows)


@triton.jit
def statistics(
    column_sums,
    norm_sums,
    kept,
    nonfinite,
    share,
    before,
    row_norms,
    all_norm_sums,
    all_rows,
    mean,
    norms,
    batches,
    nonfinite_count,
    center,
    scale_out,
    n,
    features,
    parts,
    all_parts,
    scale,
    horizon,
    MATCH: tl.constexpr,
    CENTER: tl.constexpr,
    PARTS: tl.constexpr,
    ALL_PARTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    POSITIONS: tl.constexpr,
):
    """Advance the running values, as ``RunningStatistics`` does, and leave the center before this batch and the scale.

    One program for each block of columns; the first one also does what there is one of.
    """
    program = tl.program_id(0)
    part = tl.arange(0, PARTS)
    many = tl.sum(tl.load(kept + part, mask=part < parts, other=0), 0)
    column = program * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < features
    at = column_sums + part[:, None] * features + column[None, :]
    total = tl.sum(tl.load(at, mask=(part < parts)[:, None] & inside[None, :], other=0.0), 0)
    old = tl.load(mean + column, mask=inside, other=0.0)
    tl.store(center + column, old if CENTER else tl.zeros([COLUMNS], tl.float32), mask=inside)
    weight_of_batch = tl.load(share)
    if many > 0:
        tl.store(mean + column, old + weight_of_batch * (tl.div_rn(total, many.to(tl.float32)) - old), mask=inside)
    if program == 0:
        bad = tl.sum(tl.load(nonfinite + part, mask=part < parts, other=0), 0)
        tl.store(nonfinite_count, tl.load(nonfinite_count) + bad)
        if many > 0:
            activations = tl.load(norms + 1)
            norm_sum = tl.sum(tl.load(norm_sums + part, mask=part < parts, other=0.0), 0)
            activations += weight_of_batch * (tl.div_rn(norm_sum, many.to(tl.float32)) - activations)
            tl.store(norms + 1, activations)
            tl.store(batches + 1, tl.load(batches + 1) + 1)
            if MATCH:
                seen = tl.load(batches)
                row_sum = tl.zeros([], tl.float32)
                rows = tl.zeros([], tl.int32)
                if seen == 0:
                    every = tl.arange(0, ALL_PARTS)
                    row_sum = tl.sum(tl.load(all_norm_sums + every, mask=every < all_parts, other=0.0), 0)
                    rows = tl.sum(tl.load(all_rows + every, mask=every < all_parts, other=0), 0)
                else:
                    sums = tl.zeros([POSITIONS], tl.float32)
                    familiar_rows = tl.zeros([POSITIONS], tl.int32)
                    for first in range(0, n, POSITIONS):
                        position = first + tl.arange(0, POSITIONS)
                        familiar = tl.load(before + position, mask=position < n, other=0) > 0
                        sums += tl.load(row_norms + position, mask=familiar, other=0.0)
                        familiar_rows += familiar.to(tl.int32)
                    row_sum = tl.sum(sums, 0)
                    rows = tl.sum(familiar_rows, 0)
                row_norm = tl.load(norms)
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
