"""The dtypes in which memories multiply."""

from __future__ import annotations

import torch
from torch import Tensor

from hebbian_softmax.loss.dtypes import wide


def wide_bmm(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b in at least float32; CUDA multiplies in half precision and sums in float32."""
    dtype = wide(a.dtype)
    if a.dtype != dtype and a.is_cuda:
        return torch.bmm(a, b, out_dtype=dtype)
    return torch.bmm(a.to(dtype), b.to(dtype))


def product_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Return the dtype in which numbers that come from activations of ``dtype`` are multiplied where that costs most.

    Float32 becomes bfloat16 if ``torch.set_float32_matmul_precision("medium")`` allows it, and half precision does on a
    GPU that multiplies bfloat16: float16 would not hold inner products. CPUs and other GPUs multiply in float32.
    ("high" leaves the dtype alone; torch then multiplies in TensorFloat-32.)
    """
    coarse = dtype in (torch.bfloat16, torch.float16) or (dtype == torch.float32 and _allows_bfloat16())
    if coarse and device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 8:
        return torch.bfloat16
    return wide(dtype)


def _allows_bfloat16() -> bool:
    try:
        return torch.get_float32_matmul_precision() == "medium"
    except RuntimeError:  # The precision was set by ``fp32_precision``, which knows no bfloat16 for CUDA.
        return False
