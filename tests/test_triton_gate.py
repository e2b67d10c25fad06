"""The gate to Triton: on which devices and tensors kernels work."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

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


@pytest.mark.parametrize("missing", [pytest.param("triton", marks=pytest.mark.slow), "triton.language"])
def test_without_triton_there_are_no_kernels(missing: str) -> None:
    program = f"""
import sys
sys.modules["{missing}"] = None
import torch
from hebbian_softmax import HebbianSoftmax, _triton
assert _triton.load("write.gpu.rows") is None
with _triton.kernels_on_cpu():
    HebbianSoftmax(2, 3, gamma=0.1, limit=9).memorize(torch.ones(1, 2), torch.tensor([1]))
"""
    subprocess.run([sys.executable, "-c", program], check=True)
