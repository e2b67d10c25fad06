"""The stable sort of a batch's classes."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hebbian_softmax._triton import power_of_two

CHUNK = 512
"""Entries that one program sorts."""
MOST = 2**16
"""Keys beyond which torch sorts: the search in every chunk grows with the square of their number."""


def stable_sort(keys: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """Return ``keys.sort(stable=True)`` of integers -1 … classes - 1 by the faster way."""
    if keys.numel() > MOST or not keys.is_cuda:  # Triton's interpreter sorts slowly
        return torch.sort(keys, stable=True)
    return sort_in_chunks(keys, classes)


def sort_in_chunks(keys: Tensor, classes: int, longest: int = CHUNK) -> tuple[Tensor, Tensor]:
    """Return ``keys.sort(stable=True)`` in two launches where torch has several."""
    n = keys.numel()
    chunk = max(16, min(longest, power_of_two(n)))
    many = -(-n // chunk)
    packed = torch.int32 if classes < 2**31 // longest - 1 else torch.int64
    chunks = keys.new_empty(many * chunk, dtype=packed)
    ordered, order = torch.empty_like(keys), torch.empty_like(keys, dtype=torch.int64)
    sort_chunks_kernel[(many,)](keys, chunks, n, CHUNK=chunk, num_warps=max(1, chunk // 128))
    merge_chunks_kernel[(many * chunk // 16,)](
        chunks, ordered, order, n, many,
        CHUNK=chunk, LOG_CHUNK=chunk.bit_length() - 1, ENTRIES=16, TOGETHER=32, num_warps=4,
    )  # fmt: skip
    return ordered, order


@triton.jit
def sort_chunks_kernel(keys, chunks, n, CHUNK: tl.constexpr):
    """Sort one chunk in each program: entries that hold a class and a place within the chunk in one number."""
    place = tl.arange(0, CHUNK)
    at = tl.program_id(0) * CHUNK + place
    last = ((1 << (chunks.dtype.element_ty.primitive_bitwidth - 1)) - 1) // CHUNK  # beyond every class
    key = tl.load(keys + at, mask=at < n, other=-1).to(chunks.dtype.element_ty)
    entry = tl.where(at < n, key, last) * CHUNK + place
    tl.store(chunks + at, tl.sort(entry))


@triton.jit
def merge_chunks_kernel(
    chunks, keys_out, order_out, n, many,
    CHUNK: tl.constexpr, LOG_CHUNK: tl.constexpr, ENTRIES: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """Find the place of each entry in the sorted whole: the number of entries before it, summed over all chunks.

    A binary search in every other chunk counts the entries before it there. Of equal classes, those of earlier chunks
    come first.
    """
    at = tl.program_id(0) * ENTRIES + tl.arange(0, ENTRIES)
    own, rank = at // CHUNK, at % CHUNK
    entry = tl.load(chunks + at)
    key = entry >> LOG_CHUNK
    for some in range(0, many, TOGETHER):
        other = some + tl.arange(0, TOGETHER)
        bound = (key[:, None] + (other[None, :] < own[:, None]).to(key.dtype)) << LOG_CHUNK
        sought = (other[None, :] != own[:, None]) & (other < many)[None, :]
        first = chunks + other[None, :] * CHUNK + tl.zeros([ENTRIES, TOGETHER], tl.int32)
        smaller = tl.zeros([ENTRIES, TOGETHER], tl.int32)
        for bit in tl.static_range(LOG_CHUNK):
            step = CHUNK >> (bit + 1)
            found = tl.load(first + smaller + (step - 1), mask=sought, other=0)
            smaller += tl.where(found < bound, step, 0)
        smaller += (tl.load(first + smaller, mask=sought, other=0) < bound).to(tl.int32)
        rank += tl.sum(tl.where(sought, smaller, 0), 1)
    index = own * CHUNK + (entry & (CHUNK - 1)).to(tl.int32)
    tl.store(keys_out + rank, key.to(keys_out.dtype.element_ty), mask=index < n)
    tl.store(order_out + rank, index.to(order_out.dtype.element_ty), mask=index < n)
