"""A head beside the oracle, which together tell exactly which activations a step has written."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.heads import early_head
from tests.oracle import Oracle

FEATURES, CLASSES = 4, 6
TO_NONE = pytest.mark.parametrize("to_none", [True, False], ids=["to-none", "in-place"])


class Lab:
    """A head, its optimizer, and the oracle's rows beside it."""

    def __init__(self, lr: float = 0.1, frozen: bool = False, **options: object) -> None:
        settings = {"gamma": 0.3, "limit": 100, "write": "literal", "dtype": torch.float64} | options
        self.head = early_head(FEATURES, CLASSES, **settings)
        self.head.weight.requires_grad_(not frozen)
        self.model = nn.Sequential(nn.Linear(3, FEATURES).double(), self.head)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=lr)
        self.handle = self.head.attach(self.optimizer)
        self.oracle = Oracle(CLASSES, 0.3, 100)

    def batch(self, *labels: int, grad: bool = True) -> tuple[Tensor, Tensor]:
        x = torch.randn(len(labels), 3, dtype=torch.float64)
        h = self.model[0](x)
        return (h if grad else h.detach()), torch.tensor(labels)

    def learn(self, *labels: int, grad: bool = True) -> tuple[Tensor, Tensor]:
        """Backpropagate the loss of a batch, and return the batch."""
        batch = self.batch(*labels, grad=grad)
        self.head.loss(*batch).backward()
        return batch

    def step_writes(self, *batches: tuple[Tensor, Tensor], step: bool = True) -> None:
        """Step, and check that just these batches, as one, were written on top of the gradient step."""
        before = self.head.weight.detach().clone()
        grad = self.head.weight.grad
        after_step = before if grad is None else before - self.optimizer.param_groups[0]["lr"] * grad
        if step:
            self.optimizer.step()
        expected = after_step
        if batches:
            h = torch.cat([h.detach() for h, _ in batches])
            expected = self.oracle.update(after_step, h, torch.cat([y for _, y in batches]))
        torch.testing.assert_close(self.head.weight.detach(), expected, rtol=1e-12, atol=1e-12)
        assert self.head.counts.tolist() == self.oracle.counts
        assert len(self.handle.pending) == 0
