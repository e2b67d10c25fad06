"""What the tests of the one-pass optimizers share: devices, a small model, batches, training."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hebbian_softmax import HebbianSoftmax, optim
from hebbian_softmax.optim import OnePassAdam, OnePassRMSprop
from hebbian_softmax.write.gpu import device as hardware
from tests.interpreter import interpreted

FEATURES, CLASSES = 6, 9
PAIRS = {
    "rmsprop": (OnePassRMSprop, torch.optim.RMSprop, {"lr": 0.02, "alpha": 0.9}),
    "rmsprop-decay": (OnePassRMSprop, torch.optim.RMSprop, {"lr": 0.02, "weight_decay": 0.1, "eps": 1e-5}),
    "adam": (OnePassAdam, torch.optim.Adam, {"lr": 0.01}),
    "adam-decay": (OnePassAdam, torch.optim.Adam, {"lr": 0.01, "betas": (0.0, 0.99), "weight_decay": 0.1}),
}
every_pair = pytest.mark.parametrize("name", PAIRS)
both = pytest.mark.parametrize("name", ["rmsprop", "adam"])


@pytest.fixture(
    params=["cpu", pytest.param("interpreted", marks=interpreted), pytest.param("cuda", marks=pytest.mark.gpu)]
)
def any_device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(optim, "_LARGE", 1)
    if request.param != "interpreted":
        return request.param
    monkeypatch.setattr(hardware, "on_gpu", lambda tensor: tensor.dtype != torch.float64)
    return "cpu"


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
