"""The bfloat16 copy of the weight: always the weight, used by the loss, in nobody's way."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor, nn

from hebbian_softmax import HebbianSoftmax, OnePassAdam
from tests.interpreter import quiet
from tests.one_pass import FEATURES, SmallRMSprop, any_device, batch, model, train

pytestmark = quiet
device = any_device


@pytest.mark.parametrize("change", ["nothing", "in place", "load", "grow", "memorize"])
def test_the_copy_is_the_weight(change: str, device: str, request: pytest.FixtureRequest) -> None:
    net = model(device)
    head = net["head"]
    optimizer = SmallRMSprop(net.parameters(), head=head)
    train(net, optimizer, range(2))
    copied = head.low_precision.of(head.weight)
    if change == "in place":
        with torch.no_grad():
            head.weight.mul_(2)
    elif change == "load":
        head.load_state_dict(model(device)["head"].state_dict())
    elif change == "grow":
        head.add_classes(3)
    elif change == "memorize":
        head.memorize(torch.randn(2, FEATURES, device=device), torch.tensor([1, 2], device=device))
    again = head.low_precision.of(head.weight)
    assert again.dtype == torch.bfloat16
    if "interpreted" not in request.node.name:  # which rounds towards 0
        assert torch.equal(again, head.weight.detach().bfloat16())
    torch.testing.assert_close(again.float(), head.weight.detach(), rtol=2**-7, atol=0)
    assert (again is copied) == (change != "grow")
    assert not any("precision" in key for key in head.state_dict())
    assert copy.deepcopy(head).low_precision is None


def test_the_loss_uses_the_copy(device: str) -> None:
    """For bfloat16 activations; the gradient goes to the weight itself."""
    net = model(device)
    head = net["head"]
    h, y = torch.randn(8, FEATURES, device=device), batch(0, device)[1]
    optimizer = SmallRMSprop(net.parameters(), head=head)
    head.low_precision.of(head.weight).zero_()  # to be recognised: all classes are then equally likely
    alike = math.log(head.num_classes)
    assert head.loss(h, y).item() != pytest.approx(alike)
    loss = head.loss(h.bfloat16(), y)
    assert loss.dtype == torch.float32
    with torch.autocast(device, torch.bfloat16):
        under_autocast = head.loss(h, y)
    for each in (loss, under_autocast):
        assert each.item() == pytest.approx(alike)
        each.backward()
    assert head.weight.grad.dtype == torch.float32
    optimizer.step()
    assert int(head.counts.sum()) == 16


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_an_evaluation_in_inference_mode_may_come_first(reduction: str, device: str) -> None:
    net = model(device)
    head, optimizer = net["head"], SmallRMSprop(net.parameters(), head=net["head"])
    h, y = torch.randn(8, FEATURES, device=device, dtype=torch.bfloat16), batch(0, device)[1]
    with torch.inference_mode():
        head.loss(h, y)
    for _ in range(2):
        head.loss(h, y, reduction=reduction).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert int(head.counts.sum()) == 16


def test_the_copy_is_not_for_functional_transforms() -> None:
    net = model("cpu")
    calls, h, y = Calls(net["head"]), torch.randn(8, FEATURES), batch(0, "cpu")[1]
    SmallRMSprop(net.parameters(), head=net["head"])

    def loss(weight: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return torch.func.functional_call(calls, {"head.weight": weight}, (h, y))

    assert torch.func.grad(loss)(net["head"].weight.detach()).isfinite().all()


class Calls(nn.Module):
    """A model whose forward pass is the head's loss."""

    def __init__(self, head: HebbianSoftmax) -> None:
        super().__init__()
        self.head = head

    def forward(self, h: Tensor, targets: Tensor) -> Tensor:
        return self.head.loss(h, targets, remember=False)


def test_the_copy_of_a_weight_that_changes_its_layout(device: str) -> None:
    net = model(device)
    head = net["head"]
    head.weight.data = head.weight.data.mT.contiguous().mT
    optimizer = SmallRMSprop(net.parameters(), head=head)
    head.low_precision.of(head.weight)
    head.weight.data = head.weight.data.contiguous()
    train(net, optimizer, range(1))
    torch.testing.assert_close(head.low_precision.of(head.weight).float(), head.weight.detach(), rtol=2**-7, atol=0)


def test_bfloat16_weights_have_no_copy(device: str) -> None:
    net = model(device).bfloat16()
    optimizer = OnePassAdam(net.parameters(), head=net["head"])
    assert net["head"].low_precision is None
    x, y = batch(0, device)
    net["head"].loss(net["net"](x.bfloat16()), y).backward()
    optimizer.step()
    assert int(net["head"].counts.sum()) == 8
