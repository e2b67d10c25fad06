"""The mean of a run: sums of blocks that were made beforehand, and the activations at its ends."""

from __future__ import annotations

import triton
import triton.language as tl

BLOCK_LENGTH = tl.constexpr(16)
"""Sorted activations in a block. The blocks that lie within a run are summed beforehand, all at once."""


@triton.jit
def mean_of_run(h, order, blocks, position, n, features, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Return the mean of the n activations of the run that starts at ``position``, in float32."""
    column = tl.arange(0, BLOCK)
    inside = column < features
    stop = position + n
    first, last = tl.cdiv(position, BLOCK_LENGTH), stop // BLOCK_LENGTH  # the blocks within the run, perhaps none
    head = tl.minimum(first * BLOCK_LENGTH, stop)
    total = _sum_rows(h, order, position, head, features, ROWS, BLOCK)
    for start in range(first, last, ROWS):
        block = start + tl.arange(0, ROWS)
        at = blocks + block.to(tl.int64)[:, None] * features + column[None, :]
        total += tl.sum(tl.load(at, mask=(block < last)[:, None] & inside[None, :], other=0.0), 0)
    total += _sum_rows(h, order, tl.maximum(last * BLOCK_LENGTH, head), stop, features, ROWS, BLOCK)
    return tl.div_rn(total, tl.zeros([BLOCK], tl.float32) + n)


@triton.jit
def _sum_rows(h, order, start, stop, features, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Return the sum of the activations at sorted positions start … stop - 1."""
    column = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(start, stop, ROWS):
        position = first + tl.arange(0, ROWS)
        row = tl.load(order + position, mask=position < stop, other=0)
        at = h + row.to(tl.int64)[:, None] * features + column[None, :]
        x = tl.load(at, mask=(position < stop)[:, None] & (column < features)[None, :], other=0.0)
        total += tl.sum(x.to(tl.float32), 0)
    return total
