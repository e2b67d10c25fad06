"""The gate to Triton: on which devices and tensors kernels work."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from functools import cached_property
from typing import Any

import pytest
import torch
from torch import nn

from hebbian_softmax import _triton

CPU = torch.device("cpu")
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="there is no Triton")


def test_kernels_stay_away_from_the_cpu() -> None:
    assert not _triton.runs_on(CPU)
    assert not _triton.works_on(torch.zeros(2))
    assert not _triton.is_hopper(CPU)
    assert _triton.processors(CPU) == 4


@needs_triton
def test_kernels_on_the_cpu_for_tests() -> None:
    with _triton.kernels_on_cpu():
        assert _triton.runs_on(CPU)
        assert _triton.is_hopper(CPU, 2**20)
        with _triton.kernels_on_cpu(False):
            assert not _triton.runs_on(CPU)
        assert not _triton.runs_on(torch.device("meta"))
    assert not _triton.runs_on(CPU)


class Subclass(torch.Tensor):
    """Its memory may be anywhere."""


@needs_triton
def test_tensors_that_kernels_work_on() -> None:
    plain = torch.zeros(2, 3)
    with _triton.kernels_on_cpu():
        for tensor in (plain, plain.half(), plain.bfloat16(), nn.Parameter(plain)):
            assert _triton.works_on(tensor)
        for tensor in (plain.double(), plain.long(), plain.T, plain.as_subclass(Subclass)):
            assert not _triton.works_on(tensor)


class Kernel:
    """A kernel that lists its launches and what they compile."""

    def __init__(self, compiles: bool) -> None:
        self.compiles, self.launches = compiles, list[Any]()

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        def launch(*arguments: Any, **options: Any) -> Kernel | None:
            self.launches.append((grid, arguments, options))
            return self.compiled if self.compiles else None

        return launch

    @cached_property
    def compiled(self) -> Kernel:
        return Kernel(True)


def test_a_launcher_calls_what_was_compiled() -> None:
    kernel, half = Kernel(True), torch.zeros(2, dtype=torch.float16)
    launcher = _triton.Launcher(kernel)
    for tensor in (half, half, half.float()):
        launcher((3, 1, 1), (tensor, 5), (64,), 2, tensor)
    assert [len(kernel.launches), len(kernel.compiled.launches)] == [2, 1]  # one for each dtype, and the second one
    assert kernel.launches[0] == ((3, 1, 1), (half, 5, 64), {"num_warps": 2})
    assert kernel.compiled.launches[0] == ((3, 1, 1), (half, 5, 64), {})
    launcher((3, 1, 1), (half, 5), (128,), 2, half)
    launcher((3, 1, 1), (half, 5), (64,), 4, half)
    assert [len(kernel.launches), len(kernel.compiled.launches)] == [4, 1]


def test_a_launcher_in_the_interpreter_launches_anew() -> None:
    kernel, tensor = Kernel(False), torch.zeros(2)
    launcher = _triton.Launcher(kernel)
    for _ in range(3):
        launcher((1, 1, 1), (tensor,), (), 4, tensor)
    assert len(kernel.launches) == 3


@pytest.mark.parametrize("missing", [pytest.param("triton", marks=pytest.mark.slow), "triton.language"])
def test_without_triton_there_are_no_kernels(missing: str) -> None:
    program = f"""
import sys
sys.modules["{missing}"] = None
import torch
from hebbian_softmax import HebbianSoftmax, _triton
assert _triton.load("write.gpu.rows") is None
with _triton.kernels_on_cpu():
    HebbianSoftmax(2, 3).memorize(torch.ones(1, 2), torch.tensor([1]))
"""
    subprocess.run([sys.executable, "-c", program], check=True)
