"""Searching a tensor for a value that is not zero."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024
_PROGRAMS = 512


def any_nonzero(values: Tensor) -> Tensor:
    """Return ``values.any()`` without waiting for the device; the search ends once a value is found."""
    found = values.new_zeros((), dtype=torch.uint8)
    programs = min(_PROGRAMS, -(-values.numel() // _BLOCK))
    if programs:
        with torch.cuda.device_of(values):
            any_nonzero_kernel[(programs,)](values, found, values.numel(), BLOCK=_BLOCK)
    return found.view(torch.bool)


@triton.jit
def any_nonzero_kernel(values, found, n, BLOCK: tl.constexpr):
    """Set ``found`` if a value is not 0 (a NaN is not). All programs stop as soon as one of them has found a value."""
    first = tl.program_id(0).to(tl.int64) * BLOCK
    searching = _not_yet(found, BLOCK)
    while searching & (first < n):
        each = first + tl.arange(0, BLOCK)
        x = tl.load(values + each, mask=each < n, other=0.0)
        if tl.max((x != 0).to(tl.int32), 0) == 1:
            tl.store(found, 1)
        first += tl.num_programs(0) * BLOCK
        searching = _not_yet(found, BLOCK)


@triton.jit
def _not_yet(found, BLOCK: tl.constexpr):
    """Return whether nothing is found. Every thread reads it: all warps of a program must take one branch."""
    return tl.max(tl.load(found + tl.zeros([BLOCK], tl.int32), volatile=True).to(tl.int32), 0) == 0
