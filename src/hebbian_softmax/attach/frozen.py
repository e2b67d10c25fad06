"""Activations that no graph has made, such as frozen features: noticing when their gradient would reach the head."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hebbian_softmax import _torch
from hebbian_softmax.attach.pending import Pending
from hebbian_softmax.write.activations import Activations

Key = tuple[int, int, int]


class FrozenInputs:
    """The link between ``remember(h, targets)`` and the loss, for an h without a backward pass of its own.

    Something else must stand in for such an h:

    - If the head is called with h, before or after ``remember``, the output's gradient makes the activations pending.
    - If not, the user computes logits from ``head.weight``. From ``remember`` to the next gradient, a look at that
      attribute returns an alias of the weight, and the gradient of the alias makes pending what was remembered shortly
      before. So a loss that is never backpropagated memorises nothing.
    - If neither was used (the weight was taken from elsewhere, say a tied embedding), the next gradient of the weight
      that nothing else explains makes all such activations pending.
    """

    def __init__(self, pending: Pending) -> None:
        self._pending = pending
        self.unclaimed: list[_Unclaimed] = []
        """Activations that were remembered from memory with which the head has not been called."""
        self.waits = False
        """Whether anything was remembered and not claimed."""
        self._has_alias = False
        """Whether an alias of the weight stands for what is unclaimed."""
        self._gives_aliases = False
        """Whether the weight is looked at to compute a loss: between remember() and the next gradient."""
        self._outputs: list[weakref.ref[_Output]] = []

    def remember(self, h: Tensor, activations: Activations) -> None:
        """Let the gradient of ``head(h)``, called before or after this, make the activations pending."""
        key = _key(h)
        outputs = [output for output in self._live() if output.key == key]
        for output in outputs:
            output.waiting.append(activations)
        if not outputs and key is not None:
            self._leave_to_aliases()
            self.unclaimed.append(_Unclaimed(key, h.detach(), activations))
            self.waits = self._gives_aliases = True

    def knows(self, h: Tensor) -> bool:
        """Return whether this h was remembered: then the output of ``head(h)`` stands in for it, and no alias."""
        return any(item.key == _key(h) for item in self.unclaimed)

    def seen(self, h: Tensor, logits: Tensor) -> None:
        """Note that the head was called with h and returned ``logits``."""
        key = _key(h)
        if key is None:
            return
        output = _Output(key, h.detach())
        for twin in self._live():
            if twin.key == key:
                output.waiting = twin.waiting  # the gradient of either output counts
        for item in [item for item in self.unclaimed if item.key == key]:
            output.waiting.append(item.activations)
            self.unclaimed.remove(item)
        logits.register_hook(lambda _: self._reach(output))  # the graph owns the output
        self._outputs = [weakref.ref(each) for each in (output, *self._live())]

    def alias(self, weight: Tensor) -> Tensor:
        """Return ``weight`` as a tensor whose gradient makes pending what is unclaimed now, or ``weight`` itself."""
        if not self._gives_aliases or not weight.requires_grad or not torch.is_grad_enabled():
            return weight
        if _torch.is_transforming() or _torch.is_sharded(weight):
            return weight
        alias, unclaimed = _WeightAlias.of(weight), self.unclaimed
        alias.register_hook(lambda _: self._reach_all(unclaimed))  # the list of now: see _leave_to_aliases
        self._has_alias = True
        return alias

    def weight_gradient(self) -> None:
        """Note that a gradient comes to the weight: if no other call explains it, then remember() without head(h)."""
        self._gives_aliases = False
        if self._pending.is_arriving():
            self._leave_to_aliases()
            return
        self._reach_all(self.unclaimed)
        self.clear_unclaimed()

    def clear_unclaimed(self) -> None:
        """Forget what was remembered and not claimed; aliases and outputs keep what they stand for."""
        self.unclaimed = []
        self.waits = self._has_alias = self._gives_aliases = False

    def clear(self) -> None:
        """Forget everything."""
        self.clear_unclaimed()
        self._outputs = []

    def _leave_to_aliases(self) -> None:
        """Let only the aliases that exist make pending what they stand for; later ones stand for later calls."""
        if self._has_alias:
            self.unclaimed, self._has_alias = [], False

    def _reach_all(self, items: list[_Unclaimed]) -> None:
        for item in items:
            self._pending.reach(item.activations)

    def _reach(self, output: _Output) -> None:
        for activations in output.waiting:
            self._pending.reach(activations)  # stays: a later pass counts if this one is cleared or fails

    def _live(self) -> list[_Output]:
        return [output for reference in self._outputs if (output := reference()) is not None]


class _WeightAlias(Tensor):
    """A weight with a node of its own in the graph; like a parameter, it shows the gradient of the weight."""

    __torch_function__ = _torch.RESULTS_ARE_PLAIN_TENSORS
    _is_param = True  # isinstance(alias, nn.Parameter) asks for this attribute
    _weight: Tensor

    @classmethod
    def of(cls, weight: Tensor) -> _WeightAlias:
        """Return an alias of ``weight``."""
        alias = weight.as_subclass(cls)
        alias._weight = weight
        return alias

    @property
    def grad(self) -> Tensor | None:
        return self._weight.grad

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        self._weight.grad = value


@dataclass(eq=False)
class _Unclaimed:
    key: Key
    h: Tensor
    """Keeps the memory, so that the key stays its own."""
    activations: Activations


@dataclass(eq=False)
class _Output:
    """An output of the head, and the activations that its gradient makes pending."""

    key: Key
    h: Tensor
    waiting: list[Activations] = field(default_factory=list)


def _key(h: Tensor) -> Key | None:
    """Return the memory of h and its version; None for tensors that have neither (sparse ones, those of torch.func)."""
    if _torch.is_transforming() or h.layout != torch.strided:
        return None
    return h.data_ptr(), h.numel(), 0 if h.is_inference() else _torch.version(h)
