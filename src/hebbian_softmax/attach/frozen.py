"""Activations that no graph has made, such as frozen features: noticing when their gradient would reach the head."""

from __future__ import annotations

import weakref
from collections import deque

import torch
from torch import Tensor

from hebbian_softmax import _torch
from hebbian_softmax.attach.activations import Activations
from hebbian_softmax.attach.pending import Pending

Key = tuple[int, int, int]


class FrozenInputs:
    """The link between ``remember(h, targets)`` and ``head(h)`` for an h without a backward pass of its own.

    The head's outputs stand in for such an h: when the gradient of an output comes, the activations that were
    remembered from the same memory become pending. The two calls may come in any order.
    """

    _UNCLAIMED = 64
    """Calls of remember() that are kept while no head(h) follows."""

    def __init__(self, pending: Pending) -> None:
        self._pending = pending
        self.unclaimed: deque[tuple[Key, Activations]] = deque(maxlen=self._UNCLAIMED)
        """What was remembered from memory that the head has not been called with."""
        self._outputs: list[weakref.ref[_Output]] = []

    def remember(self, h: Tensor, activations: Activations) -> None:
        """Let the gradient of ``head(h)``, called before or after this, make the activations pending."""
        key = _key(h)
        outputs = [output for output in self._live() if output.key == key]
        for output in outputs:
            output.waiting.append(activations)
        if not outputs and key is not None:
            self.unclaimed.append((key, activations))

    def seen(self, h: Tensor, logits: Tensor) -> None:
        """Note that the head was called with h and returned ``logits``."""
        key = _key(h)
        if key is None:
            return
        output = _Output(key)
        for twin in self._live():
            if twin.key == key:
                output.waiting = twin.waiting  # the gradient of either output counts
        output.waiting += [activations for claimed, activations in self.unclaimed if claimed == key]
        self.unclaimed = deque((item for item in self.unclaimed if item[0] != key), maxlen=self._UNCLAIMED)
        logits.register_hook(lambda _: self._reach(output))  # the graph owns the output
        self._outputs = [weakref.ref(each) for each in (output, *self._live())]

    def weight_gradient(self) -> None:
        """Note that a gradient comes to the weight: if no other call explains it, then remember() without head(h)."""
        if self._pending.is_arriving():
            return
        for _key_of_h, activations in self.unclaimed:
            self._pending.reach(activations)
        self.unclaimed.clear()

    def clear(self) -> None:
        """Forget everything."""
        self.unclaimed.clear()
        self._outputs = []

    def _reach(self, output: _Output) -> None:
        for activations in output.waiting:
            self._pending.reach(activations)
        output.waiting.clear()

    def _live(self) -> list[_Output]:
        return [output for reference in self._outputs if (output := reference()) is not None]


class _Output:
    """An output of the head, and the activations that its gradient makes pending."""

    def __init__(self, key: Key) -> None:
        self.key = key
        self.waiting: list[Activations] = []


def _key(h: Tensor) -> Key | None:
    """Return the memory of h and its version; None for tensors that have neither (sparse ones, those of torch.func)."""
    if _torch.is_transforming() or h.layout != torch.strided:
        return None
    return h.data_ptr(), h.numel(), 0 if h.is_inference() else _torch.version(h)
