"""A rate or an objective that raises: the write has then changed nothing, and the next one works."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

from hebbian_softmax import HebbianSoftmax, PaperRate
from hebbian_softmax._triton import kernels_on_cpu
from tests.closeness import assert_states_as_close
from tests.heads import assert_same_bits, attached_head, copied_state, early_head, train
from tests.interpreter import interpreted, quiet
from tests.one_pass import ThreeWays, both
from tests.one_pass import train as train_model

pytestmark = quiet


class FaultError(Exception):
    """What the rates and objectives here raise."""


def raising(*args: Tensor) -> Tensor:
    raise FaultError


def of_wrong_shape(*args: Tensor) -> Tensor:
    return torch.zeros(3)


FAULTS: dict[str, tuple[str, Callable[..., Tensor]]] = {
    "rate": ("rate", raising),
    "rate's shape": ("rate", of_wrong_shape),
    "rate's values": ("rate", lambda counts, n: counts - 7.0),
    "objective": ("objective", raising),
    "objective's shape": ("objective", of_wrong_shape),
}


def batch_with_a_nan(head: HebbianSoftmax) -> tuple[Tensor, Tensor]:
    h = torch.randn(4, 4)
    h[3, 1] = torch.nan
    return h.to(head.weight.device), torch.tensor([1, 4, 1, 2]).to(head.weight.device)


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("scale", ["match", 1.0])
@pytest.mark.parametrize("seen", [0, 3])
def test_memorize_writes_all_or_nothing(fault: str, scale: float | str, seen: int) -> None:
    head, twin = (early_head(4, 6, gamma=0.3, limit=9, scale=scale) for _ in range(2))
    twin.load_state_dict(head.state_dict())
    for each in (head, twin):
        torch.manual_seed(1)
        for _ in range(seen):
            each.memorize(torch.randn(3, 4), torch.tensor([0, 1, 2]))
    h, y = batch_with_a_nan(head)
    before = copied_state(head)
    name, wrong = FAULTS[fault]
    right = getattr(head, name)
    setattr(head, name, wrong)
    with pytest.raises((FaultError, ValueError)):
        head.memorize(h, y)
    assert_same_bits(head.state_dict(), before)
    setattr(head, name, right)
    for each in (head, twin):
        each.memorize(h, y)
    assert_same_bits(head.state_dict(), twin.state_dict())


@pytest.mark.parametrize("fault", FAULTS)
def test_a_step_is_made_and_its_batch_is_not_written(fault: str) -> None:
    (head, optimizer), (twin, plain) = (attached_head(torch.optim.Adam) for _ in range(2))
    twin.load_state_dict(head.state_dict())
    torch.manual_seed(1)
    train(head, optimizer)
    torch.manual_seed(1)
    train(twin, plain)
    name, wrong = FAULTS[fault]
    right = getattr(head, name)
    setattr(head, name, wrong)
    torch.manual_seed(2)
    with pytest.raises((FaultError, ValueError)):
        train(head, optimizer)
    torch.manual_seed(2)
    plain.zero_grad()
    twin.loss(torch.randn(2, 4), torch.tensor([1, 2]), remember=False).backward()
    plain.step()
    assert_same_bits(head.state_dict(), twin.state_dict())
    setattr(head, name, right)
    for each, its_optimizer in ((head, optimizer), (twin, plain)):
        torch.manual_seed(3)
        train(each, its_optimizer)
    assert_same_bits(head.state_dict(), twin.state_dict())


@pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=interpreted), pytest.param("cuda", marks=pytest.mark.gpu)]
)
def test_the_kernels_write_all_or_nothing(device: str) -> None:
    with kernels_on_cpu() if device == "cpu" else nullcontext():
        head = early_head(4, 6, gamma=0.3, limit=9, device=device)
        head.memorize(torch.randn(3, 4, device=device), torch.tensor([0, 1, 2], device=device))
        before = copied_state(head)
        head.rate = raising
        with pytest.raises(FaultError):
            head.memorize(*batch_with_a_nan(head))
        assert_same_bits(head.state_dict(), before)


@both
@pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=interpreted), pytest.param("cuda", marks=pytest.mark.gpu)]
)
def test_a_one_pass_step_is_made_as_well(name: str, device: str) -> None:
    """As with torch's optimizers, the gradient step is made and the write is not."""
    with kernels_on_cpu() if device == "cpu" else nullcontext():
        ways = ThreeWays(name, device)
        ways.train(range(2))
        for net, optimizer in ways:
            net["head"].rate = raising
            with pytest.raises(FaultError):
                train_model(net, optimizer, range(2, 3))
            net["head"].rate = PaperRate(0.3, 7)
        assert_states_as_close(*(net.state_dict() for net in ways.nets))
        ways.train(range(3, 5))
        ways.check()
