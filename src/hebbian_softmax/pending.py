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
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hebbian_softmax.distributed import local_rows
from hebbian_softmax.rule import ClassSums

_FOLD_ROWS = 65_536
"""Pending activations are folded into class sums beyond this many, so that memory stays bounded by the classes."""


@dataclass(eq=False)
class Activations:
    """The activations (N, features) and targets (N,) of one ``loss()`` or ``remember()`` call."""

    h: Tensor
    targets: Tensor
    reached: bool = False
    """The gradient has come by: a second backward through the same graph adds nothing."""


Fold = Callable[[list["Activations | ClassSums"]], ClassSums]


@dataclass(eq=False)
class _Entry:
    content: Activations | ClassSums
    has_gradient: bool
    """``weight.grad`` existed when its backward ended; not so with FSDP's delayed reduction or autograd.grad."""
    alive: Tensor | None = None
    """On CUDA: a boolean on the device, so that finding a cleared gradient does not wait for the device."""


class Pending:
    """The activations waiting for the next step of the optimizer that holds ``parameter``."""

    def __init__(self, parameter: Tensor, fold: Fold) -> None:
        self.parameter = parameter
        self._fold = fold
        self._entries: list[_Entry] = []
        self._fold_at = _FOLD_ROWS
        self._seen: weakref.ref[Tensor] | None = None
        self._seen_version = -1

    def __len__(self) -> int:
        return len(self._entries)

    def reach(self, activations: Activations) -> None:
        """The gradient of these activations' loss has reached the head: call inside the backward pass."""
        if activations.reached:
            return
        activations.reached = True
        self.drop_cleared()
        # Only a backward pass that ends without an exception runs its callbacks.
        engine: Any = torch.autograd.Variable._execution_engine
        engine.queue_callback(partial(self._add, activations))

    def drop_cleared(self) -> None:
        """Forget what belongs to a gradient that was cleared: call before a gradient is added to ``parameter``."""
        if not self._entries or not self.parameter.requires_grad:
            return  # a frozen weight has no gradient to be cleared: its activations last until the step
        grad = self.parameter.grad
        if grad is None:
            self._entries = [entry for entry in self._entries if not entry.has_gradient]
        elif self._seen is None or self._seen() is not grad or self._seen_version != grad._version:
            self._keep_where(local_rows(grad).any())

    def take(self) -> list[Activations | ClassSums]:
        """What the step just made completes; nothing is pending afterwards.

        Activations whose gradient has not come to ``parameter.grad`` yet stay for a later step.
        """
        self.drop_cleared()
        if self.parameter.requires_grad and self.parameter.grad is None:
            return []
        taken = [_masked(entry) for entry in self._entries]
        self.clear()
        return taken

    def skip_if(self, skipped: Tensor) -> None:
        """Take no part in a step that the optimizer itself skipped (``found_inf`` of the fused optimizers)."""
        self._keep_where(skipped.eq(0).all())

    def clear(self) -> None:
        self._entries = []
        self._fold_at = _FOLD_ROWS

    def _add(self, activations: Activations) -> None:
        grad = self.parameter.grad
        self._entries.append(_Entry(activations, has_gradient=False))
        if grad is not None:
            self._seen, self._seen_version = weakref.ref(grad), grad._version
            for entry in self._entries:
                entry.has_gradient = True
        if sum(_rows(entry) for entry in self._entries) > self._fold_at:
            self._fold_entries()

    def _fold_entries(self) -> None:
        by_gradient = {}
        for has_gradient in {entry.has_gradient for entry in self._entries}:
            group = [_masked(entry) for entry in self._entries if entry.has_gradient == has_gradient]
            by_gradient[has_gradient] = self._fold(group)
        self._entries = [_Entry(sums, has_gradient) for has_gradient, sums in by_gradient.items()]
        self._fold_at = max(_FOLD_ROWS, 2 * sum(_rows(entry) for entry in self._entries))

    def _keep_where(self, alive: Tensor) -> None:
        if alive.device.type == "cpu":
            if not alive:
                self.clear()
            return
        for entry in self._entries:
            entry.alive = alive if entry.alive is None else entry.alive & alive


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
        content.classes[keep],
        content.n[keep],
        content.sums[keep],
        content.norms * alive,
        content.nonfinite * alive,
    )


def _rows(entry: _Entry) -> int:
    return (entry.content.h if isinstance(entry.content, Activations) else entry.content.sums).shape[0]
