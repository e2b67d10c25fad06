"""Problems, the float64 oracle, and the rule for all losses: no less exact than eager torch in the same dtype."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hebbian_softmax import linear_cross_entropy

ENGINES = [
    pytest.param("chunked", "cpu", id="chunked-cpu"),
    pytest.param("chunked", "cuda", id="chunked-cuda", marks=pytest.mark.gpu),
    pytest.param("triton", "cuda", id="triton-cuda", marks=pytest.mark.gpu),
]
every_engine = pytest.mark.parametrize(("impl", "device"), ENGINES)

ROUNDINGS = {torch.float64: 512, torch.float32: 16, torch.bfloat16: 1, torch.float16: 1}
"""Units in the last place of the largest entry that are always allowed. In half precision only results are rounded to
it; otherwise every sum of another order is. In float64 eager torch is the truth itself, so its error cannot be
measured, and label smoothing subtracts terms that are up to V times larger than the result."""
DTYPES = list(ROUNDINGS)


@dataclass
class Case:
    """The operands of a loss."""

    input: Tensor
    linear_weight: Tensor
    target: Tensor
    linear_bias: Tensor | None = None
    weight: Tensor | None = None

    def operands(self) -> list[Tensor]:
        """Return the operands that have gradients."""
        return [each for each in (self.input, self.linear_weight, self.linear_bias) if each is not None]

    def to(self, dtype: torch.dtype) -> Case:
        """Return a copy in another dtype."""

        def copy(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor.detach().to(dtype).requires_grad_(tensor.requires_grad)

        return Case(copy(self.input), copy(self.linear_weight), self.target, copy(self.linear_bias), copy(self.weight))


def make(
    n: int = 13,
    d: int = 16,
    v: int = 211,
    *,
    device: str = "cpu",
    dtype: torch.dtype = torch.float64,
    bias: bool = False,
    weighted: bool = False,
    ignored: float = 0.0,
    scale: float = 1.0,
) -> Case:
    """Return random operands with values that ``dtype`` holds, so that the oracle starts from the same numbers."""
    target = torch.randint(v, (n,))
    target[torch.rand(n) < ignored] = -100
    case = Case(
        (torch.randn(n, d) * scale).requires_grad_(),
        (torch.randn(v, d) * 2 * d**-0.5).requires_grad_(),
        target.to(device),
        torch.randn(v).requires_grad_() if bias else None,
        torch.rand(v) if weighted else None,
    )
    moved = replace(case)
    for name in ("input", "linear_weight", "linear_bias", "weight"):
        tensor = getattr(case, name)
        if tensor is not None:
            setattr(moved, name, tensor.detach().to(device, dtype).requires_grad_(tensor.requires_grad))
    return moved


def skip_unless_it_can(impl: str, dtype: torch.dtype) -> None:
    if impl == "triton" and dtype != torch.bfloat16:
        pytest.skip("the Triton engine is for bfloat16")


def eager(case: Case, **options: object) -> Tensor:
    logits = F.linear(case.input, case.linear_weight, case.linear_bias)
    return F.cross_entropy(logits, case.target, weight=case.weight, **options)


def ours(case: Case, **options: object) -> Tensor:
    return linear_cross_entropy(
        case.input, case.linear_weight, case.target, linear_bias=case.linear_bias, weight=case.weight, **options
    )


def with_gradients(loss: Tensor, case: Case, upstream: Tensor) -> list[Tensor]:
    return [loss.detach(), *torch.autograd.grad(loss, case.operands(), upstream.to(loss.dtype))]


def error(found: Tensor, exact: Tensor) -> float:
    """Return the largest error, in units of the largest entry."""
    assert found.shape == exact.shape
    if exact.numel() == 0:
        return 0.0
    return float((found.double() - exact).abs().max() / exact.abs().max().clamp(min=1e-300))


def assert_no_worse(found: Tensor, eager: Tensor, exact: Tensor, dtype: torch.dtype | None = None) -> None:
    """Check that the error is at most twice that of eager torch on this machine, and some roundings of ``dtype``."""
    dtype = dtype or eager.dtype
    assert found.dtype == eager.dtype
    assert error(found, exact) <= 2 * error(eager, exact) + ROUNDINGS[dtype] * torch.finfo(dtype).eps


def assert_no_worse_than_eager(case: Case, impl: str, workspace: int | None = None, **options: object) -> None:
    """Check the loss and every gradient, for a random upstream gradient."""
    dtype = case.input.dtype
    upstream = torch.rand(len(case.target), device=case.target.device, dtype=torch.float64).to(dtype) + 0.5
    if options.get("reduction", "mean") != "none":
        upstream = upstream[0]
    truth64 = case.to(torch.float64)
    exact = with_gradients(eager(truth64, **options), truth64, upstream)
    plain = with_gradients(eager(case, **options), case, upstream)
    found = with_gradients(ours(case, impl=impl, workspace=workspace, **options), case, upstream)
    for results in zip(found, plain, exact, strict=True):
        assert_no_worse(*results)
