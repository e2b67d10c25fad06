# mypy: ignore-errors
"""The rows: w* of a run, its mixture with the row of its class, and a search through the gradient."""

import triton
import triton.language as tl

LENGTH = tl.constexpr(16)
"""Sorted activations in a block. Of the blocks that lie within a run the sums are made beforehand, all at once."""


@triton.jit
def sum_blocks(
    h, keys, order, rates, blocks, features,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """The sum of one block, if all of it belongs to one class with λ > 0. No single program then sums a long run."""
    first = tl.program_id(0) * LENGTH
    key = tl.load(keys + first)
    if (key >= 0) & (tl.load(keys + first + LENGTH - 1) == key):
        low, high = first * 0, first
        while low < high:  # where the run starts
            middle = (low + high) // 2
            earlier = tl.load(keys + middle) < key
            low = tl.where(earlier, middle + 1, low)
            high = tl.where(earlier, high, middle)
        if tl.load(rates + low) > 0:
            column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
            inside = column < features
            row = tl.load(order + first + tl.arange(0, LENGTH))
            at = h + row.to(tl.int64)[:, None] * features + column[None, :]
            total = tl.sum(tl.load(at, mask=inside[None, :], other=0.0).to(tl.float32), 0)
            tl.store(blocks + tl.program_id(0).to(tl.int64) * features + column, total, mask=inside)


@triton.jit
def _sum_rows(h, order, start, stop, features, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """The sum of the activations at sorted positions start … stop."""
    column = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(start, stop, ROWS):
        position = first + tl.arange(0, ROWS)
        row = tl.load(order + position, mask=position < stop, other=0)
        at = h + row.to(tl.int64)[:, None] * features + column[None, :]
        x = tl.load(at, mask=(position < stop)[:, None] & (column < features)[None, :], other=0.0)
        total += tl.sum(x.to(tl.float32), 0)
    return total


@triton.jit
def memory_of_run(
    h, order, blocks, center, scale, position, n, features, radius,
    OBJECTIVE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """w* of the run at ``position``: the mean of its activations, centred, scaled, through the inner objective."""
    column = tl.arange(0, BLOCK)
    inside = column < features
    stop = position + n
    first, last = tl.cdiv(position, LENGTH), stop // LENGTH  # the blocks within the run; there may be none
    head = tl.minimum(first * LENGTH, stop)
    total = _sum_rows(h, order, position, head, features, ROWS, BLOCK)
    for start in range(first, last, ROWS):
        block = start + tl.arange(0, ROWS)
        at = blocks + block.to(tl.int64)[:, None] * features + column[None, :]
        total += tl.sum(tl.load(at, mask=(block < last)[:, None] & inside[None, :], other=0.0), 0)
    total += _sum_rows(h, order, tl.maximum(last * LENGTH, head), stop, features, ROWS, BLOCK)
    away = tl.load(center + column, mask=inside, other=0.0)
    w = (tl.div_rn(total, tl.zeros([BLOCK], tl.float32) + n) - away) * tl.load(scale)
    if OBJECTIVE == 1:
        w = tl.where(tl.sqrt_rn(tl.sum(w * w, 0)) <= radius, w, _onto_sphere(w, radius))
    if OBJECTIVE == 2:
        w = _onto_sphere(w, radius)
    return w


@triton.jit
def _onto_sphere(w, radius):
    """radius · w / ‖w‖, never outside the sphere; 0 for w = 0. As ``objectives._onto_sphere``."""
    largest = tl.max(tl.abs(w), 0)
    w = w / tl.where(largest == 0, 1.0, largest)
    norm = tl.sqrt_rn(tl.sum(w * w, 0))
    w = w * (radius / tl.where(norm == 0, 1.0, norm))
    outside = tl.sqrt_rn(tl.sum(w * w, 0)) > radius
    return tl.where(outside, w * (1 - 4 * 1.1920929e-7), w)


@triton.jit
def mixed(row, memory, rate, DTYPE: tl.constexpr):
    """Equation 3 in float32, rounded once; the row as it is where that has no finite value."""
    new = (rate * memory + (1 - rate) * row).to(DTYPE)
    finite = tl.min((tl.abs(new.to(tl.float32)) < float("inf")).to(tl.int32), 0)
    return tl.where(finite == 1, new, row.to(DTYPE))


@triton.jit
def write_rows(
    h, keys, order, blocks, before, run_lengths, rates, center, scale, counts, weight, features, radius,
    MEMORIZING: tl.constexpr, OBJECTIVE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program a sorted position. At the start of a run the count advances and, where λ > 0, the row is mixed."""
    position = tl.program_id(0)
    n = tl.load(run_lengths + position)
    if n > 0:
        key = tl.load(keys + position).to(tl.int64)
        tl.store(counts + key, tl.load(before + position) + n)
        if MEMORIZING:
            rate = tl.load(rates + position)
            if rate > 0:
                column = tl.arange(0, BLOCK)
                inside = column < features
                at = weight + key * features + column
                row = tl.load(at, mask=inside, other=0.0).to(tl.float32)
                memory = memory_of_run(
                    h, order, blocks, center, scale, position, n, features, radius, OBJECTIVE, ROWS, BLOCK
                )
                tl.store(at, mixed(row, memory, rate, weight.dtype.element_ty), mask=inside)


@triton.jit
def _not_yet(found, BLOCK: tl.constexpr):
    """Read by every thread, then agreed on: the warps of a program must not part."""
    return tl.max(tl.load(found + tl.zeros([BLOCK], tl.int32), volatile=True).to(tl.int32), 0) == 0


@triton.jit
def any_nonzero(values, found, n, BLOCK: tl.constexpr):
    """Whether a value is not 0 (a NaN is not). Programs stop looking as soon as one has found one."""
    first = tl.program_id(0).to(tl.int64) * BLOCK
    searching = _not_yet(found, BLOCK)
    while searching & (first < n):
        each = first + tl.arange(0, BLOCK)
        x = tl.load(values + each, mask=each < n, other=0.0)
        if tl.max((x != 0).to(tl.int32), 0) == 1:
            tl.store(found, 1)
        first += tl.num_programs(0) * BLOCK
        searching = _not_yet(found, BLOCK)
