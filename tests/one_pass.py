"""The set-up that tests of the one-pass optimizers share: devices, a small model, batches, training."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hebbian_softmax import HebbianSoftmax, OnePassAdam, OnePassRMSprop
from hebbian_softmax._triton import kernels_on_cpu
from tests.interpreter import interpreted

FEATURES, CLASSES = 6, 9


class SmallRMSprop(OnePassRMSprop):
    """Steps small parameters by kernels, too."""

    large = 1


class SmallAdam(OnePassAdam):
    """Steps small parameters by kernels, too."""

    large = 1


PAIRS = {
    "rmsprop": (SmallRMSprop, torch.optim.RMSprop, {"lr": 0.02, "alpha": 0.9}),
    "rmsprop-decay": (SmallRMSprop, torch.optim.RMSprop, {"lr": 0.02, "weight_decay": 0.1, "eps": 1e-5}),
    "adam": (SmallAdam, torch.optim.Adam, {"lr": 0.01}),
    "adam-decay": (SmallAdam, torch.optim.Adam, {"lr": 0.01, "betas": (0.0, 0.99), "weight_decay": 0.1}),
}
every_pair = pytest.mark.parametrize("name", PAIRS)
both = pytest.mark.parametrize("name", ["rmsprop", "adam"])


@pytest.fixture(
    params=["cpu", pytest.param("interpreted", marks=interpreted), pytest.param("cuda", marks=pytest.mark.gpu)]
)
def any_device(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param != "interpreted":
        yield request.param
        return
    with kernels_on_cpu():
        yield "cpu"


def model(device: str, **options: Any) -> nn.ModuleDict:
    torch.manual_seed(0)
    head = HebbianSoftmax(FEATURES, CLASSES, **({"gamma": 0.3, "limit": 7} | options))
    return nn.ModuleDict({"net": nn.Linear(4, FEATURES), "head": head}).to(device)


def batch(number: int, device: str, n: int = 8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(n, 4, generator=generator)
    y = (torch.rand(n, generator=generator) ** 2 * CLASSES).long()
    return x.to(device), y.to(device)


def train(net: nn.ModuleDict, optimizer: torch.optim.Optimizer, numbers: range, **how: Any) -> None:
    device = net["head"].weight.device
    for number in numbers:
        optimizer.zero_grad(set_to_none=how.get("to_none", True))
        for part in range(how.get("parts", 1)):
            x, y = batch(100 * part + number, str(device))
            net["head"].loss(net["net"](x), y).backward()
        if how.get("clip"):
            nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        optimizer.step()
