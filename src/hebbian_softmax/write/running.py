r"""The running values of activations and rows that what is written depends on.

A first write across the mean activation must say how likely the new class is. Among words one that came once is rare,
and stays so. In a curriculum a new class comes as often as all others from then on. What a head knows of it is how
classes fared that were seen once before: with :math:`a_i` the batches since class i came first, over classes that were
seen once before the batch,

.. math::
    c^* = B\, \frac{\sum_i a_i n_i}{\sum_i a_i}

is the count that a new class would have by now, after B batches, if it came as often as they do. Both sums are running
means, over at most 1,024 sampled classes. Without the ages the quotient would be too large for words, which come again
soon, within the same text, and then no more; with them most of both sums is of classes that have waited long.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

HORIZON = 100
"""A running value is the plain average of its first 100 batches; after them it forgets with rate 1/100."""

SMALL_MEAN = 0.05
"""Up to this share of the mean norm of the centred activations, their mean counts as having no direction."""

SAMPLED = 1024
"""The most classes of which it is known when they came first."""

FORGOTTEN = 1e-20
"""Up to this mean sum of ages, no class was seen once, or none has been for thousands of batches."""

LEAST_SPREAD = 0.01
"""The variance of log c of rare rows counts as at least this: from equal counts no slope can be found."""

_ROWS, _ACTIVATIONS = 0, 1
_NUMBERS = "mean", "norms", "along", "returning"
"""The buffers that are no integers."""


def sampling_stride(classes: int) -> int:
    """Return the least power of two by which so many classes are sampled evenly, ``SAMPLED`` of them at most.

    >>> [sampling_stride(classes) for classes in (0, 1024, 1025, 5000)]
    [1, 1, 2, 8]
    """
    return 1 << (max(0, -(-classes // SAMPLED) - 1)).bit_length()


def level_line(along: Tensor) -> Tensor:
    """Return the buffer ``along`` of a state: some have the mean of y alone, which stands for a level line."""
    return F.pad(along.reshape(1), (1, 2)) if along.dim() == 0 else along


class RunningStatistics(nn.Module):
    """The mean activation, the mean norm of the familiar rows, and the mean norm of the (centred) activations.

    For writes across the mean there is also ``along``: of rare rows, with y the component along the mean and x = log c,
    the means of x, y, x² and xy. And there are the means of both sums of c* (``returning``), and for each sampled class
    the number of batches before it came ``first``, 0 where that was not seen.

    All are buffers, so that training resumes bit for bit, and stay at least float32 when the model's dtype changes.
    """

    mean: Tensor
    norms: Tensor
    along: Tensor
    returning: Tensor
    batches: Tensor
    along_batches: Tensor
    seen: Tensor
    first: Tensor

    def __init__(self, features: int, classes: int, *, device: torch.device | str | None, dtype: torch.dtype) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(features, device=device, dtype=dtype))
        self.register_buffer("norms", torch.zeros(2, device=device, dtype=dtype))
        self.register_buffer("along", torch.zeros(4, device=device, dtype=dtype))
        self.register_buffer("returning", torch.zeros(2, device=device, dtype=dtype))
        self.register_buffer("batches", torch.zeros(2, device=device, dtype=torch.int64))
        self.register_buffer("along_batches", torch.zeros((), device=device, dtype=torch.int64))
        self.register_buffer("seen", torch.zeros((), device=device, dtype=torch.int64))
        """The activations that were taken in."""
        sampled = -(-classes // sampling_stride(classes))
        self.register_buffer("first", torch.zeros(sampled, device=device, dtype=torch.int64))
        self._knows_rows = False
        self._stride = sampling_stride(classes)

    def reset(self) -> None:
        """Forget everything."""
        for buffer in self.buffers():
            buffer.zero_()
        self._knows_rows = False

    def grow(self, classes: int) -> int:
        """Follow a head that has ``classes`` classes, and return the stride by which they are sampled.

        Fewer of the earlier classes are sampled once a head has outgrown the sample.
        """
        stride = sampling_stride(classes)
        sampled = -(-classes // stride)
        if stride != self._stride or self.first.shape[0] != sampled:
            kept = self.first[:: stride // self._stride][:sampled]
            self.first = torch.cat([kept, kept.new_zeros(sampled - kept.shape[0])])
        self._stride = stride
        return stride

    @contextmanager
    def restored_on_error(self) -> Iterator[None]:
        """Give all values back what they were before the block, if the block raises."""
        before = [buffer.clone() for buffer in self.buffers()]
        try:
            yield
        except BaseException:
            for buffer, old in zip(self.buffers(), before, strict=True):
                buffer.copy_(old)
            raise

    def batches_seen(self) -> Tensor:
        """Return how many batches of activations were taken in."""
        return self.batches[_ACTIVATIONS]

    def knows_rows(self) -> bool:
        """Return whether the norm of familiar rows is known. Until it is, this reads from the device."""
        self._knows_rows = self._knows_rows or int(self.batches[_ROWS]) > 0
        return self._knows_rows

    def see_rows(self, norm_sum: Tensor, rows: int) -> None:
        """Take in the norms of ``rows`` familiar rows."""
        if rows:
            self.norms[_ROWS] += self._share(_ROWS) * (norm_sum / rows - self.norms[_ROWS])

    def see_activations(self, total: Tensor, norm_sum: Tensor, n: Tensor) -> None:
        """Take in ``n`` activations, given their sum and the sum of their centred norms."""
        share = self._share(_ACTIVATIONS)
        self.seen += n
        self.mean += share * (total / n - self.mean)
        self.norms[_ACTIVATIONS] += share * (norm_sum / n - self.norms[_ACTIVATIONS])

    def direction(self) -> Tensor:
        """Return the mean activation divided by its norm; zeros while that is small beside the activations."""
        norm = torch.linalg.vector_norm(self.mean)
        has_one = norm > SMALL_MEAN * self.norms[_ACTIVATIONS]
        return torch.where(has_one, self.mean / torch.where(has_one, norm, 1), 0)

    def see_along(self, sums: Tensor, rows: Tensor) -> None:
        """Take in ``rows`` rows that were seen a few times, given the sums of x, y, x² and xy over them."""
        known = rows > 0
        self.along_batches += known
        share = known / self.along_batches.clamp(1, HORIZON).to(self.along.dtype)
        self.along += share * (sums / rows.clamp_min(1) - self.along)

    def see_returning(self, counts: Tensor, classes: Tensor, n: Tensor) -> None:
        """Take in how often classes seen once have come, given the counts before a batch, its classes and their n.

        This comes before ``see_activations``.
        """
        stride = self.grow(counts.shape[0])
        batches = self.batches_seen()
        ages = batches - self.first
        waited = (ages * (counts[::stride] == 1)).sum()
        slots, before, sampled = classes // stride, counts[classes], classes % stride == 0
        came = (ages[slots] * n * (sampled & (before == 1))).sum()
        share = (batches + 1).clamp_max(HORIZON).to(self.returning.dtype).reciprocal()
        self.returning += share * (torch.stack([came, waited]).to(self.returning.dtype) - self.returning)
        # No class that is new has come before, so this is where it came first; 0 leaves the others as they are.
        self.first.scatter_reduce_(0, slots, torch.where(sampled & (before == 0), batches, 0), "amax")

    def usual_component(self) -> Tensor:
        """Return the component along the mean that a first write sets.

        The logarithm of how likely a class is grows with that component, so it is about linear in log c. This is where
        the line of least squares through rare rows is at c*, which is at least 1; a line that falls counts as level.
        It is at most the mean component of rare rows, and that where no class was seen once, because all come often.

        The batch of the first write has been taken in by ``see_returning`` and then by ``see_activations``.
        """
        x, y, squares, products = self.along
        came, waited = self.returning
        known = waited > FORGOTTEN
        often = came / torch.where(known, waited, 1)
        count = torch.where(known, often * (self.batches_seen() - 1), torch.inf).clamp_min(1)
        slope = (products - x * y).clamp_min(0) / (squares - x * x).clamp_min(LEAST_SPREAD)
        usual: Tensor = y + slope * (count.log() - x).clamp_max(0)
        return usual

    def scale(self) -> Tensor:
        """Return the norm of the familiar rows over the norm of the activations; 1 while either is unknown."""
        rows, activations = self.norms[_ROWS], self.norms[_ACTIVATIONS]
        known = (self.batches[_ROWS] > 0) & (activations > 0)
        return torch.where(known, rows / torch.where(known, activations, 1), 1)

    def _share(self, which: int) -> Tensor:
        """Count a batch, and return its weight in the running value."""
        self.batches[which] += 1
        return self.batches[which].clamp_max(HORIZON).to(self.norms.dtype).reciprocal()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Complete a pickle of a version that had fewer buffers."""
        super().__setstate__(state)
        mean, self._stride = self.mean, state.get("_stride", 1)
        for name, buffer in type(self)(mean.shape[0], 0, device=mean.device, dtype=mean.dtype).named_buffers():
            if name not in self._buffers:
                self.register_buffer(name, buffer)
        self.along = level_line(self.along)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> RunningStatistics:
        before = {name: getattr(self, name) for name in _NUMBERS}
        super()._apply(fn, recurse)
        for name, old in before.items():
            new = getattr(self, name)
            if torch.finfo(new.dtype).bits < 32:
                setattr(self, name, old.to(new.device, torch.promote_types(new.dtype, torch.float32)))
        return self

    def _load_from_state_dict(self, *args: Any) -> None:
        self._knows_rows = False
        super()._load_from_state_dict(*args)
        for name, value in self._buffers.items():  # with assign=True a state of another dtype is taken as it is
            assert value is not None
            wide = torch.promote_types(value.dtype, torch.float32) if name in _NUMBERS else torch.int64
            setattr(self, name, value.to(wide))
