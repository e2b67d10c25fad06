"""A head that starts without classes and grows from nothing."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from hebbian_softmax import HebbianSoftmax, OnePassAdam, OnePassRMSprop
from tests.heads import attached_head, early_head, train
from tests.oracle import ManualLoop, Oracle

OK = {"gamma": 0.3, "limit": 9}
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "momentum": partial(torch.optim.SGD, momentum=0.9),
    "rmsprop": torch.optim.RMSprop,
    "adam": torch.optim.Adam,
    "adam-foreach": partial(torch.optim.Adam, foreach=True),
    "adamw-fused": partial(torch.optim.AdamW, fused=True),
    "one-pass-adam": OnePassAdam,
    "one-pass-rmsprop": OnePassRMSprop,
}
NOBODY: list[list[int]] = [[], [-100, -100]]


@pytest.mark.parametrize("bias", [True, False])
def test_it_is_a_layer_without_outputs(bias: bool) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        head = early_head(4, 0, bias=bias, **OK)
        head.reset_parameters()
    assert head.num_classes == head.out_features == 0
    assert head(torch.randn(3, 4)).shape == (3, 0)
    assert head(torch.randn(2, 3, 4)).shape == (2, 3, 0)
    assert "num_classes=0" in repr(head)


@pytest.mark.parametrize("labels", NOBODY)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_a_batch_without_targets_has_loss_zero(labels: list[int], dtype: torch.dtype, reduction: str) -> None:
    head = early_head(4, 0, bias=True, dtype=dtype, **OK)
    h = torch.randn(len(labels), 4, dtype=dtype, requires_grad=True)
    loss = head.loss(h, torch.tensor(labels, dtype=torch.int64), remember=False, reduction=reduction)
    assert loss.shape == ((len(labels),) if reduction == "none" else ())
    assert not loss.any()
    loss.sum().backward()
    assert not h.grad.any()
    head.memorize(h.detach(), torch.tensor(labels, dtype=torch.int64))
    assert not head.running.batches.any()


def test_a_target_is_refused_in_words() -> None:
    head = early_head(4, 0, **OK)
    with pytest.raises(ValueError, match="while there are no classes, got 0"):
        head.loss(torch.randn(1, 4), torch.tensor([0]))


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("labels", NOBODY)
def test_it_trains_and_grows_with_every_optimizer(name: str, labels: list[int]) -> None:
    head, optimizer = attached_head(OPTIMIZERS[name], lr=0.01, classes=0, bias=True)
    for _ in range(2):  # nothing to learn
        optimizer.zero_grad()
        head.loss(torch.randn(len(labels), 4), torch.tensor(labels, dtype=torch.int64)).backward()
        optimizer.step()
    head.add_classes(1)
    train(head, optimizer, (0, 0))
    head.add_classes(2)
    train(head, optimizer, (2, 0))
    assert head.counts.tolist() == [3, 0, 1]
    for value in head.state_dict().values():
        assert bool(torch.isfinite(value).all())
    for parameter in head.parameters():
        for value in optimizer.state[parameter].values():
            assert value.dim() == 0 or value.shape[0] == 3


@pytest.mark.parametrize("kind", [OnePassAdam, OnePassRMSprop])
def test_the_head_of_a_one_pass_optimizer(kind: Callable[..., Any]) -> None:
    head = early_head(4, 0, **OK)
    optimizer = kind(head.parameters(), head=head)
    with torch.autocast("cpu", torch.bfloat16):
        head.loss(torch.randn(2, 4, requires_grad=True), torch.tensor([-100, -100])).backward()
    optimizer.step()
    head.add_classes(3)
    train(head, optimizer, (1, 2))
    assert head.counts.tolist() == [0, 1, 1]


def test_growing_from_nothing_is_algorithm_1() -> None:
    """New rows are the head's own; from then on it is the paper's loop on a plain layer with these rows."""
    backbone, twin = (nn.Linear(3, 4).double() for _ in range(2))
    twin.load_state_dict(backbone.state_dict())
    head = early_head(4, 0, write="literal", dtype=torch.float64, **OK)
    optimizer = torch.optim.SGD([*backbone.parameters(), *head.parameters()], lr=0.1)
    head.attach(optimizer)
    linear, oracle = nn.Linear(4, 1, bias=False).double(), Oracle(0, 0.3, 9)
    for classes in range(1, 6):
        head.add_classes(1)
        rows = head.weight.detach().clone()
        linear.weight = nn.Parameter(rows)
        loop = ManualLoop(twin, linear, torch.optim.SGD([*twin.parameters(), linear.weight], lr=0.1), oracle)
        oracle.counts.append(0)
        for _ in range(4):
            x, y = torch.randn(6, 3).double(), torch.randint(classes, (6,))
            loop.step(x, y)
            optimizer.zero_grad()
            head.loss(backbone(x), y).backward()
            optimizer.step()
            torch.testing.assert_close(head.weight, linear.weight, rtol=1e-12, atol=1e-12)
        assert head.counts.tolist() == oracle.counts


def test_state_and_copies() -> None:
    head, twin = early_head(4, 0, bias=True, **OK), early_head(4, 0, bias=True, **OK)
    twin.load_state_dict(head.state_dict())
    twin.load_state_dict(head.state_dict(), assign=True)
    copied = copy.deepcopy(twin).half().float()
    copied.add_classes(2)
    assert twin.num_classes == 0
    assert copied(torch.randn(1, 4)).shape == (1, 2)
    with pytest.raises(ValueError, match="add_classes"):
        twin.load_state_dict(copied.state_dict())
    assert HebbianSoftmax.from_linear(copied.to_linear(), **OK).counts.tolist() == [9, 9]


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [torch.optim.Adam, OnePassAdam, OnePassRMSprop])
def test_on_a_gpu(kind: Callable[..., torch.optim.Optimizer]) -> None:
    head = early_head(4, 0, device="cuda", **OK)
    optimizer = kind(head.parameters(), lr=0.01, **({} if kind is torch.optim.Adam else {"head": head}))
    head.attach(optimizer)
    for dtype in (torch.float32, torch.bfloat16):
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16, enabled=dtype == torch.bfloat16):
            h = torch.randn(3, 4, device="cuda", requires_grad=True)
            head.loss(h, torch.full((3,), -100, device="cuda")).backward()
        optimizer.step()
    head.add_classes(2)
    train(head, optimizer, (1, 1))
    assert head.counts.tolist() == [0, 2]
