"""The dtypes in which a loss multiplies and sums, with and without autocast."""

from __future__ import annotations

import torch
from torch import Tensor

from hebbian_softmax import _torch


def autocasts(input: Tensor) -> bool:
    """Return whether autocast converts the operands of a product with ``input``; it leaves float64 alone."""
    device = input.device.type
    if input.dtype == torch.float64 or device == "meta":  # which the next questions know nothing about
        return False
    # torch.compile of torch 2.11 cannot trace the first question.
    available = torch.compiler.is_compiling() or torch.amp.is_autocast_available(device)
    return available and torch.is_autocast_enabled(device)


def product_dtype(input: Tensor) -> torch.dtype:
    """Return the dtype in which ``F.linear`` multiplies ``input``: that of autocast, or that of ``input``."""
    return torch.get_autocast_dtype(input.device.type) if autocasts(input) else input.dtype


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which values of ``dtype`` are summed, and that of a loss of them: at least float32."""
    return torch.promote_types(dtype, torch.float32)


def fast_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Return ``dtype``, or float32 where the CPU has no instructions for products in ``dtype`` and emulates them."""
    if device.type != "cpu" or dtype not in (torch.bfloat16, torch.float16):
        return dtype
    return dtype if _torch.cpu_multiplies(dtype) else torch.float32
