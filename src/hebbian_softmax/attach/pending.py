"""Which activations await the next optimizer step.

An activation becomes pending when the gradient of its loss reaches the head, and stays so until the optimizer's
next step or until the gradients it belongs to are cleared. PyTorch has no hook for clearing, so the gradient itself
is watched: before anything new is added to ``weight.grad``, and again at the step, it is compared with what it was
at the end of the last backward pass.

    ``weight.grad`` is ...                          the activations were ...
    None                                            cleared (``zero_grad()``)
    the same tensor at the same version             untouched
    changed, and zero everywhere                    cleared (``zero_grad(set_to_none=False)``)
    changed otherwise (clipped, unscaled, reduced)  kept

With FSDP2 a rank sees its shard of the gradient only: see ``sharded_pending.py``.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hebbian_softmax.attach.activations import Activations, Call, Copy, own_copy
from hebbian_softmax.rule import ClassSums
from hebbian_softmax.write.gpu import device

FOLD_ROWS, FOLD_ROWS_ON_CUDA = 65_536, 262_144
"""Pending activations are folded into class sums beyond this many, so that memory stays bounded by the classes.

On CUDA folding waits for the device and cannot be captured in a graph, so it comes later: beyond so many activations
between two steps (512 MB of 1,024 features in bfloat16), or as many as there are classes if those are more.
"""


Fold = Callable[[list["Activations | ClassSums"]], ClassSums | None]


@dataclass(eq=False)
class _Entry:
    content: Activations | ClassSums
    has_gradient: bool
    """``weight.grad`` existed when its backward ended; not so with FSDP's delayed reduction or autograd.grad."""
    alive: Tensor | None = None
    """On CUDA: a boolean on the device, so that finding a cleared gradient does not wait for the device."""
    born: int = 0
    """The backward pass since the last step that it became pending in, where those are counted."""


class Pending:
    """The activations waiting for the next step of the optimizer that holds ``parameter``."""

    def __init__(self, parameter: Tensor, fold: Fold, copy: Copy = own_copy) -> None:
        self.parameter = parameter
        self.copy = copy
        self._fold = fold
        self._entries: list[_Entry] = []
        self._fold_at = 0
        self._seen: weakref.ref[Tensor] | None = None
        self._seen_version = -1
        self._pass = 0
        self._arriving: list[tuple[int, Activations]] = []
        """Reached in a backward pass that has not ended, with the number of that pass."""
        self._weight_pass = _NO_PASS
        """The last backward pass that brought the weight a gradient."""
        self._closed = False

    def __len__(self) -> int:
        return len(self._entries)

    def reach(self, activations: Activations) -> None:
        """The gradient of these activations' loss has reached the head: call inside the backward pass."""
        self.drop_cleared()
        if self._closed or activations.call.counted or self.is_arriving(activations.call):
            return
        now = _current_pass()
        if now != _NO_PASS:  # what is left of other passes ended in an exception
            self._arriving = [each for each in self._arriving if each[0] == now]
        self._arriving.append((now, activations))
        # A callback that a callback queues comes after those in which DDP and FSDP complete the gradient.
        _after_backward(partial(_after_backward, partial(self._arrive, now, activations)))

    def is_arriving(self, call: Call | None = None) -> bool:
        """Whether the call, or any, was reached in the backward pass that is running."""
        now = _current_pass()
        return any(
            number == now and (call is None or activations.call is call) for number, activations in self._arriving
        )

    def weight_gradient(self) -> None:
        """A gradient is about to be added to ``parameter.grad``."""
        self.drop_cleared()
        self._weight_pass = _current_pass()

    def drop_cleared(self) -> None:
        """Forget what belongs to a gradient that was cleared: call before a gradient is added to ``parameter``."""
        if not self.parameter.requires_grad:
            return  # a frozen weight has no gradient to be cleared: its activations last until the step
        grad = self.parameter.grad
        if grad is None:
            self._drop_with_gradient()
        else:
            self._check(grad)

    def take(self) -> list[Activations | ClassSums]:
        """What the step just made completes; nothing is pending afterwards.

        Activations whose gradient has not come to ``parameter.grad`` yet stay for a later step.
        """
        self.drop_cleared()
        self._settle()
        if self.parameter.requires_grad and self.parameter.grad is None:
            return []
        taken = [_masked(entry) for entry in self._entries]
        now = _current_pass()
        if now != _NO_PASS:  # a step within the backward pass, as optimizers in hooks make
            taken += [activations for number, activations in self._arriving if number == now]
            self._arriving = []
            for content in taken:
                _count(content)
        self.clear()
        return taken

    def skip_if(self, skipped: Tensor) -> None:
        """Take no part in a step that the optimizer itself skipped (``found_inf`` of the fused optimizers)."""
        self._keep_where(skipped.eq(0).all())

    def clear(self) -> None:
        self._entries = []
        self._fold_at = 0

    def close(self) -> None:
        """Forget everything and take in nothing more."""
        self.clear()
        self._arriving = []
        self._closed = True

    def _check(self, grad: Tensor) -> None:
        """Forget what was cleared with ``set_to_none=False``."""
        if self._entries and (not self._is_seen(grad) or self._seen_version != grad._version):
            self._keep_where(device.any_nonzero(grad))

    def _note(self, grad: Tensor) -> None:
        """A backward pass has ended with this gradient."""
        self._seen, self._seen_version = weakref.ref(grad), grad._version

    def _is_seen(self, grad: Tensor) -> bool:
        return self._seen is not None and self._seen() is grad

    def _settle(self) -> None:
        """Ask other ranks for what this one cannot see; not needed where it sees the whole gradient."""

    def _drop_with_gradient(self) -> None:
        for entry in self._entries:
            if entry.has_gradient:
                _count(entry.content, False)  # backpropagated again, it is pending again
        self._entries = [entry for entry in self._entries if not entry.has_gradient]

    def _arrive(self, number: int, activations: Activations) -> None:
        """The backward pass has ended well."""
        if (number, activations) not in self._arriving:
            return  # a step within the pass took it, or the head was detached
        self._arriving.remove((number, activations))
        if self._gave_weight_a_gradient(number):
            self._add(activations)

    def _gave_weight_a_gradient(self, number: int) -> bool:
        """Not so for the gradient of something else, as of the input in an adversarial attack."""
        return not self.parameter.requires_grad or self._weight_pass == number

    def _add(self, activations: Activations) -> None:
        _count(activations)
        grad = self.parameter.grad
        self._entries.append(_Entry(activations, has_gradient=False, born=self._pass))
        if grad is not None:
            self._note(grad)
            for entry in self._entries:
                entry.has_gradient = True
        if sum(_rows(entry) for entry in self._entries) > max(self._fold_at, self._unfolded_rows()):
            self._fold_entries()

    def _fold_entries(self) -> None:
        last = self._entries[-1]  # whether there is a gradient is the same for all: else some had been dropped
        sums = self._fold([_masked(entry) for entry in self._entries])
        if sums is None:  # the head is gone, and nobody will write
            self.clear()
            return
        self._entries = [_Entry(sums, last.has_gradient, born=last.born)]
        self._fold_at = 2 * _rows(self._entries[0])

    def _unfolded_rows(self) -> int:
        return max(FOLD_ROWS_ON_CUDA, self.parameter.shape[0]) if self.parameter.is_cuda else FOLD_ROWS

    def _keep_where(self, alive: Tensor) -> None:
        if alive.device.type == "cpu":
            if not alive:
                for entry in self._entries:
                    _count(entry.content, False)
                self.clear()
            return
        for entry in self._entries:
            entry.alive = alive if entry.alive is None else entry.alive & alive


_NO_PASS = -1


def _current_pass() -> int:
    """The number of the backward pass that is running on this thread, or -1."""
    number: int = torch._C._current_graph_task_id()
    return number


def _after_backward(callback: Callable[[], None]) -> None:
    """Call within a backward pass; one that ends in an exception does not run its callbacks."""
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(callback)


def _count(content: Activations | ClassSums, counted: bool = True) -> None:
    if isinstance(content, Activations):
        content.call.counted = counted


def _masked(entry: _Entry) -> Activations | ClassSums:
    """The entry's content, emptied where its gradient was found cleared on the device."""
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
