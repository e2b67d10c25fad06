"""The activations of a call, in memory of our own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.profiler import record_function


@dataclass(eq=False)
class Call:
    """One ``loss()`` or ``remember()`` call."""

    counted: bool = False
    """Its activations are pending or written: a second backward through the same graph adds nothing."""


@dataclass(eq=False)
class Activations:
    """The activations (N, features) and targets (N,) of a call, in memory that is not the user's."""

    h: Tensor
    targets: Tensor
    call: Call = field(default_factory=Call)
    inspection: object = None
    """What the GPU's kernels found of them while they were copied."""


def own_copy(h: Tensor, targets: Tensor, call: Call) -> Activations:
    """Activations that stay what they are until the step: buffers may be filled anew, leaves optimised."""
    if torch.compiler.is_compiling():
        return Activations(h.detach().clone(), targets.clone(), call)
    with record_function("hebbian_softmax::watch"):
        copy = h.detach().clone(memory_format=torch.contiguous_format)  # the layout that the write's kernels read
        return Activations(copy, targets.clone(), call)


Copy = Callable[[Tensor, Tensor, Call], Activations]
