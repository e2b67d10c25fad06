"""The stable sort of a batch's classes on a GPU."""

from __future__ import annotations

import torch
from torch import Tensor

from hebbian_softmax.write.gpu import device

_CHUNK = 512
_MOST = 2**16
"""Keys beyond which torch sorts: the search in every chunk grows with the square of their number."""


def stable_sort(keys: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """``keys.sort(stable=True)`` of integers -1 … classes - 1, in two launches where torch has several."""
    n = keys.numel()
    if n > _MOST:
        return torch.sort(keys, stable=True)
    triton, chunk = device.kernels(), max(16, min(_CHUNK, device.power_of_two(n)))
    many = -(-n // chunk)
    packed = torch.int32 if classes < 2**31 // _CHUNK - 1 else torch.int64
    chunks = keys.new_empty(many * chunk, dtype=packed)
    ordered, order = torch.empty_like(keys), torch.empty_like(keys, dtype=torch.int64)
    triton.sort_chunks[(many,)](keys, chunks, n, CHUNK=chunk, num_warps=max(1, chunk // 128))
    triton.merge_chunks[(many * chunk // 16,)](
        chunks, ordered, order, n, many,
        CHUNK=chunk, LOG_CHUNK=chunk.bit_length() - 1, ENTRIES=16, TOGETHER=32, num_warps=4,
    )  # fmt: skip
    return ordered, order
