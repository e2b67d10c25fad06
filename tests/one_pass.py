"""The set-up that tests of the one-pass optimizers share: devices, a small model, batches, training."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hebbian_softmax import OnePassAdam, OnePassRMSprop
from hebbian_softmax._triton import kernels_on_cpu
from tests.closeness import assert_states_as_close
from tests.heads import early_head
from tests.interpreter import interpreted

FEATURES, CLASSES = 6, 9


class SmallRMSprop(OnePassRMSprop):
    """Steps small parameters by kernels, too."""

    large = 1


class SmallAdam(OnePassAdam):
    """Steps small parameters by kernels, too."""

    large = 1


# A step divides the gradient by its own root mean square plus ε: a small ε makes steps out of rounding errors.
PAIRS = {
    "rmsprop": (SmallRMSprop, torch.optim.RMSprop, {"lr": 0.02, "alpha": 0.9, "eps": 1e-3}),
    "rmsprop-decay": (SmallRMSprop, torch.optim.RMSprop, {"lr": 0.02, "weight_decay": 0.1, "eps": 1e-3}),
    "adam": (SmallAdam, torch.optim.Adam, {"lr": 0.01, "eps": 1e-3}),
    "adam-decay": (SmallAdam, torch.optim.Adam, {"lr": 0.01, "betas": (0.0, 0.99), "weight_decay": 0.1, "eps": 1e-3}),
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
    head = early_head(FEATURES, CLASSES, **({"gamma": 0.3, "limit": 7} | options))
    return nn.ModuleDict({"net": nn.Linear(4, FEATURES), "head": head}).to(device)


def batch(number: int, device: str, n: int = 8, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(n, 4, generator=generator)
    y = (torch.rand(n, generator=generator) ** 2 * CLASSES).long()
    return x.to(device, dtype), y.to(device)


def train(net: nn.ModuleDict, optimizer: torch.optim.Optimizer, numbers: range, **how: Any) -> None:
    weight = net["head"].weight
    for number in numbers:
        optimizer.zero_grad(set_to_none=how.get("to_none", True))
        for part in range(how.get("parts", 1)):
            x, y = batch(100 * part + number, str(weight.device), dtype=weight.dtype)
            net["head"].loss(net["net"](x), y, remember=how.get("remember", True)).backward()
        if how.get("clip"):
            nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        optimizer.step()


class ThreeWays:
    """One training done three times: by a one-pass optimizer, by torch's, and by torch's in float64.

    The head is given to the one-pass optimizer, and attached to the others.
    """

    def __init__(self, name: str, device: str, **options: Any) -> None:
        ours, theirs, settings = PAIRS[name]
        self.nets = [model(device, **options), model(device, **options), model(device, **options).double()]
        self.found = self.nets[0]
        self.optimizers = [
            ours(self.nets[0].parameters(), **settings, head=self.nets[0]["head"]),
            *(theirs(net.parameters(), **settings) for net in self.nets[1:]),
        ]
        for net, optimizer in zip(self.nets, self.optimizers, strict=True):
            net["head"].attach(optimizer)

    def __iter__(self) -> Iterator[tuple[nn.ModuleDict, torch.optim.Optimizer]]:
        """Iterate over the models and their optimizers; the trusted ones do not use kernels in the interpreter."""
        yield self.nets[0], self.optimizers[0]
        with kernels_on_cpu(False):
            yield self.nets[1], self.optimizers[1]
            yield self.nets[2], self.optimizers[2]

    def train(self, numbers: range, **how: Any) -> None:
        for net, optimizer in self:
            train(net, optimizer, numbers, **how)

    def check(self) -> None:
        """Check that the one-pass optimizer is as close to float64 as torch's."""
        assert_states_as_close(*(net.state_dict() for net in self.nets))
        assert int(self.found["head"].counts.sum()) == int(self.nets[2]["head"].counts.sum())
