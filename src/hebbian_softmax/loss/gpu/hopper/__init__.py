"""Kernels for H100 and H200 GPUs.

They are written in Gluon, Triton's language for kernels whose layouts, copies and barriers are explicit. It is
experimental, so with versions in which these kernels were not tried, the package cannot be imported.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor

from hebbian_softmax._triton import is_hopper

TRIED = ("3.6.",)
"""The versions of Triton in which the kernels were tried."""
if not triton.__version__.startswith(TRIED):
    raise ImportError(f"the kernels for H100 and H200 were not tried with Triton {triton.__version__}")

from triton.experimental.gluon import language as gl  # noqa: E402
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor  # noqa: E402

SHARED_MEMORY = 227 * 1024
"""The bytes of shared memory that a program may have."""


@cache
def runs_on(device: torch.device) -> bool:
    """Return whether the kernels run on ``device``: its matrix unit must be that of the Hopper generation."""
    on_gpu = device.type == "cuda" and is_hopper(device, SHARED_MEMORY)
    return on_gpu and torch.cuda.get_device_properties(device).major == 9


def descriptor(matrix: Tensor, rows: int, columns: int, height: int | None = None) -> Any:
    """Return the descriptor of a matrix, or of its first ``height`` rows, in tiles of rows × columns."""
    shape = [matrix.shape[0] if height is None else height, matrix.shape[1]]
    return TensorDescriptor(matrix, shape, [matrix.stride(0), 1], [rows, columns], _layout(rows, columns))


@cache
def _layout(rows: int, columns: int) -> Any:
    return gl.NVMMASharedLayout.get_default_for([rows, columns], gl.bfloat16)
