"""``with head.targets(y):`` remembers the input of a head that is called inside a model.

In eager mode the head's output is hooked. In a compiled graph, operators of our own do what the hook does: the compiler
takes them as they are, so that the model stays one graph.
"""

from __future__ import annotations

import itertools
import sys
import threading
import warnings
import weakref
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hebbian_softmax import _torch, checks
from hebbian_softmax.write import plain_copy
from hebbian_softmax.write.activations import Call

if TYPE_CHECKING:
    from hebbian_softmax.attach.attachment import Attachment
    from hebbian_softmax.layer import HebbianSoftmax


class Targets:
    """The context that ``head.targets(y)`` returns."""

    def __init__(self, head: HebbianSoftmax, targets: Tensor, shift: bool) -> None:
        if not isinstance(targets, Tensor):
            raise TypeError(f"targets must be a tensor, got {type(targets).__name__}")
        if checks.check_flag("shift", shift) and (targets.dim() == 0 or targets.is_floating_point()):
            given = f"{targets.dtype} of shape {tuple(targets.shape)}"
            raise ValueError(f"shift=True needs targets of class indices (..., positions), got {given}")
        self._head, self._targets, self._shift = head, targets, shift
        self._called = False

    def __enter__(self) -> None:
        head = self._head
        if head.context is not None:
            raise RuntimeError("head.targets(...) is open already; leave that context before opening another")
        if not torch.compiler.is_compiling():
            register(head)
        head.context, head.in_context = self, True
        self._called = False

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        head = self._head
        head.context, head.in_context = None, False
        if kind is None and not self._called and not head.warned_not_called:
            head.warned_not_called = True
            warnings.warn(
                "the head was not called within head.targets(...), so nothing is memorised; call the model inside, and "
                "check that the head is still part of it: resize_token_embeddings of transformers puts a plain "
                "nn.Linear in its place (head.add_classes(n) grows the head itself)",
                UserWarning,
                stacklevel=2,
            )

    def called(self, h: Tensor) -> ContextCall | None:
        """Check a call of the head with ``h``; return what its backward pass makes pending, if anything."""
        head, attachment = self._head, self._head.attachment
        if self._called:
            raise RuntimeError(
                "the head was called a second time within head.targets(...), and one call can have these targets; open "
                "a context for each call"
            )
        if _torch.is_transforming():  # torch.func differentiates copies, which no optimizer steps
            self._called = True
            return None
        flat, targets = head.batch_to_memorize(h, self._aligned(h))
        self._called = True
        remembers = head.remembers(warn=torch.is_grad_enabled())
        return ContextCall(attachment, flat, targets) if remembers and attachment is not None else None

    def _aligned(self, h: Tensor) -> Tensor:
        """Return a target for each activation: with ``shift`` the label after it, and none for the last one."""
        targets = self._targets
        if not self._shift or targets.shape != h.shape[:-1]:
            return targets  # which is checked with h
        last = torch.full_like(targets[..., :1], self._head.ignore_index)
        return torch.cat([targets[..., 1:], last], dim=-1)


def refuse_within(head: HebbianSoftmax, name: str) -> None:
    """Refuse another way to remember inside of the context, which would count the activations twice."""
    if head.context is not None:
        raise RuntimeError(f"{name} remembers by itself; call it outside of head.targets(...)")


class ContextCall:
    """A call of the head in a context. Its input becomes pending when the gradient of its output comes."""

    def __init__(self, attachment: Attachment, h: Tensor, targets: Tensor) -> None:
        attachment.watch_weight()
        self._pending = attachment.pending
        self._activations = plain_copy(h, targets, Call())  # users refill buffers, and compilers reuse memory
        self.repeated = False
        """Whether a backward pass has made this call again."""

    @property
    def is_counted(self) -> bool:
        """Whether the input is pending or written."""
        return self._activations.call.counted

    def reach(self, grad: Tensor | None = None) -> None:
        """Note, inside a backward pass, that the gradient of the output has come."""
        self._pending.reach(self._activations)

    def has_input(self, h: Tensor) -> bool:
        """Return whether ``h`` has the values of this call's input."""
        own = self._activations.h
        return own.shape == (h.shape[:-1].numel(), h.shape[-1]) and torch.equal(own, h.detach().reshape(own.shape))


class CallsInGraphs:
    """The calls of the head in compiled graphs, which know them by number."""

    def __init__(self) -> None:
        self.calls: dict[int, ContextCall] = {}
        self._next = 0
        self._first_of_this_step = 0

    def keep(self, call: ContextCall) -> int:
        """Keep a call, and return its number."""
        self.calls[self._next] = call
        self._next += 1
        return self._next - 1

    def reach(self, number: int) -> None:
        """Note that the gradient of that call's output has come."""
        if number in self.calls:
            self.calls[number].reach()

    def repeat(self, h: Tensor) -> int:
        """Return the number of a call that checkpointing repeats in the backward pass; -1 where there is none.

        Only the input tells which call it is. Of calls with equal inputs, those that were not repeated come first.
        """
        found = [number for number, call in self.calls.items() if call.has_input(h)]
        found.sort(key=lambda number: self.calls[number].repeated)
        if not found:
            return _NOBODY
        self.calls[found[0]].repeated = True
        return found[0]

    def after_step(self) -> None:
        """Forget the calls that were written, and those before the last step."""
        first = self._first_of_this_step
        self.calls = {i: call for i, call in self.calls.items() if i >= first and not call.is_counted}
        self._first_of_this_step = self._next


def follow_call(head: HebbianSoftmax, h: Tensor, logits: Tensor) -> None:
    """Let the gradient of ``logits``, the output of ``head(h)``, make h pending if the call is in a context."""
    if _torch.current_backward() != _torch.NO_BACKWARD:
        # Checkpointing calls the head again. If it is not of the reentrant kind, the first output is what counts.
        call: ContextCall | None = getattr(_torch.reentrant_checkpoint(), _attribute(head), None)
        if call is not None and logits.requires_grad:
            logits.register_hook(call.reach)
        return
    call = None if head.context is None else head.context.called(h)
    if call is None:
        return
    if logits.requires_grad:
        logits.register_hook(call.reach)
    elif not torch.is_grad_enabled():
        checkpoint = _torch.reentrant_checkpoint()
        if checkpoint is not None:  # the graph is made later, when the backward pass calls the head again
            setattr(checkpoint, _attribute(head), call)


def _attribute(head: HebbianSoftmax) -> str:
    return f"hebbian_softmax_call_{id(head)}"


def linear_in_graph(h: Tensor, weight: Tensor, bias: Tensor | None, key: int) -> Tensor:
    """Return the logits of a call in a context, in a graph that is being compiled.

    The operator must lie on the way of a gradient. It copies the activations, or the weight where they take none.
    """
    if h.requires_grad or not torch.is_grad_enabled():
        h = torch.ops.hebbian_softmax.call(h, h.detach(), key)[0]
    else:
        weight = torch.ops.hebbian_softmax.call(weight, h, key)[0]
    return F.linear(h, weight, bias)


_NOBODY = -1
_HEADS: weakref.WeakValueDictionary[int, HebbianSoftmax] = weakref.WeakValueDictionary()
_numbers = itertools.count()
_are_operators_defined = False
_defining_operators = threading.Lock()  # threads that attach heads at the same moment would define them twice


def register(head: HebbianSoftmax) -> None:
    """Give ``head`` a number by which compiled graphs find it, the same in every run of a program."""
    if "torch._dynamo" in sys.modules:  # else nothing is compiled
        _define_operators()
    if _HEADS.get(head.graph_key) is not head:
        head.graph_key = next(_numbers)
        _HEADS[head.graph_key] = head


def _define_operators() -> None:
    """Define the operators of compiled graphs when they are first needed: this imports much of torch's compiler."""
    global _are_operators_defined
    with _defining_operators:
        if not _are_operators_defined:
            _define_call_and_reach()
        _are_operators_defined = True


def _define_call_and_reach() -> None:
    @torch.library.custom_op("hebbian_softmax::call", mutates_args=())
    def call(x: Tensor, h: Tensor, key: int) -> tuple[Tensor, Tensor]:
        return x.clone(), torch.tensor(_number_of_call(_HEADS[key], h))

    @call.register_fake
    def _(x: Tensor, h: Tensor, key: int) -> tuple[Tensor, Tensor]:
        return torch.empty_like(x), torch.empty((), dtype=torch.int64)

    @torch.library.custom_op("hebbian_softmax::reach", mutates_args=())
    def reach(grad: Tensor, number: Tensor, key: int) -> Tensor:
        head = _HEADS.get(key)
        if head is not None and head.attachment is not None:
            head.attachment.calls_in_graphs.reach(int(number))
        return grad.clone()

    @reach.register_fake
    def _(grad: Tensor, number: Tensor, key: int) -> Tensor:
        return torch.empty_like(grad)

    def save(ctx: Any, inputs: tuple[Tensor, Tensor, int], output: tuple[Tensor, Tensor]) -> None:
        ctx.key = inputs[2]
        ctx.save_for_backward(output[1])

    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, None, None]:
        return reach(grad, ctx.saved_tensors[0], ctx.key), None, None

    call.register_autograd(backward, setup_context=save)


def _number_of_call(head: HebbianSoftmax, h: Tensor) -> int:
    """Return the number of the call with ``h`` that a compiled graph makes now, or repeats in its backward pass."""
    attachment = head.attachment
    if _torch.current_backward() != _torch.NO_BACKWARD:
        return _NOBODY if attachment is None else attachment.calls_in_graphs.repeat(h)
    call = None if head.context is None else head.context.called(h)
    return _NOBODY if call is None or attachment is None else attachment.calls_in_graphs.keep(call)
