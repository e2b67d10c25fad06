"""What label smoothing adds to a loss on a GPU: a few launches, and no large temporary.

The tensors are fake: they have a device and sizes, but no values, so that no GPU is needed.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from hebbian_softmax.loss.problem import Gradients, Problem, RowTerms
from hebbian_softmax.loss.weighting import Weighting
from tests.operations import Watch

N, D, V = 4_096, 4_096, 128_256


def smooth(masked: bool, weight_dtype: torch.dtype) -> Watch:
    """Run what the weighting does in one smoothed loss on a GPU; its gradients are there already."""

    def on_gpu(*size: int, dtype: torch.dtype = torch.float32) -> Any:
        return torch.empty(size, dtype=dtype, device="cuda")

    with FakeTensorMode():
        prior = on_gpu(V) if masked else None
        weighting = Weighting(smoothing=0.1, prior=prior)
        operands = (on_gpu(rows, D, dtype=torch.bfloat16) for rows in (N, V))
        problem = Problem(*operands, None, on_gpu(N, dtype=torch.int64), prior)
        gradients = Gradients(on_gpu(N, D, dtype=torch.bfloat16), on_gpu(V, D, dtype=weight_dtype), None)
        terms = RowTerms(on_gpu(N), on_gpu(N), on_gpu(N))
        share = on_gpu()
        with Watch() as watch:
            scales = weighting.scales(problem, share)
            total = weighting.sum_of_rows(problem)
            weighting.corrected(problem, scales, gradients, total)
            weighting.losses(problem, terms, total)
    return watch


@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("masked", "most"), [(False, 30), (True, 110)])
def test_smoothing_takes_few_launches(masked: bool, most: int, weight_dtype: torch.dtype) -> None:
    watch = smooth(masked, weight_dtype)
    assert watch.launches <= most
    assert watch.most <= 2**27 + 2**20  # A block of 2**25 elements in float32, and vectors.
