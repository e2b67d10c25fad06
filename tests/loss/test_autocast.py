"""Under autocast: products in its dtype, the loss in float32, gradients in the dtype of the parameters."""

from __future__ import annotations

import pytest
import torch

from tests.loss.cases import assert_no_worse, eager, every_engine, make, ours, with_gradients


@every_engine
@pytest.mark.parametrize("products", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("workspace", [None, 9000])
def test_float32_parameters(impl, device, products, reduction, workspace) -> None:
    if impl == "triton" and products != torch.bfloat16:
        pytest.skip("the Triton engine is for bfloat16")
    case = make(40, 16, 211, device=device, dtype=torch.float32, bias=True, ignored=0.2)
    with torch.autocast(device, products):
        loss = ours(case, impl=impl, reduction=reduction, workspace=workspace)
        plain = eager(case, reduction=reduction)
    assert loss.dtype == plain.dtype == torch.float32
    upstream = torch.rand_like(plain)
    found, theirs = with_gradients(loss, case, upstream), with_gradients(plain, case, upstream)
    exact = case.to(torch.float64)
    truth = with_gradients(eager(exact, reduction=reduction), exact, upstream)
    for results in zip(found, theirs, truth, strict=True):
        assert results[0].dtype == torch.float32
        assert_no_worse(*results, dtype=products)


@every_engine
def test_backward_inside_the_context_is_backward_outside(impl, device) -> None:
    case = make(40, 16, 211, device=device, dtype=torch.float32)
    for reduction in ("mean", "none"):
        with torch.autocast(device, torch.bfloat16):
            inside = torch.autograd.grad(ours(case, impl=impl, reduction=reduction).sum(), case.operands())
            loss = ours(case, impl=impl, reduction=reduction).sum()
        outside = torch.autograd.grad(loss, case.operands())
        assert all(torch.equal(*pair) for pair in zip(inside, outside, strict=True))


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_class_weights_are_not_rounded(reduction: str) -> None:
    case = make(dtype=torch.float32, weighted=True)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(ours(case, impl="reference", reduction=reduction), eager(case, reduction=reduction))


def test_mixed_dtypes_meet_in_the_products() -> None:
    case = make(dtype=torch.float32)
    case.input = case.input.detach().bfloat16().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        loss = ours(case, impl="chunked")
    _, dh, dw = with_gradients(loss, case, torch.ones_like(loss))
    assert (dh.dtype, dw.dtype) == (torch.bfloat16, torch.float32)


def test_float64_is_left_alone() -> None:
    case = make()
    expected = ours(case, impl="chunked")
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(ours(case, impl="chunked"), expected)
