"""Problems, the float64 oracle, and the rule for all losses: no less exact than eager torch in the same dtype."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hebbian_softmax import linear_cross_entropy

ENGINES = [("chunked", "cpu", ()), ("chunked", "cuda", pytest.mark.gpu), ("triton", "cuda", pytest.mark.gpu)]
every_engine = pytest.mark.parametrize(
    ("impl", "device"), [pytest.param(*each, marks=marks) for *each, marks in ENGINES]
)

ROUNDINGS = {torch.float64: 512, torch.float32: 16, torch.bfloat16: 1, torch.float16: 1}
"""Units in the last place of the largest entry that are always allowed. In half precision only results are rounded to
it; otherwise every sum of another order is. In float64 eager torch is the truth itself, so its error cannot be
measured, and label smoothing subtracts terms that are up to V times larger than the result."""
DTYPES = tuple(ROUNDINGS)


def every_engine_in(*dtypes: torch.dtype, slow: tuple[torch.dtype, ...] = ()) -> pytest.MarkDecorator:
    """Run a test with every engine in each of these dtypes; the Triton engine is for bfloat16.

    In the dtypes that are ``slow`` the test is marked so on a CPU.
    """
    cases = [
        pytest.param(
            impl,
            device,
            dtype,
            marks=marks or (pytest.mark.slow if dtype in slow else ()),
            id=f"{impl}-{device}-{dtype}",
        )
        for impl, device, marks in ENGINES
        for dtype in dtypes
        if impl != "triton" or dtype == torch.bfloat16
    ]
    return pytest.mark.parametrize(("impl", "device", "dtype"), cases)


@dataclass
class Case:
    """The operands of a loss."""

    input: Tensor
    linear_weight: Tensor
    target: Tensor
    linear_bias: Tensor | None = None
    weight: Tensor | None = None
    prior: Tensor | None = None
    token_weight: Tensor | None = None

    def operands(self) -> list[Tensor]:
        """Return the operands that have gradients."""
        return [each for each in (self.input, self.linear_weight, self.linear_bias) if each is not None]

    def to(self, dtype: torch.dtype) -> Case:
        """Return a copy in another dtype."""

        def copy(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor.detach().to(dtype).requires_grad_(tensor.requires_grad)

        operands = copy(self.input), copy(self.linear_weight), self.target, copy(self.linear_bias)
        return Case(*operands, copy(self.weight), copy(self.prior), copy(self.token_weight))


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
    masked: float | None = None,
) -> Case:
    """Return random operands with values that ``dtype`` holds, so that the oracle starts from the same numbers.

    ``masked`` is the share of classes that a prior masks, which are no targets; None means no prior.
    """
    target = torch.randint(v, (n,))
    prior = None
    if masked is not None:
        prior = 3 * torch.randn(v).to(torch.promote_types(dtype, torch.float32))
        prior[torch.randperm(v)[: int(masked * v)]] = -torch.inf
        target = torch.where(prior > -torch.inf)[0][torch.randint(v - int(masked * v), (n,))]
    target[torch.rand(n) < ignored] = -100

    def operand(values: Tensor) -> Tensor:
        return values.to(device, dtype).requires_grad_()

    return Case(
        operand(torch.randn(n, d) * scale),
        operand(torch.randn(v, d) * 2 * d**-0.5),
        target.to(device),
        operand(torch.randn(v)) if bias else None,
        torch.rand(v).to(device, dtype) if weighted else None,
        None if prior is None else prior.to(device),
    )


def eager(
    case: Case,
    *,
    reduction: str = "mean",
    temperature: float = 1.0,
    softcap: float | None = None,
    z_loss: float = 0.0,
    **options: object,
) -> Tensor:
    """Return the loss of eager torch, at least in float32, for logits in the dtype of the operands."""
    logits = F.linear(case.input, case.linear_weight, case.linear_bias)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    logits = (logits if softcap is None else softcap * (logits / softcap).tanh()) / temperature
    weight, target = None if case.weight is None else case.weight.to(logits.dtype), case.target
    if case.prior is not None:  # Without the masked classes, the others have other numbers.
        kept = case.prior > -torch.inf
        logits, weight = (logits + case.prior)[:, kept], None if weight is None else weight[kept]
        number = kept.cumsum(0) - 1
        target = torch.where(target < 0, target, number[target.clamp(min=0)])
    if case.token_weight is None and not z_loss:
        return F.cross_entropy(logits, target, weight=weight, reduction=reduction, **options)
    losses = F.cross_entropy(logits, target, weight=weight, reduction="none", **options)
    counted = target != options.get("ignore_index", -100)
    losses = losses + z_loss * torch.where(counted, logits.logsumexp(1) ** 2, 0)
    weights = counted * (1 if weight is None else weight[target.clamp(min=0)])
    if case.token_weight is not None:
        losses, weights = losses * case.token_weight, weights * case.token_weight
    if reduction == "mean":
        return losses.sum() / weights.sum()
    return losses if reduction == "none" else losses.sum()


def ours(case: Case, **options: object) -> Tensor:
    constants = {
        "linear_bias": case.linear_bias,
        "weight": case.weight,
        "prior": case.prior,
        "token_weight": case.token_weight,
    }
    return linear_cross_entropy(case.input, case.linear_weight, case.target, **constants, **options)


def with_gradients(loss: Tensor, case: Case, upstream: Tensor | None = None) -> list[Tensor]:
    """Return the loss and its gradients, for an upstream gradient of 1 unless it is given."""
    upstream = torch.ones_like(loss) if upstream is None else upstream.to(loss.dtype)
    return [loss.detach(), *torch.autograd.grad(loss, case.operands(), upstream)]


def compared(
    case: Case, impl: str, workspace: int | None = None, upstream: Tensor | None = None, **options: object
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield the loss and each gradient three times: ours, that of eager torch, and eager torch's in float64."""
    exact = case.to(torch.float64)
    found = with_gradients(ours(case, impl=impl, workspace=workspace, **options), case, upstream)
    plain = with_gradients(eager(case, **options), case, upstream)
    return zip(found, plain, with_gradients(eager(exact, **options), exact, upstream), strict=True)


def error(found: Tensor, exact: Tensor) -> float:
    """Return the largest error, in units of the largest entry."""
    assert found.shape == exact.shape
    return float((found.double() - exact).abs().max() / exact.abs().max().clamp(min=1e-300))


def assert_no_worse(found: Tensor, eager: Tensor, exact: Tensor, dtype: torch.dtype | None = None) -> None:
    """Check that the error is at most twice that of eager torch on this machine, and some roundings of ``dtype``."""
    dtype = dtype or eager.dtype
    assert found.dtype == eager.dtype
    assert error(found, exact) <= 2 * error(eager, exact) + ROUNDINGS[dtype] * torch.finfo(dtype).eps


def assert_no_worse_than_eager(case: Case, impl: str, workspace: int | None = None, **options: object) -> None:
    """Check the loss and every gradient, for a random upstream gradient."""
    upstream = torch.rand_like(case.target, dtype=torch.float64).to(case.input.dtype) + 0.5
    if options.get("reduction", "mean") != "none":
        upstream = upstream[0]
    for results in compared(case, impl, workspace, upstream, **options):
        assert_no_worse(*results, case.input.dtype)
