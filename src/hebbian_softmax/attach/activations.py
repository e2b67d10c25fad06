"""The activations of a call, in memory of our own."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor


@dataclass(eq=False)
class Call:
    """One ``loss()`` or ``remember()`` call."""

    counted: bool = False
    """Whether its activations are pending or written: a second backward through the same graph then adds nothing."""


@dataclass(eq=False)
class Activations:
    """The activations (N, features) and targets (N,) of a call, in memory that the user does not change."""

    h: Tensor
    targets: Tensor
    call: Call = field(default_factory=Call)
    inspection: object = None
    """What the GPU's kernels found out about the activations while copying them."""
