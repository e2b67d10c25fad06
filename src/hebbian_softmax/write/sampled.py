"""A sample of at most 1,024 classes, for what would cost too much to be known of every class."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, Self

import torch
from torch import Tensor, nn

SAMPLED = 1024
"""The most classes that are sampled."""


class SampledClasses(nn.Module):
    """Buffers with an entry for each sampled class, and others; those of floating point stay at least float32.

    Every ``stride``-th class is sampled, beginning with the first. Classes that a head gains are sampled while there
    are fewer than ``SAMPLED``.
    """

    of_classes: ClassVar[str]
    """The buffer with an entry for each sampled class."""
    stride: Tensor

    def __init__(self, classes: int, *, device: torch.device | str | None) -> None:
        super().__init__()
        self._stride = max(1, classes // SAMPLED)
        self._begin_with = min(SAMPLED, -(-classes // self._stride))
        self.register_buffer("stride", torch.full((), self._stride, device=device, dtype=torch.int64))

    @property
    def size(self) -> int:
        """How many classes are sampled."""
        return int(getattr(self, self.of_classes).shape[0])

    def reset(self) -> None:
        """Forget everything."""
        for buffer in self.buffers():
            buffer.zero_()
        self.stride.fill_(self._stride)  # which has no value yet if the head was made on the meta device

    def grow(self, classes: int) -> None:
        """Follow a head that has ``classes`` classes now."""
        old = getattr(self, self.of_classes)
        more = min(SAMPLED, -(-classes // int(self.stride))) - old.shape[0]
        if more > 0:
            setattr(self, self.of_classes, torch.cat([old, old.new_zeros(more, *old.shape[1:])]))

    def sampled(self, classes: Tensor) -> Tensor:
        """Return which of these classes are sampled."""
        return (classes % self.stride == 0) & (classes // self.stride < self.size)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        before = {name: each for name, each in self.named_buffers() if each.is_floating_point()}
        super()._apply(fn, recurse)
        for name, old in before.items():
            new = getattr(self, name)
            if torch.finfo(new.dtype).bits < 32:
                setattr(self, name, old.to(new.device, torch.promote_types(new.dtype, torch.float32)))
        return self
