# mypy: ignore-errors
"""A stable sort of the classes of a batch in two launches: chunks by themselves, then each entry's place among all."""

import triton
import triton.language as tl


@triton.jit
def sort_chunks(keys, chunks, n, CHUNK: tl.constexpr):
    """One program a chunk: its entries, a class and a place within the chunk in one number, in ascending order."""
    place = tl.arange(0, CHUNK)
    at = tl.program_id(0) * CHUNK + place
    last = ((1 << (chunks.dtype.element_ty.primitive_bitwidth - 1)) - 1) // CHUNK  # beyond every class
    key = tl.load(keys + at, mask=at < n, other=-1).to(chunks.dtype.element_ty)
    entry = tl.where(at < n, key, last) * CHUNK + place
    tl.store(chunks + at, tl.sort(entry))


@triton.jit
def merge_chunks(
    chunks, keys_out, order_out, n, many,
    CHUNK: tl.constexpr, LOG_CHUNK: tl.constexpr, ENTRIES: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """One program some entries: each is searched for in all chunks; those before it there are what precedes it here.

    Of equal classes those of earlier chunks come first.
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
