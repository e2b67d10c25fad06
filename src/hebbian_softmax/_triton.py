"""The one gate to Triton: whether it is there, which devices and tensors its kernels work on, and what a GPU has.

A module that defines kernels imports Triton at its top, which takes long and fails where there is none. Such a module
is therefore imported only through :func:`load`, when a kernel is first wanted.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""The floating-point types that the kernels work on."""

_kernels_on_cpu = False


@cache
def load(module: str) -> Any:
    """Import a module of kernels by its name within this package, as ``write.gpu.rows``; return None without Triton."""
    try:
        return importlib.import_module(f"hebbian_softmax.{module}")
    except ImportError:  # There is no Triton, or one that lacks what the kernels need.
        return None


@cache
def _installed() -> bool:
    try:
        importlib.import_module("triton.language")
    except ImportError:
        return False
    return True


@cache
def runs_on(device: torch.device) -> bool:
    """Return whether kernels run on ``device``: on GPUs where Triton is installed."""
    return (device.type == "cuda" or (_kernels_on_cpu and device.type == "cpu")) and _installed()


def works_on(tensor: Tensor) -> bool:
    """Return whether kernels can work on the memory of ``tensor``; subclasses such as DTensor do not own theirs."""
    plain = type(tensor) in (Tensor, nn.Parameter) and tensor.dtype in DTYPES and tensor.is_contiguous()
    return plain and runs_on(tensor.device)


@cache
def is_hopper(device: torch.device, shared_memory: int = 0) -> bool:
    """Return whether kernels for Hopper GPUs run on ``device``, given the bytes of shared memory that they need."""
    if device.type != "cuda":
        return runs_on(device)
    properties = torch.cuda.get_device_properties(device)
    has = getattr(properties, "shared_memory_per_block_optin", shared_memory)
    return bool(properties.major >= 9 and has >= shared_memory)


def is_capturing() -> bool:
    """Return whether a CUDA graph is being recorded, during which nothing may be read back."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


@cache
def processors(device: torch.device) -> int:
    """Return the number of processors of a GPU, which programs take turns on; 4 on a CPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


def power_of_two(n: int) -> int:
    """Return the smallest power of two that is at least ``n``."""
    return 1 << (n - 1).bit_length()


class Launcher:
    """A kernel that is launched in little time.

    Looking at all arguments to find what was compiled for them takes Triton longer than a small kernel runs. So after
    the first launch with a dtype and constants, the compiled kernel is called directly. That is right if all else is
    always alike: pointers are to multiples of 16 bytes or in ``do_not_specialize_on_alignment``, their dtypes follow
    from that of one tensor, and numbers are in ``do_not_specialize`` and below 2³¹.
    """

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._compiled: dict[Any, Any] = {}

    def __call__(
        self,
        grid: tuple[int, int, int],
        arguments: tuple[Any, ...],
        constants: tuple[Any, ...],
        warps: int,
        like: Tensor,
    ) -> None:
        """Launch on the current device, which is that of ``like``; constants are the last parameters of the kernel."""
        key = like.device.index, like.dtype, constants, warps
        compiled = self._compiled.get(key)
        if compiled is None:  # always in Triton's interpreter, which compiles nothing
            self._compiled[key] = self._kernel[grid](*arguments, *constants, num_warps=warps)
        else:
            compiled[grid](*arguments, *constants)


@contextmanager
def kernels_on_cpu(allowed: bool = True) -> Iterator[None]:
    """Let kernels work on CPU tensors, too, or no longer: for tests, where Triton's interpreter runs them."""
    global _kernels_on_cpu
    before, _kernels_on_cpu = _kernels_on_cpu, allowed
    _forget()
    try:
        yield
    finally:
        _kernels_on_cpu = before
        _forget()


def _forget() -> None:
    runs_on.cache_clear()
    is_hopper.cache_clear()
