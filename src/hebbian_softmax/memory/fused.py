"""The cache of a whole sequence on a GPU, in two or three launches whatever its length.

The keys stored before the sequence and those of the sequence itself lie in different places: each part of the band is
one launch, of programs that hold a tile of queries and go through a slice of their keys, and a last one joins what they
found. No score leaves the registers. Four numbers a position and slice are held, in the same order every time, so the
same input gives the same bits. Nothing waits for the device.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from hebbian_softmax.memory import kernels
from hebbian_softmax.memory.history import Timeline

TILE_ROWS, TILE_KEYS, TILE_FEATURES = 128, 256, 64
"""The tile of scores that one program makes, and how many features it takes at a time."""

_SHARED_MEMORY = 160 * 1024
"""Bytes a program needs for three such steps on the way: more than GPUs for desktops have."""

_MOST_SLICES = 64

_PAIRS = 16
"""Bytes a position and slice: two maxima and two sums."""


def available(timeline: Timeline) -> bool:
    """bfloat16 or float16 on a GPU of the Hopper generation or later, rows of whole 16-byte units."""
    h, _ = timeline.sequence
    if h.device.type != "cuda" or h.dtype not in (torch.bfloat16, torch.float16) or type(h) is not Tensor:
        return False
    properties = torch.cuda.get_device_properties(h.device)
    return (
        h.shape[2] % 8 == 0
        and properties.major >= 9
        and getattr(properties, "shared_memory_per_block_optin", _SHARED_MEMORY) >= _SHARED_MEMORY
        and 2 * h.shape[0] * timeline.end < 2**31  # rows of a matrix of all streams, stored with room to slide
    )


def log_prob(timeline: Timeline, theta: float, size: int, workspace: int) -> Tensor:
    """log p_c of the targets (B, T), float32: -inf where not in the window, NaN where that is empty."""
    h, labels = timeline.sequence
    streams, length, _ = h.shape
    result = h.new_empty(streams, length, dtype=torch.float32)
    if result.numel() == 0:
        return result
    window = min(size, timeline.end)
    with torch.cuda.device_of(h):
        sequence = _rows(h), _lines(labels)
        partial = _band(sequence, sequence, 0, length, theta, window, workspace)
        stored, reach, slices = partial, 0, 0
        if timeline.start:
            reach = min(length, window)  # the first positions, whose windows begin before the sequence
            stored = _band(sequence, timeline.stored, timeline.start, reach, theta, window, workspace)
            slices = stored.shape[0]
        # With nothing stored, any pointer will do in its place: no row looks there.
        kernels.join[(-(-result.numel() // 256),)](
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
) -> Tensor:
    """(slices, 4, B, rows): what the first queries, the first ``ahead`` positions after key 0, found in each slice."""
    (h, targets), (near, labels) = queries, keys
    streams, length, features = near.shape
    tiles = streams * -(-rows // TILE_ROWS)
    widest = -(-min(length, window + TILE_ROWS) // TILE_KEYS)
    most = max(1, min(widest, _MOST_SLICES, workspace // (_PAIRS * streams * rows)))
    slices = slices_of(tiles, most, processors(h.device))
    partial = h.new_empty(slices, 4, streams, rows, dtype=torch.float32)
    kernels.band[(tiles, slices)](
        _descriptor(h, TILE_ROWS), _descriptor(near, TILE_KEYS), targets, labels, partial,
        theta, rows, length, ahead, window, features,
        _stride(h), _stride(near), targets.stride(0), labels.stride(0),
        ROWS=TILE_ROWS, KEYS=TILE_KEYS, FEATURES=TILE_FEATURES, num_warps=8, num_stages=3,
    )  # fmt: skip
    return partial


def slices_of(tiles: int, most: int, processors: int) -> int:
    """Into how many slices the keys of every tile of queries are cut.

    Programs take turns on the processors. A round counts as whole however few are in it, and there is one more, since
    their work is not alike and the last end late. A program's start counts as two fifths of a tile of scores.

    >>> [slices_of(tiles, 40, processors=132) for tiles in (1, 8, 256, 10_000)]
    [40, 33, 7, 1]
    """

    def cost(slices: int) -> float:
        rounds = -(-tiles * slices // processors)
        return (rounds + 1) * processors / (tiles * slices) + 0.4 * slices / most

    return min(range(1, most + 1), key=cost)


def processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


def _rows(h: Tensor) -> Tensor:
    """(B, T, d) as rows of one matrix, every stream as many rows after the one before; copied where it is not."""
    (streams, length, features), (step, row, feature) = h.shape, h.stride()
    regular = feature == 1 and row >= features and row % 8 == 0 and h.data_ptr() % 16 == 0
    if regular and streams > 1:  # row numbers are 32 bits wide
        regular = step % row == 0 and streams * (step // row) + length < 2**31
    return h if regular else h.clone(memory_format=torch.contiguous_format)


def _lines(labels: Tensor) -> Tensor:
    return labels if labels.stride(1) == 1 else labels.contiguous()


def _stride(h: Tensor) -> int:
    """Rows from stream to stream."""
    return h.stride(0) // h.stride(1) if h.shape[0] > 1 else 0


def _descriptor(h: Tensor, rows: int) -> Any:
    """Of all streams as one matrix, in tiles of rows × features."""
    height = (h.shape[0] - 1) * _stride(h) + h.shape[1]
    return TensorDescriptor(h, [height, h.shape[2]], [h.stride(1), 1], [rows, TILE_FEATURES])
