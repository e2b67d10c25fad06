"""Triton's interpreter, which runs kernels where there is no GPU."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

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


interpreted = pytest.mark.skipif(reason_against_it() is not None, reason=str(reason_against_it()))


def compile_apart(program: str, cache: Path) -> None:
    """Run a program of the tests that compiles kernels, where Triton is not interpreted; it must succeed."""
    root = Path(__file__).parents[1]
    environment = os.environ | {
        "TRITON_INTERPRET": "0",
        "TRITON_CACHE_DIR": str(cache),
        "PYTHONPATH": os.pathsep.join([str(root), *sys.path]),
    }
    done = subprocess.run([sys.executable, root / "tests" / program], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
