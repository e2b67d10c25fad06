"""``with head.targets(y):`` remembers the input of a head that is called inside a model.

In eager mode the head's output is hooked. In a compiled graph, operators of our own do what the hook does: the compiler
takes them as they are, so that the model stays one graph.
"""

from __future__ import annotations

import sys
import weakref
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hebbian_softmax import _torch, checks
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
            raise ValueError(f"shift=True needs targets of class indices (..., positions), got {_describe(targets)}")
        self._head, self._targets, self._shift = head, targets, shift
        self._called = False

    def __enter__(self) -> None:
        head = self._head
        if head.context is not None:
            raise RuntimeError("head.targets(...) is open already; leave that context before opening another")
        if not torch.compiler.is_compiling():
            register(head)
        head.context, head.context_key = self, id(head)
        self._called = False

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._head.context, self._head.context_key = None, None
        if kind is None and not self._called:
            raise RuntimeError(
                "the head was not called within head.targets(...), so nothing is memorised; call the model inside, and "
                "check that the head is still part of it: resize_token_embeddings of transformers puts a plain "
                "nn.Linear in its place (head.add_classes(n) grows the head itself)"
            )

    def called(self, h: Tensor) -> Watched | None:
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
        if not head.remembers(warn_at=5) or attachment is None:
            return None
        attachment.pending.asked = True
        attachment.watch_weight()
        return Watched(attachment, flat.detach(), targets)

    def _aligned(self, h: Tensor) -> Tensor:
        """Return a target for each activation: with ``shift`` the label after it, and none for the last one."""
        targets = self._targets
        if not self._shift or targets.shape != h.shape[:-1]:
            return targets  # which is checked with h
        last = torch.full_like(targets[..., :1], self._head.ignore_index)
        return torch.cat([targets[..., 1:], last], dim=-1)


class Watched:
    """The input of a call of the head. It becomes pending when the gradient of the call's output comes."""

    def __init__(self, attachment: Attachment, h: Tensor, targets: Tensor) -> None:
        self._pending, self._h, self._targets, self._call = attachment.pending, h, targets, Call()
        # A weight that takes a gradient needs h unchanged until the backward pass, which autograd checks.
        self._copy = None if attachment.weight.requires_grad else self._pending.copy(h, targets, self._call)

    def reach(self, grad: Tensor | None = None) -> None:
        """Note, inside a backward pass, that the gradient of the output has come."""
        self._pending.begin_pass()
        if not self._call.counted:
            self._pending.reach(self._copy or self._pending.copy(self._h, self._targets, self._call))

    def is_of(self, h: Tensor) -> bool:
        """Return whether ``h`` is this input, computed anew."""
        return self._h.shape == (h.shape[:-1].numel(), h.shape[-1]) and torch.equal(
            self._h, h.detach().view_as(self._h)
        )


class WatchedCalls:
    """Calls of the head that nothing but a number, or an equal input, can find again in the backward pass.

    Those are calls in compiled graphs, and calls under reentrant checkpointing, which first calls the head without a
    gradient and once more in the backward pass. They are kept until the second step after them.
    """

    def __init__(self) -> None:
        self.calls: dict[int, Watched] = {}
        self._next = 0
        self._first_of_this_step = 0

    def keep(self, watched: Watched) -> int:
        """Keep a call, and return its number."""
        self.calls[self._next] = watched
        self._next += 1
        return self._next - 1

    def reach(self, number: int) -> None:
        """Note that the gradient of that call's output has come."""
        if number in self.calls:
            self.calls[number].reach()

    def find(self, h: Tensor) -> int:
        """Return the number of the call with this input; -1 where there is none."""
        return next((number for number, watched in self.calls.items() if watched.is_of(h)), _NOBODY)

    def after_step(self) -> None:
        """Forget the calls before the last step."""
        self.calls = {number: call for number, call in self.calls.items() if number >= self._first_of_this_step}
        self._first_of_this_step = self._next


def _describe(tensor: Tensor) -> str:
    return f"{tensor.dtype} of shape {tuple(tensor.shape)}"


_NOBODY = -1
_HEADS: weakref.WeakValueDictionary[int, HebbianSoftmax] = weakref.WeakValueDictionary()
_are_defined = False


def register(head: HebbianSoftmax) -> None:
    """Let compiled graphs find ``head`` by its number."""
    if "torch._dynamo" in sys.modules:  # else nothing is compiled
        _define_operators()
    _HEADS[id(head)] = head


def watch(head: HebbianSoftmax, h: Tensor, logits: Tensor) -> None:
    """Watch the output of a call of ``head`` with ``h``, if the call is in a context or repeats such a call."""
    attachment = head.attachment
    if _torch.current_backward() != _torch.NO_BACKWARD:  # checkpointing computes the head anew
        if attachment is not None and attachment.watched_calls.calls and logits.requires_grad:
            number = attachment.watched_calls.find(h)
            logits.register_hook(lambda _: attachment.watched_calls.reach(number))
        return
    watched = None if head.context is None else head.context.called(h)
    if watched is None or attachment is None:
        return
    if logits.requires_grad:
        logits.register_hook(watched.reach)
    elif not torch.is_grad_enabled():
        attachment.watched_calls.keep(watched)


def watched_linear(h: Tensor, weight: Tensor, bias: Tensor | None, key: int) -> Tensor:
    """Return the logits of a call in a context, in a graph that is being compiled.

    The operator must lie on the way of a gradient. It copies the activations, or the weight where they take none.
    """
    if h.requires_grad or not torch.is_grad_enabled():
        h = torch.ops.hebbian_softmax.watch(h, h.detach(), key)[0]
    else:
        weight = torch.ops.hebbian_softmax.watch(weight, h, key)[0]
    return F.linear(h, weight, bias)


def _define_operators() -> None:
    """Define the operators of compiled graphs when they are first needed: this imports much of torch's compiler."""
    global _are_defined
    if _are_defined:
        return

    @torch.library.custom_op("hebbian_softmax::watch", mutates_args=())
    def watch_input(x: Tensor, h: Tensor, key: int) -> tuple[Tensor, Tensor]:
        return x.clone(), torch.tensor(_number_of(_HEADS[key], h))

    @watch_input.register_fake
    def _(x: Tensor, h: Tensor, key: int) -> tuple[Tensor, Tensor]:
        return torch.empty_like(x), torch.empty((), dtype=torch.int64)

    @torch.library.custom_op("hebbian_softmax::reach", mutates_args=())
    def reach(grad: Tensor, number: Tensor, key: int) -> Tensor:
        head = _HEADS.get(key)
        if head is not None and head.attachment is not None:
            head.attachment.watched_calls.reach(int(number))
        return grad.clone()

    @reach.register_fake
    def _(grad: Tensor, number: Tensor, key: int) -> Tensor:
        return torch.empty_like(grad)

    def save(ctx: Any, inputs: tuple[Tensor, Tensor, int], output: tuple[Tensor, Tensor]) -> None:
        ctx.key = inputs[2]
        ctx.save_for_backward(output[1])

    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, None, None]:
        return reach(grad, ctx.saved_tensors[0], ctx.key), None, None

    watch_input.register_autograd(backward, setup_context=save)
    _are_defined = True


def _number_of(head: HebbianSoftmax, h: Tensor) -> int:
    """Return the number of the call with ``h`` that a compiled graph makes now, or repeats in its backward pass."""
    attachment = head.attachment
    if _torch.current_backward() != _torch.NO_BACKWARD:
        return _NOBODY if attachment is None else attachment.watched_calls.find(h)
    watched = None if head.context is None else head.context.called(h)
    return _NOBODY if watched is None or attachment is None else attachment.watched_calls.keep(watched)
