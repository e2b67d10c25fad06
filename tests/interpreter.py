"""Triton's interpreter, which runs kernels where there is no GPU."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch

# The interpreter converts arrays in ways that numpy warns about.
quiet = [
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:overflow encountered in cast:RuntimeWarning"),
]


def reason_against_it() -> str | None:
    """Return why kernels cannot be interpreted here; None if they can."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return "Triton compiles here"
    if importlib.util.find_spec("triton") is None or importlib.util.find_spec("numpy") is None:
        return "Triton's interpreter needs triton and numpy"
    import numpy

    if tuple(map(int, numpy.__version__.split(".")[:2])) >= (2, 4):
        return f"Triton's interpreter does not work with numpy {numpy.__version__}"
    return None


def _patch_the_language_only_once() -> None:
    """Let the interpreter patch Triton's language at the first launch of a kernel, and leave it so.

    It would patch hundreds of attributes again for each launch and for each call of a function within a kernel, which
    took 16 of 40 s in a profile. Nothing in a process that interprets kernels needs the language as it was.
    """
    from triton.runtime import interpreter

    if not hasattr(interpreter, "_LangPatchScope"):
        return  # This version of Triton patches in another way.
    patch_lang = interpreter._patch_lang
    everything = SimpleNamespace(__globals__={"tl": interpreter.tl, "core": interpreter.tl.core})
    patch_all = cache(lambda: patch_lang(everything))

    def patch_once(kernel: Any) -> Any:
        patch_all()
        return interpreter._LangPatchScope()  # has nothing to restore

    interpreter._patch_lang = patch_once


if reason_against_it() is None:
    _patch_the_language_only_once()

interpreted = pytest.mark.skipif(reason_against_it() is not None, reason=str(reason_against_it()))
interpreted_or_on_gpu = pytest.mark.skipif(
    reason_against_it() is not None and not torch.cuda.is_available(), reason=str(reason_against_it())
)


def compile_apart(program: str, cache: Path, *arguments: str) -> None:
    """Run a program of the tests that compiles kernels, where Triton is not interpreted; it must succeed."""
    root = Path(__file__).parents[1]
    environment = os.environ | {
        "TRITON_INTERPRET": "0",
        "TRITON_CACHE_DIR": str(cache),
        "PYTHONPATH": os.pathsep.join([str(root), *sys.path]),
    }
    command = [sys.executable, root / "tests" / program, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


class Launch(NamedTuple):
    """One launch of a kernel."""

    kernel: str
    grid: tuple[int, ...]
    options: dict[str, Any]


@contextmanager
def recorded_launches(run: bool = True) -> Iterator[list[Launch]]:
    """List the launches of all kernels; with ``run=False`` they do nothing else."""
    from triton.runtime.jit import KernelInterface

    found: list[Launch] = []
    original = KernelInterface.__getitem__

    def recorded(kernel: Any, grid: tuple[int, ...]) -> Any:
        def launch(*args: Any, **options: Any) -> Any:
            found.append(Launch(kernel.__name__, grid, options))
            return original(kernel, grid)(*args, **options) if run else None

        return launch

    with patch.object(KernelInterface, "__getitem__", recorded):
        yield found
