"""Activations are forgotten with the gradient they belong to, when it is cleared and only then."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.attach.pending_lab import TO_NONE, Lab


@TO_NONE
@pytest.mark.parametrize("when", ["before the loss", "between loss and backward", "after the step"])
def test_zero_grad_at_a_harmless_time(to_none: bool, when: str) -> None:
    lab = Lab()

    def zero_grad(now: str) -> None:
        if now == when:
            lab.optimizer.zero_grad(set_to_none=to_none)

    for labels in ((1, 2), (2, 3)):
        zero_grad("before the loss")
        batch = lab.batch(*labels)
        loss = lab.head.loss(*batch)
        zero_grad("between loss and backward")
        loss.backward()
        lab.step_writes(batch)
        zero_grad("after the step")


@TO_NONE
@pytest.mark.parametrize("whose", ["optimizer", "model", "by hand"])
def test_zero_grad_between_backward_and_step_drops_the_batch(to_none: bool, whose: str) -> None:
    lab = Lab()
    lab.learn(1, 2)
    clear(lab, to_none, whose)
    lab.step_writes()
    lab.step_writes(lab.learn(3))


@TO_NONE
@pytest.mark.parametrize("whose", ["optimizer", "model", "by hand"])
@pytest.mark.parametrize("then", ["loss", "remember", "not remembered", "plain"])
def test_a_batch_whose_gradient_was_cleared_does_not_join_the_next(to_none: bool, whose: str, then: str) -> None:
    lab = Lab()
    lab.learn(1, 2)
    clear(lab, to_none, whose)
    h, y = lab.batch(3, 3, 4)
    if then == "loss":
        lab.head.loss(h, y).backward()
    elif then == "not remembered":
        lab.head.loss(h, y, remember=False).backward()
    else:
        if then == "remember":
            lab.head.remember(h, y)
        nn.functional.cross_entropy(lab.head(h), y).backward()
    lab.step_writes(*([(h, y)] if then in ("loss", "remember") else []))


def clear(lab: Lab, to_none: bool, whose: str) -> None:
    if whose == "optimizer":
        lab.optimizer.zero_grad(set_to_none=to_none)
    elif whose == "model":
        lab.model.zero_grad(set_to_none=to_none)
    elif to_none:
        lab.head.weight.grad = None
    else:
        lab.head.weight.grad.zero_()


def test_clipping_and_scaling_the_gradient_keep_what_is_pending() -> None:
    lab = Lab()
    batch = lab.learn(1, 2)
    nn.utils.clip_grad_norm_(lab.model.parameters(), 1e-3)
    lab.step_writes(batch)
    lab.optimizer.zero_grad()
    batch = lab.learn(2, 4)
    lab.head.weight.grad = lab.head.weight.grad * 0.5
    lab.step_writes(batch)


def test_a_saturated_gradient_is_not_a_cleared_one() -> None:
    """Probability 1 for the target: its row gets no gradient, others get tiny ones, and the batch still counts."""
    lab = Lab(lr=0.0)
    with torch.no_grad():
        lab.head.weight.zero_()
        lab.head.weight[2, 0] = 50.0
    h = torch.tensor([[1.0, 0, 0, 0]], dtype=torch.float64)
    lab.head.loss(h, torch.tensor([2])).backward()
    assert float(lab.head.weight.grad[2].abs().max()) < 1e-15
    nn.utils.clip_grad_norm_(lab.head.parameters(), 1.0)
    lab.step_writes((h, torch.tensor([2])))


def test_backward_again_after_its_gradient_was_cleared() -> None:
    lab = Lab()
    batch = lab.batch(2, grad=False)
    loss = lab.head.loss(*batch)
    loss.backward(retain_graph=True)
    lab.optimizer.zero_grad()
    loss.backward(retain_graph=True)
    lab.step_writes(batch)
    lab.optimizer.zero_grad()
    loss.backward()  # written once already
    lab.step_writes()
