"""The autograd node: only wanted gradients, kept graphs, second derivatives, transforms, compile."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from hebbian_softmax import linear_cross_entropy
from tests.closeness import assert_as_close
from tests.heads import early_head
from tests.loss.cases import Case, assert_no_worse_than_eager, every_engine, every_engine_in, make, ours, with_gradients
from tests.operations import Watch

FORCED = 1
"""A workspace too small for all logits at once, with which ``auto`` does not take the reference for its speed."""


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("workspace", [None, 2000])
def test_gradcheck(reduction: str, smoothing: float, workspace: int | None) -> None:
    case = make(5, 3, 70, bias=True, weighted=True, ignored=0.2)

    def loss(input: Tensor, linear_weight: Tensor, linear_bias: Tensor) -> Tensor:
        operands = replace(case, input=input, linear_weight=linear_weight, linear_bias=linear_bias)
        return ours(operands, impl="chunked", reduction=reduction, label_smoothing=smoothing, workspace=workspace)

    assert torch.autograd.gradcheck(loss, case.operands(), fast_mode=True)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("frozen", [{"input"}, {"linear_weight"}, {"input", "linear_bias"}, {"linear_bias"}])
def test_what_is_frozen_costs_nothing(reduction, frozen) -> None:
    case = make(bias=True)
    watches = []
    for fixed in (set(), frozen):
        for name in ("input", "linear_weight", "linear_bias"):
            getattr(case, name).requires_grad_(name not in fixed).grad = None
        with Watch() as watch:
            ours(case, impl="chunked", reduction=reduction).sum().backward()
        watches.append(watch)
        for name in ("input", "linear_weight", "linear_bias"):
            assert (getattr(case, name).grad is None) == (name in fixed)
    everything, less = watches
    saved = [pair for pair in everything.products if pair not in less.products]
    n, d, v = *case.input.shape, case.linear_weight.shape[0]
    products = {"input": ((n, v), (v, d)), "linear_weight": ((v, n), (n, d))}
    assert sorted(saved) == sorted(products[name] for name in frozen if name in products)
    assert less.operations < everything.operations


@pytest.mark.parametrize("classes", [60, 2**16], ids=["reference", "chunked"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize(("head_is_frozen", "h_is_frozen"), [(True, False), (False, True), (False, False)])
def test_a_frozen_head_or_body_saves_its_product(classes, reduction, smoothing, head_is_frozen, h_is_frozen) -> None:
    """In full-size products, of N × d × V: the logits (once more for ``none``), dh and dW."""
    n, d = 30, 8
    head = early_head(d, classes, gamma=0.1, limit=5, bias=False).requires_grad_(not head_is_frozen)
    h = torch.randn(n, d, requires_grad=not h_is_frozen)
    with Watch() as watch:
        loss = head.loss(
            h, torch.randint(classes, (n,)), reduction=reduction, label_smoothing=smoothing, remember=False
        )
        loss.sum().backward()
    sizes = [left[0] * left[1] * right[1] for left, right in watch.products if min(left + right) > 1]
    logits = 2 if reduction == "none" and classes > 60 else 1
    assert sum(sizes) == (logits + (not h_is_frozen) + (not head_is_frozen)) * n * d * classes
    assert (head.weight.grad is None) == head_is_frozen
    assert (h.grad is None) == h_is_frozen


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_without_gradients_there_are_only_terms(context) -> None:
    case = make()
    with context(), Watch() as watch:
        assert not ours(case, impl="chunked").requires_grad
    assert len(watch.products) == 1


@every_engine
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("factor", [1.0, 3.0])
def test_a_kept_graph_gives_the_same_gradients_again(impl, device, reduction, factor) -> None:
    case = make(device=device, dtype=torch.bfloat16, bias=True)
    loss = ours(case, impl=impl, reduction=reduction).sum() * factor
    runs = [torch.autograd.grad(loss, case.operands(), retain_graph=True) for _ in range(3)]
    kept = [each.clone() for each in runs[0]]
    for run in runs:
        for each in run:
            each.mul_(0)  # The caller may change the gradients that were handed out.
    last = torch.autograd.grad(loss, case.operands())
    assert all(torch.equal(*pair) for pair in zip(last, kept, strict=True))


@pytest.mark.parametrize("factor", [1.0, 3.0])
def test_the_gradient_is_the_buffer_made_in_forward(factor: float) -> None:
    case = make(dtype=torch.float32)
    loss = ours(case, impl="chunked")
    made = [each.data_ptr() for each in loss.grad_fn.saved_tensors if each is not None]
    (loss * factor).backward()
    assert case.input.grad.data_ptr() in made
    assert case.linear_weight.grad.data_ptr() in made


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointed(reduction: str, use_reentrant: bool) -> None:
    case = make(bias=True)

    def loss_of(input: Tensor) -> Tensor:
        return ours(replace(case, input=input), impl="chunked", reduction=reduction).sum()

    expected = with_gradients(loss_of(case.input), case)
    checkpoint(loss_of, case.input, use_reentrant=use_reentrant).backward()
    for operand, right in zip(case.operands(), expected[1:], strict=True):
        torch.testing.assert_close(operand.grad, right)


@every_engine
def test_gradients_add_up(impl, device) -> None:
    case = make(device=device, dtype=torch.bfloat16)
    for _ in range(2):
        ours(case, impl=impl).backward()
    (once,) = torch.autograd.grad(ours(case, impl=impl), case.linear_weight)
    assert torch.equal(case.linear_weight.grad, 2 * once)


@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_differentiating_twice(reduction: str) -> None:
    case = make()
    loss = ours(case, impl="chunked", reduction=reduction).sum()
    first = torch.autograd.grad(loss, case.operands(), create_graph=True)  # This alone is harmless.
    with pytest.raises(RuntimeError, match='impl="reference"'):
        torch.autograd.grad(first[0].sum(), case.operands())
    loss = ours(case, impl="reference", reduction=reduction).sum()
    first = torch.autograd.grad(loss, case.operands(), create_graph=True)
    assert torch.autograd.grad(first[0].sum(), case.operands())[1].any()


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_several_gradients_at_once(reduction: str) -> None:
    case = make()
    loss = ours(case, impl="reference", reduction=reduction)
    several = torch.stack([torch.ones_like(loss), 2 * torch.ones_like(loss)])
    one, two = torch.autograd.grad(loss, case.operands()[0], several, is_grads_batched=True)[0]
    torch.testing.assert_close(two, 2 * one)
    loss = ours(case, impl="chunked", reduction=reduction)
    with pytest.raises(RuntimeError, match='impl="reference"'):
        torch.autograd.grad(loss, case.operands(), several, is_grads_batched=True)


@every_engine_in(torch.float32, torch.bfloat16)
def test_layouts(impl, device, dtype) -> None:
    plain = make(20, 16, 96, device=device, dtype=dtype, bias=True)
    odd = Case(
        plain.input.detach().t().contiguous().t().requires_grad_(),
        plain.linear_weight.detach().t().contiguous().t().requires_grad_(),
        plain.target.repeat_interleave(2)[::2],
        plain.linear_bias.detach().repeat_interleave(2)[::2].requires_grad_(),
    )
    assert not odd.linear_weight.is_contiguous()
    for reduction in ("mean", "none"):
        assert_no_worse_than_eager(odd, impl, reduction=reduction)
        assert torch.equal(*(ours(each, impl=impl, reduction=reduction) for each in (plain, odd)))


def test_expanded_upstream_of_a_sum() -> None:
    case = make()
    ours(case, impl="chunked", reduction="none").sum().backward()
    expected = with_gradients(ours(case, impl="chunked", reduction="sum"), case)
    torch.testing.assert_close(case.input.grad, expected[1])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Forward mode uses functions that torch deprecates.
def test_torch_func_and_forward_mode_use_the_reference() -> None:
    case = make(6, 4, 20)
    expected = with_gradients(ours(case, impl="reference"), case)

    def of_weight(weight: Tensor) -> Tensor:
        return linear_cross_entropy(case.input.detach(), weight, case.target, workspace=FORCED)

    weight = case.linear_weight.detach()
    torch.testing.assert_close(torch.func.grad(of_weight)(weight), expected[2])
    tangent = torch.randn_like(weight)
    _, slope = torch.func.jvp(of_weight, (weight,), (tangent,))
    torch.testing.assert_close(slope, (expected[2] * tangent).sum())
    with forward_ad.dual_level():
        loss = of_weight(forward_ad.make_dual(weight, tangent))
        torch.testing.assert_close(forward_ad.unpack_dual(loss).tangent, slope)
        assert forward_ad.unpack_dual(of_weight(weight)).tangent is None


def test_tensors_without_values_and_export_use_the_reference() -> None:
    with FakeTensorMode():
        case = make(6, 4, 20)
        assert torch.autograd.grad(ours(case, workspace=FORCED), case.input)[0].shape == (6, 4)

    class Loss(torch.nn.Module):
        def forward(self, input: Tensor, linear_weight: Tensor, target: Tensor) -> Tensor:
            return linear_cross_entropy(input, linear_weight, target, workspace=FORCED)

    case = make(6, 4, 20)
    operands = case.input.detach(), case.linear_weight.detach(), case.target
    torch.testing.assert_close(torch.export.export(Loss(), operands).module()(*operands), ours(case).detach())


@pytest.mark.filterwarnings("ignore")  # Torch's compiler warns.
def test_compiled() -> None:
    torch._dynamo.reset()
    case = make(6, 4, 20, dtype=torch.float32)

    def loss_of(scale: float) -> Tensor:
        return linear_cross_entropy(case.input * scale, case.linear_weight, case.target, workspace=FORCED) * 2

    found = with_gradients(torch.compile(loss_of, backend="aot_eager")(1.5), case)
    plain, exact = (
        with_gradients(F.cross_entropy(each.input * 1.5 @ each.linear_weight.T, each.target) * 2, each)
        for each in (case, case.to(torch.float64))
    )
    for results in zip(found, plain, exact, strict=True):
        assert_as_close(*results)
