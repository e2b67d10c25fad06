"""Noticing that the gradient of a loss has reached the head, which is when its activations become pending."""

from __future__ import annotations

import weakref
from collections import deque
from typing import Any

import torch
from torch import Tensor

from hebbian_softmax.growth import OUTGROWN
from hebbian_softmax.pending import Activations, Pending


def watch_loss(loss: Tensor, h: Tensor, targets: Tensor, pending: Pending) -> Tensor:
    """``loss``, such that its backward makes the activations pending."""
    if not loss.requires_grad:
        return loss
    watched: Tensor = _Watch.apply(loss, h, targets, pending)
    return watched


class _Watch(torch.autograd.Function):
    """The identity. Its saved activations live and die with the loss's graph, so a loss nobody uses costs nothing."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, h: Tensor, targets: Tensor, pending: Pending) -> Tensor:
        ctx.save_for_backward(h, targets)
        ctx.pending = pending
        ctx.classes = pending.parameter.shape[0]
        ctx.reached = False
        return loss.clone()  # a view could not be changed in place, and `loss /= steps` is common

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.classes != ctx.pending.parameter.shape[0]:
            raise RuntimeError(OUTGROWN)
        if not ctx.reached:
            ctx.reached = True
            h, targets = ctx.saved_tensors
            ctx.pending.reach(Activations(h.detach(), targets))
        return grads[0], None, None, None


class FrozenInputs:
    """Links ``remember(h, targets)`` to ``head(h)`` where h takes no gradient and so has no backward of its own.

    The head's output then stands in for h: when its gradient comes, what was remembered of the same memory becomes
    pending. The two calls may come in either order.
    """

    _UNCLAIMED = 64
    """Calls of remember() kept while no head(h) follows."""

    def __init__(self, pending: Pending) -> None:
        self._pending = pending
        self._unclaimed: deque[tuple[tuple[int, int], Activations]] = deque(maxlen=self._UNCLAIMED)
        self._outputs: list[weakref.ref[_Output]] = []

    def remember(self, h: Tensor, activations: Activations) -> None:
        output = next((output for output in self._live() if output.key == _key(h)), None)
        if output is not None:
            output.waiting.append(activations)
        else:
            self._unclaimed.append((_key(h), activations))

    def seen(self, h: Tensor, logits: Tensor) -> None:
        """The head was called with h."""
        output = _Output(_key(h))
        output.waiting = [activations for key, activations in self._unclaimed if key == output.key]
        self._unclaimed = deque((item for item in self._unclaimed if item[0] != output.key), maxlen=self._UNCLAIMED)
        logits.register_hook(lambda _: self._reach(output))  # the graph owns the output
        self._outputs = [weakref.ref(each) for each in self._live()]
        self._outputs.insert(0, weakref.ref(output))

    def weight_gradient(self) -> None:
        """A gradient came to the weight without a call of the head: it is that of every remember() without one."""
        for _key_of_h, activations in self._unclaimed:
            self._pending.reach(activations)
        self._unclaimed.clear()

    def _reach(self, output: _Output) -> None:
        for activations in output.waiting:
            self._pending.reach(activations)
        output.waiting = []

    def _live(self) -> list[_Output]:
        return [output for reference in self._outputs if (output := reference()) is not None]


class _Output:
    def __init__(self, key: tuple[int, int]) -> None:
        self.key = key
        self.waiting: list[Activations] = []


def _key(h: Tensor) -> tuple[int, int]:
    return h.data_ptr(), h.numel()
