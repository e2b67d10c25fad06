"""The two small kernels at the ends of the loss: preparing the targets, and multiplying by the upstream gradient."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hebbian_softmax import _torch
from hebbian_softmax.loss.checks import refused

_BLOCK = 4096


def prepare(
    target: Tensor, classes: int, ignore_index: int, mean: bool, zero_if_empty: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the targets (N,) with -1 for ignored ones, the share of a row in the result, and the scales of all rows.

    A target that is no class makes the device fail, as in ``F.cross_entropy``.
    """
    n = target.shape[0]
    masked, good = torch.empty_like(target), target.new_empty((), dtype=torch.int32)
    scales = target.new_empty(n + 1, dtype=torch.float32)
    with torch.cuda.device_of(target):
        prepare_kernel[(1,)](
            target.contiguous(), masked, scales, good, n, classes, ignore_index,
            MEAN=mean, ZERO_IF_EMPTY=zero_if_empty, BLOCK=2048, num_warps=16,
        )  # fmt: skip
    _torch.assert_on_device(good, refused(classes, ignore_index))
    return masked, scales[n], scales[:n]


@triton.jit(do_not_specialize=["n", "classes", "ignore_index"])
def prepare_kernel(
    target_ptr, masked_ptr, scale_ptr, good_ptr, n, classes, ignore_index,
    MEAN: tl.constexpr, ZERO_IF_EMPTY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Store the masked targets, the n scales followed by the share, and whether all targets are classes.

    One program does it all.
    """
    many = tl.zeros((BLOCK,), tl.int32)
    bad = tl.zeros((BLOCK,), tl.int32)
    for start in tl.range(0, n, BLOCK, num_stages=3):
        at = start + tl.arange(0, BLOCK)
        target = tl.load(target_ptr + at, at < n, other=ignore_index)
        counted = target != ignore_index
        many += counted.to(tl.int32)
        bad += (counted & ((target < 0) | (target >= classes))).to(tl.int32)
    total = tl.sum(many, 0).to(tl.float32)
    tl.store(good_ptr, (tl.sum(bad, 0) == 0).to(tl.int32))
    share = total * 0 + 1.0
    if MEAN:
        share = tl.div_rn(share, tl.maximum(total, 1.0) if ZERO_IF_EMPTY else total)
    for start in tl.range(0, n, BLOCK, num_stages=3):
        at = start + tl.arange(0, BLOCK)
        target = tl.load(target_ptr + at, at < n, other=ignore_index)
        # A target that is no class becomes -1, too: it must never be used as an address.
        good = (target != ignore_index) & (target >= 0) & (target < classes)
        tl.store(masked_ptr + at, tl.where(good, target, -1), at < n)
        tl.store(scale_ptr + at, tl.where(good, share, 0.0), at < n)
    tl.store(scale_ptr + n, share)


def multiply(tensors: list[Tensor], factor: Tensor) -> None:
    """Multiply contiguous tensors by the number ``factor`` in place, two in a launch; do not wait for the device."""
    for pair in (tensors[:2], tensors[2:]):
        largest = max((each.numel() for each in pair), default=0)
        if largest == 0:
            continue
        x, y = pair[0], pair[-1]
        with torch.cuda.device_of(x):
            multiply_kernel[(min(-(-largest // _BLOCK), 2048),)](
                x, y, factor, x.numel(), y.numel() if len(pair) == 2 else 0, BLOCK=_BLOCK
            )


@triton.jit(do_not_specialize=["n", "m"])
def multiply_kernel(x_ptr, y_ptr, factor_ptr, n, m, BLOCK: tl.constexpr):
    """Multiply x and y by the factor, in at least float32; do nothing at all where the factor is 1."""
    factor = tl.load(factor_ptr)
    if factor == 1.0:
        return
    _multiply(x_ptr, factor, n, BLOCK)
    _multiply(y_ptr, factor, m, BLOCK)


@triton.jit
def _multiply(x_ptr, factor, n, BLOCK: tl.constexpr):
    for start in range(tl.program_id(0).to(tl.int64) * BLOCK, n, tl.num_programs(0).to(tl.int64) * BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + at, at < n)
        wide: tl.constexpr = tl.float64 if x_ptr.dtype.element_ty == tl.float64 else tl.float32
        tl.store(x_ptr + at, (x.to(wide) * factor.to(wide)).to(x_ptr.dtype.element_ty), at < n)
