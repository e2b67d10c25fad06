r"""The cache of a whole sequence on a GPU, in two or three launches whatever its length: kernels and their launchers.

The keys stored before the sequence and those of the sequence lie in different places. Each of the two parts of the band
is one launch, and a last launch joins their results. A program of the band holds a tile of queries and goes through a
slice of their keys, tile by tile. The scores of a tile stay in registers, in float32. For each query only two pairs
(m, s) are carried along: over all keys in its window, and over the keys that hold its target y:

.. math::
    m = \max_i \theta h_t^\top h_i, \qquad s = \sum_i e^{\theta h_t^\top h_i - m}, \qquad
    \log p_c(y_t \mid h_t) = (m_y - m) + (\log s_y - \log s)

Each pair has an m of its own, so a target far below the best score is not lost. Where there are no keys, s is 0 and m
is the lowest number, with which no difference is NaN. Kernels keep scores in units of log 2, because the hardware has
exp2.

Slices are always joined in the same order, so the same input gives the same bits. Nothing waits for the device. Kernels
are not specialised on sizes that change from call to call, so that no call waits for a compilation.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from hebbian_softmax._triton import is_hopper, processors
from hebbian_softmax.memory.history import Timeline

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
LOWEST = tl.constexpr(-3.4028234663852886e38)

SHARED_MEMORY = 160 * 1024
"""The bytes that a program needs for three tiles of keys on their way; GPUs for desktops have less."""

_MOST_SLICES = 64

_PAIRS = 16
"""The bytes of a position in a slice: two maxima and two sums."""


class Tile(NamedTuple):
    """The tile of scores that one program computes, and how many features it reads at a time."""

    rows: int = 128
    keys: int = 256
    features: int = 64


def available(timeline: Timeline) -> bool:
    """Return whether the kernel works on these activations and their GPU.

    It is made for bfloat16 and float16, for GPUs of the Hopper generation or later, and for rows of whole 16-byte
    units.
    """
    h, _ = timeline.sequence
    return (
        h.is_cuda
        and h.dtype in (torch.bfloat16, torch.float16)
        and type(h) is Tensor
        and h.shape[2] % 8 == 0
        and is_hopper(h.device, SHARED_MEMORY)
        and 2 * h.shape[0] * timeline.end < 2**31  # The rows of all streams, which are stored with room to slide.
    )


def log_prob(timeline: Timeline, theta: float, size: int, workspace: int, tile: Tile = Tile()) -> Tensor:  # noqa: B008
    """Return log p_c of the targets, (B, T) in float32: -inf where not in the window, NaN where that is empty."""
    h, labels = timeline.sequence
    streams, length, _ = h.shape
    result = h.new_empty(streams, length, dtype=torch.float32)
    if result.numel() == 0:
        return result
    window = min(size, timeline.end)
    with torch.cuda.device_of(h):
        sequence = _rows(h), _lines(labels)
        partial = _band(sequence, sequence, 0, length, theta, window, workspace, tile)
        stored, reach, slices = partial, 0, 0
        if timeline.start:
            reach = min(length, window)  # The windows of the first positions begin before it.
            stored = _band(sequence, timeline.stored, timeline.start, reach, theta, window, workspace, tile)
            slices = stored.shape[0]
        # With nothing stored, no row reads ``stored``, so any pointer will do.
        join[(-(-result.numel() // 256),)](
            partial, stored, result, result.numel(), length, reach, partial.shape[0], slices, BLOCK=256
        )
    return result


def _band(
    queries: tuple[Tensor, Tensor],
    keys: tuple[Tensor, Tensor],
    ahead: int,
    rows: int,
    theta: float,
    window: int,
    workspace: int,
    tile: Tile,
) -> Tensor:
    """Return the pairs that the first ``rows`` queries found in each slice of the keys, (slices, 4, B, rows).

    The first query stands ``ahead`` positions after the first key.
    """
    (h, targets), (near, labels) = queries, keys
    streams, length, features = near.shape
    tiles = streams * -(-rows // tile.rows)
    widest = -(-min(length, window + tile.rows) // tile.keys)
    most = max(1, min(widest, _MOST_SLICES, workspace // (_PAIRS * streams * rows)))
    slices = slices_of(tiles, most, processors(h.device))
    partial = h.new_empty(slices, 4, streams, rows, dtype=torch.float32)
    band[(tiles, slices)](
        _descriptor(h, tile.rows, tile.features), _descriptor(near, tile.keys, tile.features), targets, labels, partial,
        theta, rows, length, ahead, window, features,
        _stride(h), _stride(near), targets.stride(0), labels.stride(0),
        ROWS=tile.rows, KEYS=tile.keys, FEATURES=tile.features, num_warps=8, num_stages=3,
    )  # fmt: skip
    return partial


def slices_of(tiles: int, most: int, processors: int) -> int:
    """Return into how many slices the keys of every tile of queries are cut.

    Programs take turns on the processors. A round costs the same however few programs are in it, and one more round is
    counted, because programs differ in their work and the last ones end late. Starting a program costs as much as two
    fifths of a tile of scores.

    >>> [slices_of(tiles, 40, processors=132) for tiles in (1, 8, 256, 10_000)]
    [40, 33, 7, 1]
    """

    def cost(slices: int) -> float:
        rounds = -(-tiles * slices // processors)
        return (rounds + 1) * processors / (tiles * slices) + 0.4 * slices / most

    return min(range(1, most + 1), key=cost)


def _rows(h: Tensor) -> Tensor:
    """Return (B, T, d) as rows of one matrix with even distances between streams; copy where the layout is another."""
    (streams, length, features), (step, row, feature) = h.shape, h.stride()
    regular = feature == 1 and row >= features and row % 8 == 0 and h.data_ptr() % 16 == 0
    if regular and streams > 1:  # Row numbers are 32 bits wide.
        regular = step % row == 0 and streams * (step // row) + length < 2**31
    return h if regular else h.clone(memory_format=torch.contiguous_format)


def _lines(labels: Tensor) -> Tensor:
    """Return labels (B, T) with each stream in one piece."""
    return labels if labels.stride(1) == 1 else labels.contiguous()


def _stride(h: Tensor) -> int:
    """Return the number of rows from one stream to the next."""
    return h.stride(0) // h.stride(1) if h.shape[0] > 1 else 0


def _descriptor(h: Tensor, rows: int, features: int) -> Any:
    """Return the descriptor of all streams as one matrix, in tiles of rows × features."""
    height = (h.shape[0] - 1) * _stride(h) + h.shape[1]
    return TensorDescriptor(h, [height, h.shape[2]], [h.stride(1), 1], [rows, features])


@triton.jit
def _take_in(largest, total, scores):
    """Return the pair (m, s) with more scores taken in; scores of -inf do not count."""
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
    """Store both pairs of ROWS queries over one slice of their keys, as (slices, 4, streams, rows).

    Query t stands ``ahead`` + t positions after key 0, and sees the keys 1 … ``window`` positions before it. The
    strides lead from one stream to the next: in rows of the matrices, and in labels.
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
        # Before any branch: a product that is first used inside a branch is not waited for in the other one.
        scores *= scale
        key = first_key + tl.arange(0, KEYS)
        label = tl.load(label_ptr + key, key < keys, other=-1)
        nearest = first_row + ahead - (first_key + KEYS - 1)
        farthest = first_row + ROWS - 1 + ahead - first_key
        # Only the few tiles at the ends of the band have scores to mask.
        if (nearest < 1) | (farthest > window) | (first_key + KEYS > keys):
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
    """Return the pair (m, s) joined with a stored one, whose two values lie ``step`` apart."""
    more = tl.load(partial_ptr + at, inside, other=LOWEST)
    higher = tl.maximum(largest, more)
    more_total = tl.load(partial_ptr + step + at, inside, other=0.0)
    return higher, total * tl.exp2(largest - higher) + more_total * tl.exp2(more - higher)


@triton.jit(do_not_specialize=["positions", "rows", "stored_rows", "splits", "stored_splits"])
def join(
    partial_ptr, stored_ptr, result_ptr, positions, rows, stored_rows, splits, stored_splits, BLOCK: tl.constexpr
):  # fmt: skip
    """Store log p_c from the pairs of all slices.

    All ``rows`` positions of a stream have slices of the sequence's keys; the first ``stored_rows`` positions also have
    slices of the keys that were stored before the sequence.
    """
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
    # This is -inf where the target is not in the window, and -inf - -inf = NaN where the window is empty.
    found = ((target_largest - largest) + (tl.log2(target_total) - tl.log2(total))) * LN2
    tl.store(result_ptr + at, tl.where(found > 0, 0.0, found), inside)
