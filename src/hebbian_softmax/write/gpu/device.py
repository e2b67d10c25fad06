"""What runs on a GPU by kernels of our own, and how a kernel divides its work."""

from __future__ import annotations

import importlib
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hebbian_softmax.objectives import Euclidean, InnerProduct

if TYPE_CHECKING:
    from hebbian_softmax.layer import HebbianSoftmax

ROW_PARTS = 512
"""Programs that share a pass over the rows."""
_WIDEST = 16_384
"""Features beyond this do not fit in a program's registers."""
_TILE = 4_096
"""Values that a program holds of several activations at once."""
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@cache
def kernels() -> Any:
    """The kernels; None where there is no Triton."""
    try:
        return importlib.import_module("hebbian_softmax.write.gpu.kernels")
    except ImportError:
        return None


def on_gpu(tensor: Tensor) -> bool:
    """Whether kernels can work on it. Subclasses, as DTensor, are not the memory that they stand for."""
    plain = type(tensor) in (Tensor, nn.Parameter) and tensor.dtype in _DTYPES and tensor.is_contiguous()
    return tensor.is_cuda and plain and kernels() is not None


def suits(head: HebbianSoftmax, weight: Tensor) -> bool:
    """Whether the kernels can do what this head is set to."""
    return (
        type(head.objective) in (Euclidean, InnerProduct)
        and weight.dtype in _DTYPES
        and head.running.mean.dtype == torch.float32
        and head.counts.device == weight.device
        and head.in_features <= _WIDEST
        and head.num_classes < 2**31 - 1
    )


def tile(features: int) -> dict[str, int]:
    """How many activations a program holds at once, of how many values, with how many warps."""
    block = power_of_two(features)
    rows = max(1, min(4, _TILE // block))
    return {"ROWS": rows, "BLOCK": block, "num_warps": min(16, max(1, rows * block // 1024, block // 512))}


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least ``n``."""
    return 1 << (n - 1).bit_length()


def any_nonzero(values: Tensor) -> Tensor:
    """``values.any()``; on a GPU it looks no further once a value is found, and does not wait for the device."""
    if not on_gpu(values):
        return values.any()
    found = values.new_zeros((), dtype=torch.uint8)
    with torch.cuda.device_of(values):
        programs = min(ROW_PARTS, -(-values.numel() // 1024))
        if programs:
            kernels().any_nonzero[(programs,)](values, found, values.numel(), BLOCK=1024)
    return found.view(torch.bool)
