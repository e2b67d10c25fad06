r"""How often classes that were seen once come again, measured on at most 1,024 of the classes.

A first write across the mean activation must say how likely the new class is. Among words one that came once is rare,
and stays so. In a curriculum a new class comes as often as all others from then on. What the head knows of it is how
classes fared that were seen once before: with :math:`a_i` the batches since class i came first, over the sampled
classes that were seen once before the batch,

.. math::
    c^* = B\, \frac{\sum_i a_i n_i}{\sum_i a_i}

is the count that a new class would have by now, after B batches, if it came as often as those do. Both sums are
running means. Without the ages the quotient would be too large for words, which come again soon, within the same text,
and then no more: most of the sum is of classes that have waited long.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hebbian_softmax.write.running import HORIZON
from hebbian_softmax.write.sampled import SampledClasses

FORGOTTEN = 1e-20
"""While the mean sum of ages is not larger than this, there has been no class seen once, at least not for long."""


class Returning(SampledClasses):
    """When each sampled class came first, and the running sums."""

    of_classes = "first"
    first: Tensor
    sums: Tensor

    def __init__(self, classes: int, *, device: torch.device | str | None, dtype: torch.dtype) -> None:
        super().__init__(classes, device=device)
        self.register_buffer("first", torch.zeros(self._begin_with, device=device, dtype=torch.int64))
        """The batches before each sampled class came first; 0 where that was not seen."""
        self.register_buffer("sums", torch.zeros(2, device=device, dtype=dtype))
        """The running means of both sums."""

    def see(self, counts: Tensor, classes: Tensor, n: Tensor, batches: Tensor) -> None:
        """Take in a batch: its classes and how often each came. The counts of all classes are those before it."""
        if self.size == 0:  # of a head without classes, or of a pickle from before there was this
            self.grow(counts.shape[0])
        age = batches - self.first
        every = torch.arange(self.size, device=counts.device) * self.stride
        waited = (age * (counts[every] == 1)).sum()
        here = self.sampled(classes)
        slots, before = classes[here] // self.stride, counts[classes[here]]
        came = (age[slots] * n[here] * (before == 1)).sum()
        share = (batches + 1).clamp_max(HORIZON).to(self.sums.dtype).reciprocal()
        self.sums += share * (torch.stack([came, waited]).to(self.sums.dtype) - self.sums)
        self.first[slots[before == 0]] = batches

    def usual_count(self, batches: Tensor, limit: int) -> Tensor:
        """Return c* after so many batches, from 1 to T; T where no class was seen once, because all come often."""
        came, waited = self.sums
        known = waited > FORGOTTEN
        often = torch.where(known, came / torch.where(known, waited, 1), torch.inf)
        return torch.where(batches > 0, often * batches, 1).clamp_max(limit).clamp_min(1)
