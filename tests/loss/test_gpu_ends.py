"""The small kernels at the ends of the loss, against the torch operations that they replace."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from hebbian_softmax.loss.checks import Options
from hebbian_softmax.loss.function import Settings, prepare
from hebbian_softmax.loss.weighting import Weighting
from tests.closeness import assert_exact
from tests.interpreter import compile_apart, interpreted_or_on_gpu

pytest.importorskip("triton", reason="kernels need Triton")
ends = pytest.importorskip("hebbian_softmax.loss.gpu.ends")
pytestmark = interpreted_or_on_gpu
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
V, IGNORED = 50, -100


def prepared(target: Tensor, mean: bool, zero_if_empty: bool, block: int = 64) -> tuple[Tensor, Tensor, Tensor, bool]:
    """Return masked targets, scales, share, and whether all targets were classes."""
    n = target.shape[0]
    masked, scales = torch.empty_like(target), torch.full((n + 1,), torch.nan, device=target.device)
    good = torch.full((), 7, dtype=torch.int32, device=target.device)
    ends.prepare_kernel[(1,)](
        target, masked, scales, good, n, V, IGNORED, MEAN=mean, ZERO_IF_EMPTY=zero_if_empty, BLOCK=block
    )
    return masked, scales[:n], scales[n], bool(good)


@pytest.mark.parametrize("mean", [True, False])
@pytest.mark.parametrize("zero_if_empty", [True, False])
@pytest.mark.parametrize("ignored", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("n", [1, 63, 200])
def test_prepare(n: int, ignored: float, zero_if_empty: bool, mean: bool) -> None:
    target = torch.randint(V, (n,))
    target[torch.rand(n) < ignored] = IGNORED
    reduction = "mean" if mean else "sum"
    options = Options(reduction=reduction, ignore_index=IGNORED)
    settings = Settings("chunked", None, torch.float32, options, False, zero_if_empty)
    expected = prepare(target, V, Weighting(None, 0.0), settings)
    masked, scale, share, good = prepared(target.to(DEVICE), mean, zero_if_empty)
    assert good
    assert torch.equal(masked.cpu(), expected.target)
    assert_exact(share.cpu(), expected.share, ulps=1)  # Both divide with one rounding.
    assert_exact(scale.cpu(), torch.where(target == IGNORED, 0, expected.share), ulps=1)


@pytest.mark.parametrize("value", [-1, V, 2**40, -(2**40)])
def test_prepare_finds_what_is_no_class_and_lets_nobody_use_it(value: int) -> None:
    target = torch.randint(V, (100,), device=DEVICE)
    target[77] = value
    masked, scale, _, good = prepared(target, True, False)
    assert not good
    assert masked[77] == -1
    assert scale[77] == 0


@pytest.mark.parametrize("factor", [1.0, 0.0, -2.3, torch.inf])
@pytest.mark.parametrize("lengths", [(5000, 70), (70, 5000), (64, 0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_multiply(lengths: tuple[int, int], factor: float, dtype: torch.dtype) -> None:
    x, y = (torch.rand(n, device=DEVICE, dtype=dtype) + 0.5 for n in lengths)
    expected = [(each * factor).clone() for each in (x, y)]
    upstream = torch.tensor(factor, device=DEVICE, dtype=dtype)
    ends.multiply_kernel[(3,)](x, y if lengths[1] else x, upstream, *lengths, BLOCK=64)
    for each, right in zip((x, y), expected, strict=True):
        assert torch.equal(each, right)


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("--options",), ("--options", "--shared")], ids=["plain", "options", "shared"])
def test_the_kernels_compile_for_a_gpu(options: tuple[str, ...], tmp_path: Path) -> None:
    """This needs no GPU, but a process of its own, because Triton may be interpreted in this one."""
    compile_apart("loss/compile_kernels.py", tmp_path, *options)
