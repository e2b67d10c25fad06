"""Cases in which careless arithmetic loses everything: probabilities near 0 and 1, huge logits, masked classes."""

from __future__ import annotations

import math

import pytest
import torch

from tests.loss.cases import (
    Case,
    assert_no_worse,
    compared,
    eager,
    error,
    every_engine,
    every_engine_in,
    make,
    ours,
    with_gradients,
)


def confident(margin: float, dtype: torch.dtype, device: str) -> Case:
    """Three classes besides the target, ``margin`` below it."""
    h = torch.zeros(1, 8, dtype=dtype, device=device)
    h[0, 0] = 1
    w = torch.zeros(4, 8, dtype=dtype, device=device)
    w[2, 0] = margin
    return Case(h.requires_grad_(), w.requires_grad_(), torch.tensor([2], device=device))


@every_engine_in(torch.float64, torch.float32, torch.bfloat16)
@pytest.mark.parametrize("margin", [4.0, 7.0, 12.0, 24.0, 40.0])
@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_the_gradient_near_probability_one(impl, device, dtype, margin, reduction) -> None:
    """Eager torch loses it: in bfloat16, 1 - p rounds to 0 above margin 7. Here only the logits are rounded."""
    case = confident(margin, dtype, device)
    loss, dh, dw = with_gradients(ours(case, impl=impl, reduction=reduction), case)
    rest = 3 * math.exp(-margin) / (1 + 3 * math.exp(-margin))
    tolerance = (2 if dtype == torch.bfloat16 else 2 + margin) * torch.finfo(dtype).eps
    assert loss.item() == pytest.approx(math.log1p(3 * math.exp(-margin)), rel=tolerance)
    assert float(dw[2, 0]) == pytest.approx(-rest, rel=tolerance)
    assert float(dw[0, 0]) == pytest.approx(rest / 3, rel=tolerance)
    assert float(dh[0, 0]) == pytest.approx(-rest * margin, rel=tolerance)


@every_engine_in(torch.float64, torch.float32, torch.bfloat16)
@pytest.mark.parametrize("workspace", [None, 5000])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_logits_of_magnitude_ten_thousand(impl, device, dtype, workspace, reduction) -> None:
    """Such logits are rounded by up to 1e4 times the precision, so nothing better than eager can be asked for."""
    case = make(19, 16, 211, device=device, dtype=dtype, scale=1e4)
    for mine, theirs, each in compared(case, impl, workspace, reduction=reduction):
        assert torch.isfinite(mine).all()
        assert error(mine, each) <= 1.5 * error(theirs, each) + 1e4 * torch.finfo(dtype).eps


@every_engine
@pytest.mark.parametrize("workspace", [None, 600])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_one_class(impl, device, workspace, reduction) -> None:
    case = make(5, 8, 1, device=device, dtype=torch.bfloat16, bias=True)
    for each in with_gradients(ours(case, impl=impl, workspace=workspace, reduction=reduction), case):
        assert not each.any()


@pytest.mark.parametrize("workspace", [None, 9000])
@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_classes_masked_by_their_bias(workspace, reduction) -> None:
    """All but the target of the first row, and the target of the last."""
    case = make(3, 8, 300, dtype=torch.float32, bias=True)
    with torch.no_grad():
        case.linear_bias[torch.arange(300) != 7] = -torch.inf
    case.target = torch.tensor([7, 7, 7])
    for each in with_gradients(ours(case, impl="chunked", workspace=workspace, reduction=reduction), case):
        assert not each.any()
    with torch.no_grad():
        case.linear_bias[:] = 0
        case.linear_bias[[7, 9]] = -torch.inf
    assert torch.isinf(ours(case, impl="chunked", workspace=workspace, reduction=reduction)).all()


@every_engine
@pytest.mark.parametrize("workspace", [None, 9000])
@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_an_impossible_target_does_not_spoil_the_gradients(impl, device, workspace, reduction) -> None:
    """Its loss is infinite, but its probabilities are finite, and a caller who leaves that row out is not affected."""
    case = make(6, 8, 300, device=device, dtype=torch.bfloat16, bias=True)
    with torch.no_grad():
        case.linear_bias[case.target[2]] = -torch.inf
    exact = case.to(torch.float64)
    mine = ours(case, impl=impl, workspace=workspace, reduction=reduction)
    losses = [(mine, case), (eager(case, reduction=reduction), case), (eager(exact, reduction=reduction), exact)]
    if reduction == "none":
        assert torch.isinf(mine[2])
        losses = [(loss[torch.arange(6) != 2], each) for loss, each in losses]
    gradients = [torch.autograd.grad(loss.sum(), each.operands()) for loss, each in losses]
    for results in zip(*gradients, strict=True):
        assert_no_worse(*results)


@every_engine_in(torch.float32, torch.bfloat16)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_ignored_rows_may_hold_huge_values(impl, device, dtype, reduction) -> None:
    case = make(8, 16, 211, device=device, dtype=dtype)
    with torch.no_grad():
        case.input[3] *= 1e6
    case.target[3] = -100
    _, (dh, *_), dw = compared(case, impl, reduction=reduction)
    assert not dh[3].any()
    assert_no_worse(*dw)


@pytest.mark.parametrize("workspace", [None, 9000])
def test_float16_gradients_wait_for_the_loss_scale(workspace) -> None:
    """1 / N times a probability is too small for float16; multiplied by the scale of GradScaler it is not."""
    case = make(64, 16, 5000, dtype=torch.float16, scale=0.1)
    loss = ours(case, impl="chunked", workspace=workspace)
    (dw,) = torch.autograd.grad(loss * 2.0**12, case.linear_weight)
    exact = case.to(torch.float64)
    (truth,) = torch.autograd.grad(ours(exact, impl="reference") * 2.0**12, exact.linear_weight)
    rare = torch.ones(5000, dtype=torch.bool)
    rare[case.target] = False
    # Logits, dZ and the result are rounded once each, by at most half a unit in the last place.
    assert error(dw[rare], truth[rare]) < 1.5 * torch.finfo(torch.float16).eps
