"""Compiling kernels for an H100 or H200 on a machine without one.

Triton asks its driver which GPU there is. The driver here names an H100, and launches nothing: so the library's own
code runs on CPU tensors, and each of its launches compiles the kernel for the arguments that it is given.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.runtime import driver

HOPPER = GPUTarget("cuda", 90, 32)


def compile_for_hopper(shared_memory: int) -> list[str]:
    """Let every launch compile its kernel for a GPU with so many bytes of shared memory; return the names as they come.

    A kernel that needs more shared memory or more threads raises Triton's error.
    """
    compiled: list[str] = []

    def launcher(source: Any, metadata: Any) -> Any:
        compiled.append(metadata.name)
        return lambda *arguments: None

    utils = SimpleNamespace(
        get_device_properties=lambda device: {"max_shared_mem": shared_memory},
        load_binary=lambda *arguments: (None, 0, 0, 0, 1024),
    )
    gpu = SimpleNamespace(
        get_current_target=lambda: HOPPER,
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
        launcher_cls=launcher,
        utils=utils,
    )
    driver.set_active(gpu)
    return compiled
