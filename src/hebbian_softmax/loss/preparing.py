"""What is to be known of the targets before the first logit: which take part, and what each weighs in the result."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from hebbian_softmax.loss.checks import check_values, refused
from hebbian_softmax.loss.weighting import Weighting


@dataclass(frozen=True)
class Prepared:
    target: Tensor
    """(N,): -1 where ignored."""
    share: Tensor
    """(): what each row's loss is multiplied with in the result: 1, or 1 over the weight of all targets."""
    scale: Tensor | None
    """(N,): ``share`` where not ignored, else 0; None where class weights or smoothing ask for more."""


def prepare(
    target: Tensor,
    classes: int,
    ignore_index: int,
    weighting: Weighting,
    *,
    mean: bool,
    zero_if_empty: bool,
    dtype: torch.dtype,
) -> Prepared:
    """For targets (N,), whose values are checked; with ``zero_if_empty`` no target at all weighs 1, not 0.

    On a GPU one kernel does it all: as single operations it takes longer to launch than small losses to compute.
    """
    plain = weighting.class_weight is None and not weighting.smoothing
    suits = target.is_cuda and plain and dtype == torch.float32 and target.numel()
    triton = kernels(target.device) if suits else None
    if triton is not None:
        n = target.shape[0]
        masked, good = torch.empty_like(target), target.new_empty((), dtype=torch.int32)
        scales = target.new_empty(n + 1, dtype=dtype)
        with torch.cuda.device_of(target):
            triton.prepare[(1,)](
                target.contiguous(), masked, scales, good, n, classes, ignore_index,
                MEAN=mean, ZERO_IF_EMPTY=zero_if_empty, BLOCK=2048, num_warps=16,
            )  # fmt: skip
        torch._assert_async(good, refused(classes, ignore_index))
        return Prepared(masked, scales[n], scales[:n])
    check_values(target, classes, ignore_index)
    masked = torch.where(target == ignore_index, -1, target)
    if not mean:
        share = torch.ones((), dtype=dtype, device=target.device)
    else:
        total = weighting.total_weight(masked, dtype)
        share = (torch.where(total == 0, 1, total) if zero_if_empty else total).reciprocal()
    return Prepared(masked, share, None)


@cache
def kernels(device: torch.device) -> Any:
    """None on other GPUs than the fused engine's, where nobody has tried them, and where there is no Triton."""
    if torch.cuda.get_device_capability(device) < (9, 0):
        return None
    try:
        return importlib.import_module("hebbian_softmax.loss.kernels")
    except ImportError:
        return None
