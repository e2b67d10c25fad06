"""Which implementation computes a loss, and with how much memory."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import cast

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad

from hebbian_softmax.loss.problem import Engine, Problem
from hebbian_softmax.loss.tiles import padded

_WORKSPACE = {"cpu": 2**27, "cuda": 2**30}
"""Bytes for the chunked engine: products of that size run at full speed."""
_LEAST_WORKSPACE = 2**21
"""Bytes on a CPU that are not worth saving."""

_TINY = 2**18
"""Logits up to so many are computed at once: the bookkeeping of tiles would take longer than it saves."""
_FULL, _GPU = 2**2, 2**8
"""How many times more in full precision, whose products are not converted, and on a GPU, where the launches of the
kernels take longer than such logits."""


def default_workspace(engine: Engine, problem: Problem) -> int:
    """The engine's own choice, or one by device; on a CPU about half of the logits, with 64 whole rows at least.

    In half precision it is a quarter: then there is mostly no room for 64 rows, and the vocabulary is split, so that
    no float32 sum of the matrix's gradient is held.
    """
    own = getattr(engine, "default_workspace", None)
    if own is not None:
        return int(own(problem))
    most = chunked_workspace(problem.input.device)
    if problem.input.device.type != "cpu":
        return most
    count, size = len(problem.target), problem.input.element_size()
    rows = -(-count // 4) if size < 4 else max(-(-count // 2), min(count, 64))
    return min(most, max(_LEAST_WORKSPACE, rows * padded(problem.weight.shape[0]) * size))


def chunked_workspace(device: torch.device) -> int:
    return _WORKSPACE.get(device.type, 2**28)


def autocasts(input: Tensor) -> bool:
    device = input.device.type
    return (
        input.dtype != torch.float64
        and torch.amp.is_autocast_available(device)  # not for meta tensors, of which asking further would raise
        and torch.is_autocast_enabled(device)
    )


def product_dtype(input: Tensor) -> torch.dtype:
    """What F.linear computes in: under autocast its dtype, which leaves float64 alone."""
    return torch.get_autocast_dtype(input.device.type) if autocasts(input) else input.dtype


def result_dtype(input: Tensor) -> torch.dtype:
    """What F.cross_entropy of such logits returns: under autocast float32."""
    return torch.float32 if autocasts(input) else input.dtype


def needs_reference(*tensors: Tensor | None) -> bool:
    """Whether something looks into the computation that an autograd node would hide: torch.func, forward-mode
    differentiation, export, tensors without values."""
    present = [each for each in tensors if each is not None]
    if torch._C._are_functorch_transforms_active() or torch.compiler.is_exporting():
        return True
    if any(each.is_meta or isinstance(each, FakeTensor) for each in present):
        return True
    return any(forward_ad.unpack_dual(each).tangent is not None for each in present) if _dual_level() else False


def _dual_level() -> bool:
    return forward_ad._current_level >= 0


def is_tiny(input: Tensor, linear_weight: Tensor, workspace: int | None) -> bool:
    """Whether all logits at once are faster, and fit: plain torch holds about three times their number."""
    logits, size = input.numel() // max(input.shape[-1], 1) * linear_weight.shape[0], input.element_size()
    many = _TINY * (_GPU if input.is_cuda else _FULL if size >= 4 else 1)
    return logits <= many and (workspace is None or 3 * logits * size <= workspace)


def engine(impl: str, problem: Problem) -> Engine:
    """The module for ``auto``, ``chunked`` or ``triton``."""
    if impl == "triton" or (impl == "auto" and _suits_triton(problem)):
        fused = _fused()
        if fused is not None and fused.available(problem):
            return cast(Engine, fused)
        if impl == "triton":
            where, dtype = problem.input.device, problem.input.dtype
            raise RuntimeError(
                f'impl="triton" is not available for {dtype} on {where}: it needs a CUDA device of capability 9.0 or '
                "more with 160 KiB of shared memory, Triton, bfloat16, a number of features divisible by 8, "
                "and input and linear_weight that start at a "
                f'multiple of 16 bytes; got {problem.input.shape[1]} features. Use impl="auto"'
            )
    from hebbian_softmax.loss import chunked

    return cast(Engine, chunked)


def _suits_triton(problem: Problem) -> bool:
    h = problem.input
    return h.is_cuda and h.dtype == torch.bfloat16 and h.shape[1] % 8 == 0


def _fused() -> ModuleType | None:
    """Imported when it is first wanted: Triton is not everywhere, and takes long to import."""
    try:
        return importlib.import_module("hebbian_softmax.loss.fused")
    except ImportError:
        return None
