"""Multiplying gradients by the one number that comes from upstream."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hebbian_softmax.loss.preparing import kernels

_BLOCK = 4096


def scaled(gradients: Sequence[Tensor | None], upstream: Tensor, in_place: bool) -> list[Tensor | None]:
    """``gradient * upstream`` of each, in its own dtype, without waiting for the device.

    ``in_place`` allows a result to be the gradient itself, which nobody else needs any more.
    """
    if upstream.device.type == "cpu" and upstream.item() == 1.0:  # reading an accelerator would stall it
        return [each if in_place or each is None else each.clone() for each in gradients]
    present = [each for each in gradients if each is not None]
    triton = kernels(upstream.device) if in_place and upstream.is_cuda else None
    if triton is not None and all(each.device == upstream.device and each.is_contiguous() for each in present):
        for pair in (present[:2], present[2:]):
            _multiply(triton, pair, upstream)
        return list(gradients)
    wide = upstream.to(torch.promote_types(upstream.dtype, torch.float32))  # 0-dim: does not change a result's dtype
    if in_place:
        return [None if each is None else each.mul_(wide) for each in gradients]
    return [None if each is None else each * wide for each in gradients]


def _multiply(triton: Any, pair: list[Tensor], factor: Tensor) -> None:
    """Launch the kernel for one or two tensors; it returns at once where factor is 1."""
    largest = max((each.numel() for each in pair), default=0)
    if largest == 0:
        return
    x, y = pair[0], pair[-1]
    with torch.cuda.device_of(x):
        triton.multiply[(min(-(-largest // _BLOCK), 2048),)](
            x, y, factor, x.numel(), y.numel() if len(pair) == 2 else 0, BLOCK=_BLOCK
        )
