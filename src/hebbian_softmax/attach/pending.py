"""The activations that await the next optimizer step.

An activation becomes pending when the gradient of its loss reaches the head, and stays pending until the optimizer's
next step or until the gradients it belongs to are cleared. PyTorch has no hook for clearing, so the gradient itself
is watched: before anything new is added to ``weight.grad``, and again at the step, it is compared with what it was
at the end of the last backward pass.

    ``weight.grad`` is ...                          the activations were ...
    None                                            cleared (``zero_grad()``)
    the same tensor at the same version             untouched
    changed, and zero everywhere                    cleared (``zero_grad(set_to_none=False)``)
    changed otherwise (clipped, unscaled, reduced)  kept

On a GPU ``torch._foreach_zero_`` does not raise the version (seen with torch 2.11). An optimizer made with
``foreach=True`` or ``fused=True`` clears gradients with it, so there the values are looked at as well: a gradient that
was not zero at the end of the last backward pass and is zero now was cleared.

With FSDP2 a rank sees only its shard of the gradient: see ``sharded.py``.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hebbian_softmax import _torch
from hebbian_softmax.growth import OUTGROWN
from hebbian_softmax.rule import ClassSums
from hebbian_softmax.write import any_nonzero, copied, plain_copy
from hebbian_softmax.write.activations import Activations, Call
from hebbian_softmax.write.in_torch import class_sums

if TYPE_CHECKING:
    from hebbian_softmax.layer import HebbianSoftmax

FOLD_ROWS, FOLD_ROWS_ON_CUDA = 65_536, 262_144
"""Pending activations beyond this number are folded into class sums, so that the classes bound the memory.

On CUDA folding waits for the device and cannot be captured in a graph, so it happens later: beyond this number of
activations between two steps (512 MB of 1,024 features in bfloat16), or the number of classes if that is larger.
"""


@dataclass(eq=False)
class _Entry:
    content: Activations | ClassSums
    has_gradient: bool
    """Whether ``weight.grad`` existed when its backward pass ended; not after autograd.grad, nor always with FSDP."""
    alive: Tensor | None = None
    """On CUDA: a boolean on the device, so that finding a cleared gradient does not wait for the device."""
    born: int = 0
    """The number, since the last step, of the backward pass in which it became pending; counted with FSDP only."""


class Pending:
    """The activations waiting for the next step of the optimizer that holds ``parameter``."""

    def __init__(self, head: HebbianSoftmax, parameter: Tensor, optimizer: torch.optim.Optimizer) -> None:
        self.parameter = parameter
        self._optimizer = weakref.ref(optimizer)
        self.fold_rows: int | None = None
        """The number of activations beyond which they are folded, in place of ``FOLD_ROWS``."""
        self.answered = False
        """Whether, since the last step, something remembered was reached, or the user said that nothing is meant."""
        self.gradient_came = False
        """Whether, since the last step, a backward pass of this process has brought the weight a gradient."""
        self.in_eval = False
        """Whether a gradient that came in eval mode is still there."""
        self._head = weakref.ref(head)  # a loss may outlive its head, and must not keep it
        self._entries: list[_Entry] = []
        self._fold_at = 0
        self._seen: weakref.ref[Tensor] | None = None
        self._seen_version = -1
        self._seen_nonzero: Tensor | None = None
        self._begun = _torch.NO_BACKWARD
        """The number of the last backward pass that was noticed."""
        self._pass = 0
        self._arriving: list[tuple[int, Activations]] = []
        """Activations reached in a backward pass that has not ended, with the number of that pass."""
        self._weight_pass = _torch.NO_BACKWARD
        """The number of the last backward pass that brought the weight a gradient."""
        self._closed = False

    def __len__(self) -> int:
        return len(self._entries)

    def rows(self) -> int:
        """Return the number of activations, or of class sums, that are held."""
        return sum(_rows(entry) for entry in self._entries)

    def watch(self, loss: Tensor, h: Tensor, targets: Tensor) -> Tensor:
        """Return ``loss`` such that its backward pass makes the activations pending."""
        if not loss.requires_grad or _torch.is_transforming():
            return loss  # torch.func differentiates copies, which no optimizer steps
        watched: Tensor = _Watch.apply(loss, h, targets, self)
        return watched

    def copy(self, h: Tensor, targets: Tensor, call: Call) -> Activations:
        """Return the activations of ``call`` in memory of our own."""
        head = self._head()
        return plain_copy(h, targets, call) if head is None else copied(head, self.parameter, h, targets, call)

    def reach(self, activations: Activations) -> None:
        """Note, inside a backward pass, that the gradient of these activations' loss has reached the head."""
        self.begin_pass()
        self.answered = True
        if self._closed or activations.call.counted or self.is_arriving(activations.call):
            return
        now = _torch.current_backward()
        if now != _torch.NO_BACKWARD:  # what other passes have left ended in an exception
            self._arriving = [each for each in self._arriving if each[0] == now]
        self._arriving.append((now, activations))
        # A callback that a callback queues comes after those in which DDP and FSDP complete the gradient.
        arrive = partial(self._arrive, now, activations)
        _torch.call_after_backward(partial(_torch.call_after_backward, arrive))

    def is_arriving(self, call: Call | None = None) -> bool:
        """Return whether ``call``, or any call if none is given, was reached in the backward pass that runs now."""
        now = _torch.current_backward()
        return any(
            number == now and (call is None or activations.call is call) for number, activations in self._arriving
        )

    def asked_by_loss(self, training: bool, remember: bool) -> None:
        """Note a call of ``loss``, which answers what to remember; but in eval mode nothing can be."""
        self.answered |= training or not remember

    def note_gradient_came(self) -> None:
        """Note that a backward pass of this process brings the weight a gradient, and in which mode."""
        head = self._head()
        self.gradient_came = True
        self.in_eval |= head is not None and not head.training

    def weight_gradient(self) -> None:
        """Note that a gradient is about to be added to ``parameter.grad``."""
        self.begin_pass()
        self.note_gradient_came()
        self._weight_pass = _torch.current_backward()

    def begin_pass(self) -> None:
        """Note that a backward pass runs. What was cleared before it is forgotten, before the pass adds a gradient.

        Later in the pass the gradient says nothing: if it is zero everywhere, the pass itself may have added zeros.
        """
        now = _torch.current_backward()
        if now == self._begun:
            return
        self._begun = now
        self.drop_cleared()
        if self._entries:  # a pass that makes nothing pending changes their gradient, too
            _torch.call_after_backward(partial(_torch.call_after_backward, self.note_gradient))

    def drop_cleared(self) -> None:
        """Forget the activations whose gradient was cleared."""
        grad = self.parameter.grad
        if self.in_eval and (grad is None or (not grad.is_cuda and not any_nonzero(grad))):
            self.in_eval = False
        if grad is None:
            self._drop_with_gradient()
        elif self.parameter.requires_grad:  # what became pending for a frozen weight lasts until the step
            self._check(grad)

    def take(self) -> list[Activations | ClassSums]:
        """Return the activations that the step just made completes, and forget them.

        Activations whose gradient has not come to ``parameter.grad`` yet stay for a later step.
        """
        now = _torch.current_backward()
        if now == _torch.NO_BACKWARD or now != self._begun:
            self.drop_cleared()
        self._settle()
        if self.parameter.requires_grad and self.parameter.grad is None:
            return []
        taken = [_masked(entry) for entry in self._entries]
        if now != _torch.NO_BACKWARD:  # a step within the backward pass, as optimizers in hooks make
            taken += [activations for number, activations in self._arriving if number == now]
            self._arriving = []
            for content in taken:
                _count(content)
        self.clear()
        return taken

    def skip_if(self, skipped: Tensor) -> None:
        """Forget what is pending if ``skipped``, the ``found_inf`` of a fused optimizer, is not 0."""
        self._keep_where(skipped.eq(0).all())

    def clear(self) -> None:
        """Forget what is pending."""
        self._entries = []
        self._fold_at = 0

    def close(self) -> None:
        """Forget everything, and let nothing become pending any more."""
        self.clear()
        self._arriving = []
        self._closed = True

    def _check(self, grad: Tensor) -> None:
        """Forget the activations whose gradient was cleared with ``set_to_none=False``."""
        if not self._entries:
            return
        if not self._is_seen(grad) or self._seen_version != _torch.version(grad):
            self._keep_where(any_nonzero(grad))
        elif self._seen_nonzero is not None:
            self._keep_where(any_nonzero(grad) | ~self._seen_nonzero)

    def _note(self, grad: Tensor) -> None:
        """Remember the gradient with which a backward pass has ended."""
        self._seen, self._seen_version = weakref.ref(grad), _torch.version(grad)
        self._seen_nonzero = any_nonzero(grad) if grad.is_cuda and self._clears_unseen() else None

    def _clears_unseen(self) -> bool:
        """Return whether the optimizer's ``zero_grad`` may clear the gradient without raising its version."""
        optimizer = self._optimizer()
        return optimizer is not None and any(optimizer.defaults.get(option) for option in ("foreach", "fused"))

    def _is_seen(self, grad: Tensor) -> bool:
        return self._seen is not None and self._seen() is grad

    def _settle(self) -> None:
        """Ask other ranks what this one cannot see; a rank that sees the whole gradient has nothing to ask."""

    def _drop_with_gradient(self) -> None:
        for entry in self._entries:
            if entry.has_gradient:
                _count(entry.content, False)  # another backward pass makes it pending again
        self._entries = [entry for entry in self._entries if not entry.has_gradient]

    def note_gradient(self) -> None:
        """Remember the gradient as it is now, at the end of a backward pass; what is pending belongs to it."""
        grad = self.parameter.grad
        if grad is None or self._closed:
            return
        self._note(grad)
        for entry in self._entries:
            entry.has_gradient = True

    def _arrive(self, number: int, activations: Activations) -> None:
        """Make activations pending: their backward pass has ended well."""
        if (number, activations) not in self._arriving:
            return  # a step within the pass took it, or the head was detached
        self._arriving.remove((number, activations))
        if self._gave_weight_a_gradient(number):
            self._add(activations)

    def _gave_weight_a_gradient(self, number: int) -> bool:
        """Return whether that pass was for the weight, and not for something else, as the input in an attack."""
        return not self.parameter.requires_grad or self._weight_pass == number

    def _add(self, activations: Activations) -> None:
        _count(activations)
        self._entries.append(_Entry(activations, has_gradient=False, born=self._pass))
        self.note_gradient()
        if self.rows() > max(self._fold_at, self._most_rows()):
            self._fold_entries()

    def _fold_entries(self) -> None:
        head = self._head()
        if head is None:  # nobody will write
            self.clear()
            return
        last = self._entries[-1]  # all have a gradient or none has: else some would have been dropped
        sums = class_sums(head, [_masked(entry) for entry in self._entries]).folded()
        self._entries = [_Entry(sums, last.has_gradient, born=last.born)]
        self._fold_at = 2 * self.rows()

    def _most_rows(self) -> int:
        if self.fold_rows is not None:
            return self.fold_rows
        return max(FOLD_ROWS_ON_CUDA, self.parameter.shape[0]) if self.parameter.is_cuda else FOLD_ROWS

    def _keep_where(self, alive: Tensor) -> None:
        """Forget what is pending if ``alive`` is false; on a GPU without reading it."""
        if alive.device.type == "cpu":
            if not alive:
                for entry in self._entries:
                    _count(entry.content, False)
                self.clear()
            return
        for entry in self._entries:
            entry.alive = alive if entry.alive is None else entry.alive & alive


class _Watch(torch.autograd.Function):
    """The identity. The activations that it saves are freed with the loss's graph, so an unused loss costs nothing."""

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
        ctx.pending.begin_pass()
        ctx.pending.answered = True
        if not ctx.call.counted:
            h, targets = ctx.saved_tensors
            ctx.pending.reach(ctx.pending.copy(h, targets, ctx.call))
        return grads[0], None, None, None


def _count(content: Activations | ClassSums, counted: bool = True) -> None:
    """Note whether the call of these activations is pending or written; sums no longer know their calls."""
    if isinstance(content, Activations):
        content.call.counted = counted


def _masked(entry: _Entry) -> Activations | ClassSums:
    """Return the entry's content, emptied if its gradient was found cleared on the device."""
    content, alive = entry.content, entry.alive
    if alive is None:
        return content
    if isinstance(content, Activations):
        nobody = torch.full_like(content.targets, -1)  # out of range: left out of every sum
        return Activations(content.h, torch.where(alive.to(content.targets.device), content.targets, nobody))
    keep = alive.expand_as(content.n)
    return ClassSums(
        classes=content.classes[keep],
        n=content.n[keep],
        rows=content.rows,
        order=content.order[keep],
        parts=content.parts[keep],
        total=content.total * alive,
        norms=content.norms * alive,
        nonfinite=content.nonfinite * alive,
    )


def _rows(entry: _Entry) -> int:
    return (entry.content.h if isinstance(entry.content, Activations) else entry.content.rows).shape[0]
