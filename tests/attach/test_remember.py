"""Activations remembered for a loss of the user's own, and those of frozen features and weights."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from tests.attach.pending_lab import CLASSES, Lab


@pytest.mark.parametrize("frozen", [False, True])
def test_remember_without_backward(frozen: bool) -> None:
    lab = Lab()
    kept = lab.batch(1, 2, grad=not frozen)
    lab.head.remember(*kept)
    nn.functional.cross_entropy(lab.head(kept[0]), kept[1])
    batch = lab.batch(3, grad=not frozen)
    lab.head.remember(*batch)
    nn.functional.cross_entropy(lab.head(batch[0]), batch[1]).backward()
    lab.step_writes(batch)


def test_a_frozen_weight_is_written_by_the_rule_alone() -> None:
    lab = Lab(frozen=True)
    lab.step_writes(lab.learn(1, 2, 2))


@pytest.mark.parametrize("order", ["remember first", "head first", "detached", "functional"])
@pytest.mark.parametrize("frozen", [False, True])
def test_remember_for_a_loss_of_ones_own(order: str, frozen: bool) -> None:
    lab = Lab()
    for labels in ((1, 2, 2), (2, 3)):
        lab.optimizer.zero_grad()
        h, y = lab.batch(*labels, grad=not frozen)
        if order in ("remember first", "functional"):
            lab.head.remember(h, y)
        logits = nn.functional.linear(h, lab.head.weight) if order == "functional" else lab.head(h)
        if order in ("head first", "detached"):
            lab.head.remember(h if order == "head first" or not frozen else h.detach(), y)
        ((1 - logits.softmax(-1)) ** 2 * nn.functional.one_hot(y, CLASSES)).sum().backward()  # a focal-like loss
        lab.step_writes((h, y))


def test_in_place_dropout_after_remember() -> None:
    lab = Lab(lr=0.0)
    h, y = lab.batch(1, 2)
    kept = h.detach().clone()
    lab.head.remember(h, y)
    nn.functional.cross_entropy(lab.head(nn.functional.dropout(h, 0.5, inplace=True)), y).backward()
    lab.step_writes((kept, y))


def test_frozen_features_given_to_the_head_twice() -> None:
    lab = Lab()
    for order in ("remember first", "remember last"):
        lab.optimizer.zero_grad()
        h, y = lab.batch(1, 2, grad=False)
        if order == "remember first":
            lab.head.remember(h, y)
        first = lab.head(h)
        second = lab.head(h)
        if order == "remember last":
            lab.head.remember(h, y)
        used, other = (second, first) if order == "remember first" else (first, second)
        assert other.argmax(-1).shape == (2,)  # a metric
        nn.functional.cross_entropy(used, y).backward()
        lab.step_writes((h, y))


def test_remember_twice_backpropagated_is_once_and_under_no_grad_never() -> None:
    lab = Lab()
    h, y = lab.batch(1, 2)
    with torch.no_grad():
        lab.head.remember(h, torch.tensor([5, 5]))
    lab.head.remember(h, y)
    loss = nn.functional.cross_entropy(lab.head(h), y)
    loss.backward(retain_graph=True)
    loss.backward()
    lab.step_writes((h, y))


def test_a_weight_frozen_at_first_and_trained_later() -> None:
    lab = Lab(frozen=True)
    lab.head.weight.requires_grad_(True)
    lab.learn(2)
    lab.optimizer.zero_grad()
    h, y = lab.batch(3)
    nn.functional.cross_entropy(lab.head(h), y).backward()
    lab.step_writes()


def test_what_was_remembered_and_never_used_is_not_written_with_another_loss() -> None:
    lab = Lab()
    lab.head.remember(*lab.batch(1, grad=False))
    lab.step_writes(lab.learn(2))


LOGITS = {
    "linear": lambda head, h: nn.functional.linear(h, head.weight),
    "product": lambda head, h: h @ head.weight.T,
    "dropout": lambda head, h: nn.functional.dropout(h, 0.5) @ head.weight.t(),
    "autocast": lambda head, h: nn.functional.linear(h, head.weight.float()).double(),
    "head": lambda head, h: head(h) + 0 * head.weight.square().sum(),
}


@pytest.mark.parametrize("skip", ["before", "after"], ids=["before the logits", "after the logits"])
@pytest.mark.parametrize("logits", list(LOGITS))
def test_a_skipped_batch_of_frozen_features_is_not_memorised(logits: str, skip: str) -> None:
    lab = Lab()
    for number, labels in enumerate(((1, 2), (3, 3), (4, 5))):
        h, y = lab.batch(*labels, grad=False)
        if logits == "autocast":
            h = h.float()
        lab.optimizer.zero_grad()
        lab.head.remember(h, y)
        if number == 1 and skip == "before":
            continue
        loss = nn.functional.cross_entropy(LOGITS[logits](lab.head, h), y)
        if number == 1:
            continue
        (loss + 1e-3 * lab.head.weight.square().sum()).backward()
        lab.step_writes((h, y))


def test_a_hundred_calls_before_one_backward_are_all_memorised() -> None:
    lab = Lab(lr=0.0)
    batches = [lab.batch(label % CLASSES, grad=False) for label in range(100)]
    loss = torch.zeros((), dtype=torch.float64)
    for h, y in batches:
        lab.head.remember(h, y)
        loss = loss + nn.functional.cross_entropy(h @ lab.head.weight.t(), y)
    loss.backward()
    lab.step_writes(*batches)


def test_the_weight_is_a_parameter_while_frozen_features_wait() -> None:
    lab = Lab()
    (weight,) = lab.head.parameters()
    h, y = lab.batch(1, grad=False)
    lab.head.remember(h, y)
    seen = lab.head.weight
    assert isinstance(seen, nn.Parameter)
    assert seen.is_leaf
    seen.grad = torch.ones_like(weight)
    assert seen.grad is weight.grad
    seen.grad = None
    assert type(copy.deepcopy(seen)) is type(pickle.loads(pickle.dumps(seen))) is nn.Parameter
    gradients = []
    handle = seen.register_hook(gradients.append)
    logits = h @ seen.T
    assert type(logits) is torch.Tensor
    (grad,) = torch.autograd.grad(logits.sum(), lab.head.weight, retain_graph=True)
    assert len(gradients) == 1
    torch.testing.assert_close(grad, h.sum(0).expand_as(grad))
    handle.remove()
    with torch.no_grad():
        assert lab.head.weight is weight
    logits.sum().backward()
    lab.step_writes((h, y))
    assert lab.head.weight is weight


def test_frozen_features_and_a_weight_taken_from_elsewhere() -> None:
    """Nothing tells these calls apart: the next gradient that nothing else explains makes them pending."""
    lab = Lab()
    weight = lab.head.weight
    h, y = lab.batch(1, 2, grad=False)
    lab.head.remember(h, y)
    nn.functional.cross_entropy(h @ weight.t(), y).backward()
    lab.step_writes((h, y))
    lab.optimizer.zero_grad()
    lab.head.remember(h, y)
    lab.step_writes()  # a step forgets what was remembered for no loss
    lab.step_writes(lab.learn(3))


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("first", ["remember", "loss", "targets"])
def test_micro_batches_whose_gradient_is_zero_are_kept(first: str, frozen: bool) -> None:
    lab = Lab()
    batches = []
    for _ in range(3):
        h, y = lab.batch(1, 2, grad=not frozen)
        if first == "remember":
            lab.head.remember(h, y)
            loss = nn.functional.cross_entropy(lab.head(h), y)
        elif first == "loss":
            loss = lab.head.loss(h, y)
        else:
            with lab.head.targets(y):
                loss = nn.functional.cross_entropy(lab.head(h), y)
        (loss * 0).backward()
        lab.head.loss(*lab.batch(5), remember=False).mul(0).backward()  # a pass that remembers nothing
        batches.append((h, y))
    lab.step_writes(*batches)


@pytest.mark.parametrize("grad", [False, True], ids=["frozen", "leaf"])
def test_a_second_backward_pass_counts_if_the_first_did_not(grad: bool) -> None:
    lab = Lab()
    h, y = lab.batch(1, 2, grad=False)
    h.requires_grad_(grad)
    lab.head.remember(h, y)
    loss = nn.functional.cross_entropy(lab.head(h), y)
    if grad:
        torch.autograd.grad(loss, h, retain_graph=True)  # an attack
    else:
        loss.backward(retain_graph=True)
        lab.optimizer.zero_grad()
    loss.backward()
    lab.step_writes((h, y))


def test_the_head_called_with_something_computed_from_frozen_features() -> None:
    lab = Lab()
    h, y = lab.batch(1, 2, grad=False)
    lab.head.remember(h, y)
    nn.functional.cross_entropy(lab.head(h * 2), y).backward()
    lab.step_writes((h, y))


def test_memory_that_is_used_again_is_not_what_was_remembered() -> None:
    lab = Lab()
    lab.head.remember(*lab.batch(1, 2, grad=False))  # for no loss, and freed
    h, y = lab.batch(3, 4, grad=False)  # an allocator likes to give the same memory
    lab.head.remember(h, y)
    nn.functional.cross_entropy(lab.head(h), y).backward()
    lab.step_writes((h, y))


@pytest.mark.parametrize("other", ["loss", "targets", "graph", "not remembered"])
def test_what_waits_does_not_join_a_loss_that_is_explained(other: str) -> None:
    lab = Lab()
    lab.head.remember(*lab.batch(1, 2, grad=False))  # then the batch is skipped
    h, y = lab.batch(3, 4, grad=other == "graph")
    if other == "targets":
        with lab.head.targets(y):
            loss = nn.functional.cross_entropy(lab.head(h), y)
    elif other == "graph":
        lab.head.remember(h, y)
        loss = nn.functional.cross_entropy(lab.head(h), y)
    else:
        loss = lab.head.loss(h, y, remember=other == "loss")
    loss.backward()
    if other != "not remembered":
        lab.step_writes((h, y))


@pytest.mark.parametrize("second", ["head", "weight"])
def test_logits_for_a_metric_before_those_of_the_loss(second: str) -> None:
    lab = Lab()
    h, y = lab.batch(1, 2, grad=False)
    lab.head.remember(h, y)
    assert lab.head(h).argmax(-1).shape == (2,)
    logits = lab.head(h) if second == "head" else h @ lab.head.weight.T
    nn.functional.cross_entropy(logits, y).backward()
    (weight,) = lab.head.parameters()
    assert lab.head.weight is weight
    lab.step_writes((h, y))


def test_a_cleared_batch_does_not_come_back_with_a_weight_that_is_frozen() -> None:
    lab = Lab()
    lab.learn(1, 2)
    lab.optimizer.zero_grad()
    lab.head.weight.requires_grad_(False)
    lab.step_writes()
