"""Noticing that the gradient of a loss has reached the head, which is when its activations become pending."""

from __future__ import annotations

import weakref
from collections import deque
from typing import Any

import torch
from torch import Tensor

from hebbian_softmax.attach.activations import Activations, Call
from hebbian_softmax.attach.pending import Pending
from hebbian_softmax.growth import OUTGROWN


def watch_loss(loss: Tensor, h: Tensor, targets: Tensor, pending: Pending) -> Tensor:
    """``loss``, such that its backward makes the activations pending."""
    if not loss.requires_grad or torch._C._are_functorch_transforms_active():
        return loss  # torch.func differentiates copies, which no optimizer steps
    watched: Tensor = _Watch.apply(loss, h, targets, pending)
    return watched


class _Watch(torch.autograd.Function):
    """The identity. Its saved activations live and die with the loss's graph, so a loss nobody uses costs nothing."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, h: Tensor, targets: Tensor, pending: Pending) -> Tensor:
        ctx.save_for_backward(h, targets)
        ctx.pending = pending
        ctx.classes = pending.parameter.shape[0]
        ctx.call = Call()
        return loss.clone()  # a view could not be changed in place, and `loss /= steps` is common

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.classes != ctx.pending.parameter.shape[0]:
            raise RuntimeError(OUTGROWN)
        ctx.pending.drop_cleared()
        if not ctx.call.counted:
            h, targets = ctx.saved_tensors
            ctx.pending.reach(ctx.pending.copy(h, targets, ctx.call))
        return grads[0], None, None, None


Key = tuple[int, int, int]


class FrozenInputs:
    """Links ``remember(h, targets)`` to ``head(h)`` where h has no backward of its own: frozen features, leaves.

    The head's outputs then stand in for h: when the gradient of one comes, what was remembered of the same memory
    becomes pending. The calls may come in any order.
    """

    _UNCLAIMED = 64
    """Calls of remember() kept while no head(h) follows."""

    def __init__(self, pending: Pending) -> None:
        self._pending = pending
        self._unclaimed: deque[tuple[Key, Activations]] = deque(maxlen=self._UNCLAIMED)
        self._outputs: list[weakref.ref[_Output]] = []

    def remember(self, h: Tensor, activations: Activations) -> None:
        key = _key(h)
        outputs = [output for output in self._live() if output.key == key]
        for output in outputs:
            output.waiting.append(activations)
        if not outputs and key is not None:
            self._unclaimed.append((key, activations))

    def seen(self, h: Tensor, logits: Tensor) -> None:
        """The head was called with h."""
        key = _key(h)
        if key is None:
            return
        output = _Output(key)
        for twin in self._live():
            if twin.key == key:
                output.waiting = twin.waiting  # either output's gradient is that of the call
        output.waiting += [activations for claimed, activations in self._unclaimed if claimed == key]
        self._unclaimed = deque((item for item in self._unclaimed if item[0] != key), maxlen=self._UNCLAIMED)
        logits.register_hook(lambda _: self._reach(output))  # the graph owns the output
        self._outputs = [weakref.ref(each) for each in (output, *self._live())]

    def weight_gradient(self) -> None:
        """A gradient comes to the weight. If no other call explains it, it is that of remember() without head(h)."""
        if self._pending.is_arriving():
            return
        for _key_of_h, activations in self._unclaimed:
            self._pending.reach(activations)
        self._unclaimed.clear()

    def clear(self) -> None:
        self._unclaimed.clear()
        self._outputs = []

    def _reach(self, output: _Output) -> None:
        for activations in output.waiting:
            self._pending.reach(activations)
        output.waiting.clear()

    def _live(self) -> list[_Output]:
        return [output for reference in self._outputs if (output := reference()) is not None]


class _Output:
    def __init__(self, key: Key) -> None:
        self.key = key
        self.waiting: list[Activations] = []


def _key(h: Tensor) -> Key | None:
    """The memory of h and its version; None where there is no such thing (sparse tensors, torch.func)."""
    if torch._C._are_functorch_transforms_active() or h.layout != torch.strided:
        return None
    return h.data_ptr(), h.numel(), 0 if h.is_inference() else h._version
