"""The loss from all logits in half precision, against eager torch on float32 logits and against float64.

Without a GPU, Triton's interpreter runs the kernels; on one, ``auto`` is tried at sizes for which it takes them.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hebbian_softmax import linear_cross_entropy
from tests.closeness import assert_as_close
from tests.interpreter import interpreted, interpreted_or_on_gpu, quiet
from tests.on_gpu import no_waiting

pytest.importorskip("triton", reason="the kernels need Triton")
whole = pytest.importorskip("hebbian_softmax.loss.gpu.whole")
pytestmark = [interpreted_or_on_gpu, *quiet]

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = torch.bfloat16, torch.float16
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
SIZES = (5, 8, 37), (1, 8, 1), (3, 16, 5000), (2, 8, 20_003), (4, 4, 1024), (150, 4, 10), (9, 4, 256)
LARGE = (1024, 64, 9001), (512, 64, 40_000), (9000, 32, 1003), (100_003, 16, 200)
"""Sizes at which ``auto`` takes the kernels."""


def make(n: int, d: int, v: int, dtype: torch.dtype, ignored: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    h, w = torch.randn(n, d).to(DEVICE, dtype), (3 * torch.randn(v, d) / d**0.5).to(DEVICE, dtype)
    target = torch.randint(v, (n,))
    if n > 2 and ignored:
        target[1::3] = -100
    return h.requires_grad_(), w.requires_grad_(), target.to(DEVICE)


def ours(h: Tensor, w: Tensor, target: Tensor) -> Tensor:
    loss: Tensor = whole.WholeCrossEntropy.apply(h, w, target, -100)
    return loss


def eager(h: Tensor, w: Tensor, target: Tensor) -> Tensor:
    logits = F.linear(h, w)
    return F.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), target)


def with_gradients(loss: Tensor, operands: tuple[Tensor, ...], factor: float = 1.0, **options: Any) -> list[Tensor]:
    return [loss.detach(), *torch.autograd.grad(loss, operands, torch.full_like(loss, factor), **options)]


def check(found: list[Tensor], h: Tensor, w: Tensor, target: Tensor, factor: float = 1.0) -> None:
    """Check a loss and its gradients, which have to be as exact as those of eager torch."""
    plain = with_gradients(eager(h, w, target), (h, w), factor)
    wide = h.detach().double().requires_grad_(), w.detach().double().requires_grad_()
    exact = with_gradients(eager(*wide, target), wide, factor)
    assert found[0].dtype == torch.float32
    for name, *each in zip(("loss", "dh", "dW"), found, plain, exact, strict=True):
        assert_as_close(*each, name)


@every_dtype
@pytest.mark.parametrize(("n", "d", "v"), SIZES)
def test_loss_and_gradients(n: int, d: int, v: int, dtype: torch.dtype) -> None:
    h, w, target = make(n, d, v, dtype)
    factor = 1024.0 if dtype == torch.float16 else -0.3
    check(with_gradients(ours(h, w, target), (h, w), factor), h, w, target, factor)


def test_the_loss_is_that_of_the_rounded_logits() -> None:
    """Nothing but the logits is in half precision, so the loss has the error of float32."""
    h, w, target = make(7, 16, 3000, torch.bfloat16)
    expected = F.cross_entropy(F.linear(h, w).double(), target)
    assert abs(float(ours(h, w, target).detach()) - float(expected.detach())) <= 4 * 2**-23 * float(expected.detach())


def test_small_gradients_are_scaled_before_they_are_rounded() -> None:
    h, w, target = make(3, 8, 5000, torch.float16)
    w = (w.detach() / 8).requires_grad_()
    loss, scale = ours(h, w, target), 2.0**16  # Each probability is about 2^-12, and float16 ends at 2^-24.
    _, _, found = with_gradients(loss, (h, w), 1e-4 * scale)
    assert (found.abs().amax(1) > 0).all()
    check(with_gradients(ours(h, w, target), (h, w), 1e-4 * scale), h, w, target, 1e-4 * scale)


@every_dtype
def test_no_target_at_all(dtype: torch.dtype) -> None:
    h, w, target = make(4, 8, 50, dtype)
    loss, *gradients = with_gradients(ours(h, w, torch.full_like(target, -100)), (h, w))
    assert loss.isnan()
    assert all((each == 0).all() for each in gradients)


@pytest.mark.parametrize("v", [37, 64])
def test_a_graph_that_is_kept_gives_the_same_again(v: int) -> None:
    h, w, target = make(5, 8, v, torch.float16)
    loss = ours(h, w, target)
    results = [with_gradients(loss, (h, w), 3.0, retain_graph=keep) for keep in (True, True, False)]
    check(results[0], h, w, target, 3.0)
    for other in results[1:]:
        assert all(torch.equal(*pair) for pair in zip(results[0], other, strict=True))


@pytest.mark.parametrize("frozen", [0, 1])
def test_only_the_gradients_that_are_wanted(frozen: int) -> None:
    operands = h, w, target = make(5, 8, 37, torch.float16)
    expected = torch.autograd.grad(ours(h, w, target), (h, w))[1 - frozen]
    operands[frozen].requires_grad_(False)
    ours(h, w, target).backward()
    assert operands[frozen].grad is None
    assert torch.equal(operands[1 - frozen].grad, expected)
    with torch.no_grad():
        assert not ours(h, w, target).requires_grad


@every_dtype
def test_differentiated_twice(dtype: torch.dtype) -> None:
    def twice(loss: Tensor, h: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        first = torch.autograd.grad(loss, (h, w), create_graph=True)
        return torch.autograd.grad(sum(each.float().square().sum() for each in first), (h, w))

    h, w, target = make(5, 8, 37, dtype)
    for found, expected in zip(twice(ours(h, w, target), h, w), twice(eager(h, w, target), h, w), strict=True):
        assert torch.equal(found, expected)


def test_one_tensor_as_both_operands() -> None:
    x = torch.randn(6, 4).to(DEVICE, torch.float16).requires_grad_()
    target = torch.arange(6, device=DEVICE)
    for create_graph in (False, True):
        (found,) = torch.autograd.grad(ours(x, x, target), x, create_graph=create_graph)
        (expected,) = torch.autograd.grad(eager(x, x, target), x)
        torch.testing.assert_close(found, expected, rtol=2e-3, atol=1e-4)


@pytest.mark.parametrize("by_vmap", [False, True])
def test_several_upstream_gradients_at_once(by_vmap: bool) -> None:
    h, w, target = make(5, 8, 37, torch.float16)
    factors = torch.tensor([1.0, -2.0, 0.5], device=DEVICE)
    loss = ours(h, w, target)
    if by_vmap:
        found = torch.vmap(lambda factor: torch.autograd.grad(loss, (h, w), factor, retain_graph=True))(factors)
    else:
        found = torch.autograd.grad(loss, (h, w), factors, is_grads_batched=True)
    for i, factor in enumerate(factors.tolist()):
        expected = with_gradients(eager(h, w, target), (h, w), factor)[1:]
        for each, right in zip(found, expected, strict=True):
            torch.testing.assert_close(each[i], right, rtol=2e-3, atol=1e-4)


def test_a_backward_pass_that_fails_midway_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """By then the gradient stands in the place of the logits."""
    h, w, target = make(5, 8, 37, torch.float16)
    loss, product = ours(h, w, target), torch.mm

    def too_small(*arguments: Any, **options: Any) -> Tensor:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(torch, "mm", too_small)
    with pytest.raises(torch.OutOfMemoryError):
        loss.backward()
    monkeypatch.setattr(torch, "mm", product)
    with pytest.raises(RuntimeError, match="compute the loss again"):
        loss.backward()


def test_saved_tensors_may_be_moved() -> None:
    """Rows of 37 logits are padded, which must outlive a copy of what was saved."""
    h, w, target = make(5, 8, 37, torch.float16)
    with torch.autograd.graph.saved_tensors_hooks(lambda each: each.clone(), lambda each: each):
        loss = ours(h, w, target)
    check(with_gradients(loss, (h, w)), h, w, target)

    def elsewhere(tensor: Tensor) -> Tensor:
        room = tensor.new_empty(tensor.numel() + 1)[1:]  # not at a multiple of 16 bytes
        return room.view(tensor.shape).copy_(tensor)

    with torch.autograd.graph.saved_tensors_hooks(elsewhere, lambda each: each):
        loss = ours(h, w, target)
    check(with_gradients(loss, (h, w)), h, w, target)


def test_targets_may_lie_anywhere() -> None:
    h, w, target = make(5, 8, 37, torch.float16)
    views = F.pad(target, (1, 0))[1:], torch.stack([target, target], 1)[:, 1], target
    found = [with_gradients(ours(h, w, view), (h, w)) for view in views]
    for other in found[1:]:
        assert all(torch.equal(*pair) for pair in zip(found[0], other, strict=True))


def test_autocast_around_backward_changes_nothing() -> None:
    h, w, target = make(5, 8, 37, torch.float16)
    expected = with_gradients(ours(h, w, target), (h, w))
    loss = ours(h, w, target)
    with torch.autocast(DEVICE, torch.bfloat16):
        found = with_gradients(loss, (h, w))
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


@pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning")  # of the interpreter
@pytest.mark.parametrize("bad", [-torch.inf, torch.inf, torch.nan])
@pytest.mark.parametrize("where", [slice(7, 8), slice(9, 10), slice(None), slice(8192, None)], ids=str)
def test_rows_without_a_distribution(bad: float, where: slice) -> None:
    w = torch.linspace(-1, 1, 10_000).unsqueeze(1)  # With h = 1, these are the logits, in two blocks.
    w[where] = bad
    w = w.to(DEVICE, torch.float16)
    h = torch.ones(1, 1, device=DEVICE, dtype=torch.float16).requires_grad_()
    target = torch.tensor([7], device=DEVICE)
    found = with_gradients(ours(h, w, target), (h,))
    expected = with_gradients(eager(h, w, target), (h,))
    for each, right in zip(found, expected, strict=True):
        torch.testing.assert_close(each, right, rtol=2e-3, atol=1e-3, equal_nan=True)


@interpreted
@pytest.mark.parametrize("value", [-1, 37, 2**40])
def test_a_target_that_is_no_class(value: int) -> None:
    h, w, target = make(5, 8, 37, torch.float16)
    target[3] = value
    with pytest.raises(RuntimeError, match="target must be"):
        ours(h, w, target)


@pytest.mark.gpu
@every_dtype
@pytest.mark.parametrize(("n", "d", "v"), LARGE)
def test_auto(n: int, d: int, v: int, dtype: torch.dtype) -> None:
    h, w, target = make(n, d, v, dtype)
    for view in (target, F.pad(target, (1, 0))[1:]):  # The second launch is a direct one.
        loss = linear_cross_entropy(h, w, view)
        assert type(loss.grad_fn).__name__ == "WholeCrossEntropyBackward"
        check(with_gradients(loss, (h, w), 1024.0), h, w, target, 1024.0)


@pytest.mark.gpu
@every_dtype
def test_auto_with_few_logits(dtype: torch.dtype) -> None:
    h, w, target = make(300, 32, 1003, dtype)
    check(with_gradients(linear_cross_entropy(h, w, target), (h, w), 1024.0), h, w, target, 1024.0)
    first = torch.autograd.grad(linear_cross_entropy(h, w, target), (h, w), create_graph=True)
    torch.autograd.grad(sum(each.float().square().sum() for each in first), (h, w))


@pytest.mark.gpu
@every_dtype
def test_auto_does_not_wait_for_the_device(dtype: torch.dtype) -> None:
    h, w, target = make(1024, 64, 9001, dtype)
    linear_cross_entropy(h, w, target).backward()
    with no_waiting():
        linear_cross_entropy(h, w, target).backward()


@pytest.mark.gpu
def test_auto_in_a_cuda_graph() -> None:
    h, w, target = make(1024, 64, 9001, torch.bfloat16)
    for _ in range(2):
        torch.autograd.grad(linear_cross_entropy(h, w, target), (h, w))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = linear_cross_entropy(h, w, target)
        found = loss.detach(), *torch.autograd.grad(loss, (h, w))
    with torch.no_grad():
        h.copy_(torch.randn_like(h))
        target.copy_(target.flip(0))
    graph.replay()
    check(list(found), *(leaf.detach().requires_grad_() for leaf in (h, w)), target)  # torch warns of a stream's leaves
