"""Targets that are probabilities: the loss is that of torch, and the memory has the class with more than half."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hebbian_softmax import OnePassAdam
from hebbian_softmax.checks import majority_class
from tests.heads import attached_head, early_head, unchanged
from tests.oracle import IGNORED, Oracle

OK = {"gamma": 0.3, "limit": 9}


def probabilities(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return (3 * torch.randn(*shape, dtype=dtype)).softmax(-1)


@pytest.mark.parametrize("shape", [(1,), (6,), (2, 3), ()])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_loss_is_cross_entropy(shape: tuple[int, ...], reduction: str, weighted: bool, smoothing: float) -> None:
    head = early_head(5, 7, bias=weighted, dtype=torch.float64, **OK)
    h = torch.randn(*shape, 5, dtype=torch.float64, requires_grad=True)
    soft = probabilities(*shape, 7).requires_grad_()
    weight = torch.rand(7, dtype=torch.float64) if weighted else None
    options: dict[str, Any] = {"reduction": reduction, "label_smoothing": smoothing, "weight": weight}
    loss = head.loss(h, soft, remember=False, **options)
    logits = F.linear(h, head.weight, head.bias).reshape(-1, 7)
    expected = F.cross_entropy(logits, soft.reshape(-1, 7), **options)
    expected = expected.view(shape) if reduction == "none" else expected
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
    inputs = [h, soft, *head.parameters()]
    found = torch.autograd.grad(loss.sum(), inputs)
    for ours, theirs in zip(found, torch.autograd.grad(expected.sum(), inputs), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("classes", [0, 6])
def test_a_batch_of_nobody_has_loss_zero(reduction: str, classes: int) -> None:
    head, optimizer = attached_head(classes=classes)
    h = torch.randn(0, 4, requires_grad=True)
    with unchanged(head):
        loss = head.loss(h, torch.zeros(0, classes), reduction=reduction)
        loss.sum().backward()
        optimizer.step()
    assert not loss.any()
    assert h.grad.shape == (0, 4)


@pytest.mark.parametrize("ignore_index", [-100, 2])
def test_the_class_with_more_than_half_is_memorised(ignore_index: int) -> None:
    half = torch.tensor([0.5, 0.5, 0, 0, 0, 0], dtype=torch.float64)
    above = torch.tensor([0.5 + 1e-6, 0.5 - 1e-6, 0, 0, 0, 0], dtype=torch.float64)
    head, optimizer = attached_head(lr=0.0, write="literal", dtype=torch.float64, ignore_index=ignore_index)
    oracle = Oracle(6, 0.3, 9)
    for _ in range(4):
        soft = torch.cat([half[None], above[None], probabilities(10, 6)])
        labels = [int(p.argmax()) if float(p.max()) > 0.5 else IGNORED for p in soft]
        y = torch.tensor([IGNORED if label == ignore_index else label for label in labels])
        assert majority_class(soft, IGNORED).tolist() == labels
        h = torch.randn(12, 4, dtype=torch.float64)
        expected = oracle.update(head.weight.detach(), h, y)
        optimizer.zero_grad()
        head.loss(h.view(3, 4, 4), soft.view(3, 4, 6)).backward()
        optimizer.step()
        torch.testing.assert_close(head.weight.detach(), expected, rtol=1e-12, atol=1e-12)
        assert head.counts.tolist() == oracle.counts
    assert sum(oracle.counts) > 12


def test_probabilities_of_one_class_are_that_class() -> None:
    (head, optimizer), (twin, its_optimizer) = (attached_head(torch.optim.Adam, dtype=torch.float64) for _ in range(2))
    twin.load_state_dict(head.state_dict())
    for _ in range(5):
        h, y = torch.randn(8, 4, dtype=torch.float64), torch.randint(6, (8,))
        for each, steps, targets in ((head, optimizer, y), (twin, its_optimizer, F.one_hot(y, 6).double())):
            steps.zero_grad()
            each.loss(h, targets, label_smoothing=0.1).backward()
            steps.step()
    assert twin.counts.tolist() == head.counts.tolist()
    torch.testing.assert_close(twin.weight, head.weight, rtol=1e-12, atol=1e-12)


SPOILED = [
    (lambda p: p * 2, ValueError, "the sum 2 of row 0"),
    (lambda p: p * 0.99, ValueError, "with the sum 1"),
    (lambda p: torch.cat([p[:2], -p[2:]]), ValueError, "none negative.*row 2"),
    (lambda p: torch.tensor([[1.5, -0.5, 0, 0, 0, 0]] * 3), ValueError, "got -0.5 in row 0"),
    (lambda p: p * float("nan"), ValueError, "got nan in row 0"),
    (lambda p: p * float("inf"), ValueError, "must be probabilities"),
    (lambda p: torch.zeros(3, 6), ValueError, "the sum 0 of row 0"),
    (lambda p: p[:, :5], ValueError, r"must have shape \(3, 6\) to go with h, got \(3, 5\)"),
    (lambda p: p[:2], ValueError, r"must have shape \(3, 6\)"),
    (lambda p: p[:, 0], TypeError, r"integer dtype, got torch.float32; probabilities must have shape \(\.\.\., 6\)"),
    (lambda p: p.to(torch.complex64), TypeError, "integer dtype, got torch.complex64"),
]


@pytest.mark.parametrize(("spoil", "error", "match"), SPOILED, ids=[str(i) for i in range(len(SPOILED))])
def test_what_is_no_probability_is_refused(spoil: Any, error: type[Exception], match: str) -> None:
    head, _optimizer = attached_head()
    with unchanged(head), pytest.raises(error, match=match):
        head.loss(torch.randn(3, 4), spoil(probabilities(3, 6, dtype=torch.float32)))
    assert len(head.attachment.pending) == 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("classes", [2, 1000, 50_000])
def test_rounded_probabilities_are_accepted(dtype: torch.dtype, classes: int) -> None:
    head = early_head(2, classes, **OK)
    teacher = torch.randn(4, classes).softmax(-1)
    mixed = 0.3 * teacher.to(dtype) + 0.7 * teacher.flip(0).to(dtype)
    for soft in (teacher.to(dtype), mixed):
        assert bool(torch.isfinite(head.loss(torch.randn(4, 2), soft, remember=False)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_sums_in_float32(dtype: torch.dtype) -> None:
    head = early_head(4, 6, dtype=dtype, **OK)
    h, soft = torch.randn(3000, 4, dtype=dtype), probabilities(3000, 6).to(dtype)
    expected = F.cross_entropy(F.linear(h.double(), head.weight.double()), soft.double())
    loss = head.loss(h, soft, remember=False)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(expected.item(), rel=3 * torch.finfo(dtype).eps)


def test_with_a_copy_in_bfloat16_and_autocast() -> None:
    head = early_head(4, 6, **OK)
    optimizer = OnePassAdam(head.parameters(), head=head)
    h, soft = torch.randn(3, 4), F.one_hot(torch.tensor([1, 2, 2]), 6).float()
    for autocast in (True, False):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = head.loss(h if autocast else h.bfloat16(), soft)
        assert loss.dtype == torch.float32
        loss.backward()
        optimizer.step()
    assert head.counts.tolist() == [0, 2, 4, 0, 0, 0]


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch's compiler reads .grad of what it traces
def test_a_model_with_mixup_compiles() -> None:
    head, optimizer = attached_head()
    body = nn.Linear(3, 4)
    x, soft = torch.randn(5, 3), F.one_hot(torch.tensor([0, 1, 2, 1, 1]), 6).float()
    compiled = torch.compile(lambda x, soft: head.loss(body(x), soft), backend="eager")
    compiled(x, soft).backward()
    optimizer.step()
    assert head.counts.tolist() == [1, 3, 1, 0, 0, 0]


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    head, optimizer = attached_head(device="cuda")
    soft = probabilities(8, 6, dtype=torch.float32).cuda()
    h = torch.randn(8, 4, device="cuda")
    loss = head.loss(h, soft)
    torch.testing.assert_close(loss, F.cross_entropy(head(h), soft))
    loss.backward()
    optimizer.step()
    labels = majority_class(soft, 6)
    assert head.counts.tolist() == torch.bincount(labels, minlength=7)[:6].tolist()
