r"""The Triton kernels of the cache of a whole sequence.

A program holds a tile of queries and goes through a slice of their band of keys, tile by tile. The scores of a tile
stay in registers, in float32; of each query only two pairs (m, s) are carried, over all keys in its window and over
those that hold its target y:

.. math::
    m = \max_i \theta h_t^\top h_i, \qquad s = \sum_i e^{\theta h_t^\top h_i - m}, \qquad
    \log p_c(y_t \mid h_t) = (m_y - m) + (\log s_y - \log s)

Each pair has its own m, so a target far below the best score is not lost. Scores are kept in units of log 2, because
exp2 is what the hardware has. Where there is nothing, s is 0 and m the lowest number, with which no difference is NaN.

Sizes that change from call to call are not specialised on, so that no call waits for a compilation.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
LOWEST = tl.constexpr(-3.4028234663852886e38)


@triton.jit
def _take_in(largest, total, scores):
    """The pair (m, s) of more scores; those of -inf do not count."""
    higher = tl.maximum(largest, tl.max(scores, 1))
    return higher, total * tl.exp2(largest - higher) + tl.sum(tl.exp2(scores - higher[:, None]), 1)


@triton.jit(do_not_specialize=[
    "theta", "rows", "keys", "ahead", "window", "row_stride", "key_stride", "target_stride", "label_stride",
])  # fmt: skip
def band(
    query_desc, key_desc, target_ptr, label_ptr, partial_ptr, theta, rows, keys, ahead, window, features,
    row_stride, key_stride, target_stride, label_stride,
    ROWS: tl.constexpr, KEYS: tl.constexpr, FEATURES: tl.constexpr,
):  # fmt: skip
    """Both pairs of ROWS queries over one slice of their keys, as (slices, 4, streams, rows).

    Query t is ``ahead`` + t positions after key 0, and sees the keys 1 … ``window`` positions before it. The strides
    are from stream to stream: in rows of the matrices, and in labels.
    """
    row_tiles = tl.cdiv(rows, ROWS)
    stream, streams = tl.program_id(0) // row_tiles, tl.num_programs(0) // row_tiles
    first_row = tl.program_id(0) % row_tiles * ROWS
    split, splits = tl.program_id(1), tl.num_programs(1)
    row = first_row + tl.arange(0, ROWS)
    is_row = row < rows
    target = tl.load(target_ptr + stream.to(tl.int64) * target_stride + row, is_row, other=-1)
    label_ptr += stream.to(tl.int64) * label_stride
    low = tl.maximum(first_row + ahead - window, 0)
    high = tl.minimum(tl.minimum(first_row + ROWS, rows) - 1 + ahead, keys)
    tiles = tl.cdiv(tl.maximum(high - low, 0), KEYS)
    each = tl.cdiv(tiles, splits)
    largest = tl.full((ROWS,), LOWEST, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    target_largest = tl.full((ROWS,), LOWEST, tl.float32)
    target_total = tl.zeros((ROWS,), tl.float32)
    scale = theta * LOG2E
    for tile in tl.range(split * each, tl.minimum(split * each + each, tiles), flatten=True):
        first_key = low + tile * KEYS
        scores = tl.zeros((ROWS, KEYS), tl.float32)
        for k in range(0, tl.cdiv(features, FEATURES)):
            q = query_desc.load([stream * row_stride + first_row, k * FEATURES])
            h = key_desc.load([stream * key_stride + first_key, k * FEATURES])
            scores = tl.dot(q, h.T, scores)
        # Before any branch: a product that is first used within one is not waited for in the other.
        scores *= scale
        key = first_key + tl.arange(0, KEYS)
        label = tl.load(label_ptr + key, key < keys, other=-1)
        nearest = first_row + ahead - (first_key + KEYS - 1)
        farthest = first_row + ROWS - 1 + ahead - first_key
        if (nearest < 1) | (farthest > window) | (first_key + KEYS > keys):  # the ends of the band: few of its tiles
            lag = (row + ahead)[:, None] - key[None, :]
            scores = tl.where((lag >= 1) & (lag <= window) & (key < keys)[None, :], scores, float("-inf"))
        largest, total = _take_in(largest, total, scores)
        scores = tl.where(target[:, None] == label[None, :], scores, float("-inf"))
        target_largest, target_total = _take_in(target_largest, target_total, scores)
    step = streams.to(tl.int64) * rows
    to = partial_ptr + split * 4 * step + stream * rows + row
    tl.store(to, largest, is_row)
    tl.store(to + step, total, is_row)
    tl.store(to + 2 * step, target_largest, is_row)
    tl.store(to + 3 * step, target_total, is_row)


@triton.jit
def _add(largest, total, partial_ptr, step, at, inside):
    """The pair (m, s) with another one, stored ``step`` apart."""
    more = tl.load(partial_ptr + at, inside, other=LOWEST)
    higher = tl.maximum(largest, more)
    more_total = tl.load(partial_ptr + step + at, inside, other=0.0)
    return higher, total * tl.exp2(largest - higher) + more_total * tl.exp2(more - higher)


@triton.jit(do_not_specialize=["positions", "rows", "stored_rows", "splits", "stored_splits"])
def join(
    partial_ptr, stored_ptr, result_ptr, positions, rows, stored_rows, splits, stored_splits, BLOCK: tl.constexpr
):  # fmt: skip
    """log p_c from the pairs of all slices: those of the keys of the sequence, and, for the first ``stored_rows`` of
    the ``rows`` positions of each stream, those of the keys stored before it."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < positions
    largest = tl.full((BLOCK,), LOWEST, tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    target_largest = tl.full((BLOCK,), LOWEST, tl.float32)
    target_total = tl.zeros((BLOCK,), tl.float32)
    step = positions.to(tl.int64)
    for split in range(0, splits):
        pairs = partial_ptr + split * 4 * step
        largest, total = _add(largest, total, pairs, step, at, inside)
        target_largest, target_total = _add(target_largest, target_total, pairs + 2 * step, step, at, inside)
    row = at % rows
    sees = inside & (row < stored_rows)
    at_stored = at // rows * stored_rows + row
    step = step // rows * stored_rows
    for split in range(0, stored_splits):
        pairs = stored_ptr + split * 4 * step
        largest, total = _add(largest, total, pairs, step, at_stored, sees)
        target_largest, target_total = _add(target_largest, target_total, pairs + 2 * step, step, at_stored, sees)
    # -inf where the target is not in the window, and -inf - -inf = NaN where that is empty.
    found = ((target_largest - largest) + (tl.log2(target_total) - tl.log2(total))) * LN2
    tl.store(result_ptr + at, tl.where(found > 0, 0.0, found), inside)
