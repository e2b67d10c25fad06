"""Activations that no graph has made, such as frozen features: noticing when their gradient would reach the head."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hebbian_softmax import _torch
from hebbian_softmax.attach.pending import Pending
from hebbian_softmax.write.activations import Activations

Key = tuple[int, int, int]


class FrozenInputs:
    """The link between ``remember(h, targets)`` and the loss, for an h without a backward pass of its own.

    The logits stand in for such an h: their gradient makes the activations pending, so a loss that is never
    backpropagated memorises nothing. They are recognised in this order:

    - They are the output of ``head(h)``, called before or after ``remember``.
    - They are computed from h and ``head.weight``, which is a :class:`WeightInUse` while something waits.
    - The same with a tensor of the shape of h in place of h, such as h after dropout.
    - The weight was taken from elsewhere, such as a tied embedding. Then the next gradient of the weight that nothing
      else explains makes pending all that waits.
    """

    def __init__(self, pending: Pending) -> None:
        self._pending = pending
        self.waiting: list[_Waiting] = []
        """What was remembered since the last step and had no logits then."""
        self.waits = False
        """Whether any of it may still get logits from ``head.weight``."""
        self._outputs: list[weakref.ref[_Output]] = []

    def remember(self, h: Tensor, activations: Activations) -> None:
        """Let the gradient of the logits of h, computed before or after this, make the activations pending."""
        key = _key(h)
        outputs = [output for output in self._live() if output.key == key]
        for output in outputs:
            output.waiting.append(activations)
        if not outputs and key is not None:
            self.waiting.append(_Waiting(key, h.detach(), activations))
            self.waits = True

    def computed(self, logits: Tensor, h: Tensor, exact: bool = False) -> None:
        """Note that ``logits`` were computed from the weight and from h; with ``exact`` h stands for itself only."""
        key = _key(h)
        if key is None or not logits.requires_grad:
            return
        claimed = [item for item in self.waiting if item.key == key]
        if not claimed and not exact:
            claimed = [item for item in self.waiting if not item.has_logits and item.h.shape == h.shape][-1:]
        for item in claimed:  # which stay: the first logits may be for a metric
            item.has_logits = True
        output = _Output(key, h.detach(), [item.activations for item in claimed])
        for twin in self._live():
            if twin.key == key:
                output.waiting += [each for each in twin.waiting if each not in output.waiting]
                twin.waiting = output.waiting  # the gradient of either output counts
        logits.register_hook(lambda _: self._reach(output))  # the graph owns the output
        self._outputs = [weakref.ref(each) for each in (output, *self._live())]

    def in_use(self, weight: Tensor) -> Tensor:
        """Return what ``head.weight`` is now: a :class:`WeightInUse` while something waits for its logits."""
        plain = not self.waits or _torch.is_transforming() or _torch.is_sharded(weight) or not torch.is_grad_enabled()
        return weight if plain else WeightInUse.of(weight, self)

    def weight_gradient(self) -> None:
        """Note that a gradient comes to the weight: if no call explains it by the end of the pass, what waits does."""
        _torch.call_after_backward(self._explain_gradient)

    def _explain_gradient(self) -> None:
        without = [item for item in self.waiting if not item.has_logits]
        if not self._pending.is_arriving():
            for item in without:
                self._pending.reach(item.activations)
            self.waiting = [item for item in self.waiting if item.has_logits]
            without = []
        self.waits = bool(without)

    def forget_waiting(self) -> None:
        """Forget what was remembered; its logits keep what they stand for."""
        self.waiting, self.waits = [], False

    def clear(self) -> None:
        """Forget everything."""
        self.forget_waiting()
        self._outputs = []

    def _reach(self, output: _Output) -> None:
        for activations in output.waiting:
            self._pending.reach(activations)  # stays: a later pass counts if this one is cleared or fails

    def _live(self) -> list[_Output]:
        return [output for reference in self._outputs if (output := reference()) is not None]


class WeightInUse(Tensor):
    """What ``head.weight`` returns while frozen features wait for their logits: it sees what it is multiplied with.

    Every function and every attribute is that of the parameter itself. What is computed from it alone, such as its
    transpose, is a WeightInUse again; what is computed from it and another tensor is a plain tensor, perhaps logits.
    """

    _is_param = True  # isinstance(weight, nn.Parameter) asks for this attribute
    _real: Tensor
    _inputs: FrozenInputs

    @classmethod
    def of(cls, real: Tensor, inputs: FrozenInputs) -> WeightInUse:
        """Return ``real`` (the weight, or what was computed from it) as seen through this class."""
        weight = real.detach().as_subclass(cls)
        weight._real, weight._inputs = real, inputs
        return weight

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        copied: Tensor = copy.deepcopy(self._real, memo)
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._real.__reduce_ex__(protocol)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = list(_tensors((args, kwargs or {})))
        result = func(*_map(args), **_map(kwargs or {}))
        inputs = next(each._inputs for each in given if isinstance(each, cls))
        if not isinstance(result, Tensor) or not result.requires_grad or result.is_leaf:
            return result
        others = [each for each in given if not isinstance(each, cls)]
        if not others:
            return cls.of(result, inputs)
        for other in others:
            if other.grad_fn is None and inputs.waits:
                inputs.computed(result, other)
        return result


@dataclass(eq=False)
class _Waiting:
    key: Key
    h: Tensor
    """Keeps the memory, so that the key stays its own."""
    activations: Activations
    has_logits: bool = False


@dataclass(eq=False)
class _Output:
    """Logits, the input that they were computed from, and the activations that their gradient makes pending."""

    key: Key
    h: Tensor
    waiting: list[Activations] = field(default_factory=list)


def _key(h: Tensor) -> Key | None:
    """Return the memory of h and its version; None for tensors that have neither (sparse ones, those of torch.func)."""
    if _torch.is_transforming() or h.layout != torch.strided:
        return None
    return h.data_ptr(), h.numel(), 0 if h.is_inference() else _torch.version(h)


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested tuples, lists and dicts."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list | dict):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _tensors(each)


def _map(value: Any) -> Any:
    """Return ``value`` with the real weight in place of every WeightInUse in it."""
    if isinstance(value, WeightInUse):
        return value._real
    if isinstance(value, dict):
        return {key: _map(each) for key, each in value.items()}
    return type(value)(map(_map, value)) if type(value) in (tuple, list) else value
