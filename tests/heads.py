"""Small attached heads, and comparisons of their states, as many tests need them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hebbian_softmax import HebbianSoftmax


def early_head(features: int, classes: int, **options: Any) -> HebbianSoftmax:
    """Return a head that is centred and writes fully from the first step on, so that few steps show what it does."""
    return HebbianSoftmax(features, classes, **({"write": "centred", "start": 0, "fade": False} | options))


def attached_head(
    kind: Callable[..., torch.optim.Optimizer] = torch.optim.SGD, lr: float = 0.1, classes: int = 6, **options: Any
) -> tuple[HebbianSoftmax, torch.optim.Optimizer]:
    """Return a head of 4 features, and the optimizer that it is attached to."""
    head = early_head(4, classes, **({"gamma": 0.3, "limit": 9} | options))
    optimizer = kind(head.parameters(), lr=lr)
    head.attach(optimizer)
    return head, optimizer


def train(head: HebbianSoftmax, optimizer: torch.optim.Optimizer, labels: tuple[int, ...] = (1, 2)) -> None:
    """Make one step on random activations of these classes."""
    optimizer.zero_grad()
    like: Any = {"dtype": head.weight.dtype, "device": head.weight.device}
    head.loss(torch.randn(len(labels), head.in_features, **like), torch.tensor(labels).to(like["device"])).backward()
    optimizer.step()


def copied_state(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in module.state_dict().items()}


def assert_same_bits(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


@contextmanager
def unchanged(module: nn.Module) -> Iterator[None]:
    """Check that nothing in the state of ``module`` changes."""
    before = copied_state(module)
    yield
    assert_same_bits(module.state_dict(), before)
