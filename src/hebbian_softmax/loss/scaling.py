"""Multiplying a gradient by the one number that comes from upstream."""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any

import torch
from torch import Tensor


def scaled(gradient: Tensor, upstream: Tensor, in_place: bool) -> Tensor:
    """``gradient * upstream`` in the gradient's dtype, without waiting for the device.

    ``in_place`` allows the result to be ``gradient`` itself, which nobody else needs any more.
    """
    if upstream.device.type == "cpu" and float(upstream) == 1.0:  # reading an accelerator would stall it
        return gradient if in_place else gradient.clone()
    if in_place and gradient.is_cuda and gradient.is_contiguous() and (kernels := _kernels()) is not None:
        programs = min(-(-gradient.numel() // 4096), 2048)
        if programs:
            with torch.cuda.device_of(gradient):
                kernels.multiply[(programs,)](gradient, upstream, gradient.numel(), BLOCK=4096)
        return gradient
    factor = upstream.to(torch.promote_types(gradient.dtype, torch.float32))  # 0-dim: does not change the dtype
    return gradient.mul_(factor) if in_place else gradient * factor


@cache
def _kernels() -> Any:
    """None where there is no Triton."""
    try:
        return importlib.import_module("hebbian_softmax.loss.kernels")
    except ImportError:
        return None
