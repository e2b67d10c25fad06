"""The running values of activations and rows that what is written depends on."""

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

LEAST_SPREAD = 0.01
"""The variance of log c of rare rows counts as at least this: from equal counts no slope can be found."""

_ROWS, _ACTIVATIONS = 0, 1


def level_line(along: Tensor) -> Tensor:
    """Return the buffer ``along`` of a state: some have the mean of y alone, which stands for a level line."""
    return F.pad(along.reshape(1), (1, 2)) if along.dim() == 0 else along


@contextmanager
def restored_on_error(*modules: nn.Module) -> Iterator[None]:
    """Give all buffers of modules back what they were before the block, if the block raises."""
    buffers = [buffer for module in modules for buffer in module.buffers()]
    before = [buffer.clone() for buffer in buffers]
    try:
        yield
    except BaseException:
        for buffer, old in zip(buffers, before, strict=True):
            buffer.copy_(old)
        raise


class RunningStatistics(nn.Module):
    """The mean activation, the mean norm of the familiar rows, and the mean norm of the (centred) activations.

    For writes across the mean there is also ``along``: of rare rows, with y the component along the mean and x = log c,
    the means of x, y, x² and xy.

    All are buffers, so that training resumes bit for bit, and stay at least float32 when the model's dtype changes.
    """

    mean: Tensor
    norms: Tensor
    along: Tensor
    batches: Tensor
    along_batches: Tensor
    seen: Tensor

    def __init__(self, features: int, *, device: torch.device | str | None, dtype: torch.dtype) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(features, device=device, dtype=dtype))
        self.register_buffer("norms", torch.zeros(2, device=device, dtype=dtype))
        self.register_buffer("along", torch.zeros(4, device=device, dtype=dtype))
        self.register_buffer("batches", torch.zeros(2, device=device, dtype=torch.int64))
        self.register_buffer("along_batches", torch.zeros((), device=device, dtype=torch.int64))
        self.register_buffer("seen", torch.zeros((), device=device, dtype=torch.int64))
        """The activations that were taken in."""
        self._knows_rows = False

    def reset(self) -> None:
        """Forget everything."""
        for buffer in self.buffers():
            buffer.zero_()
        self._knows_rows = False

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

    def usual_component(self, count: Tensor) -> Tensor:
        """Return the component along the mean that a rare row has whose class was seen ``count`` times.

        The logarithm of how likely a class is grows with that component, so it is about linear in log c. This is where
        the line of least squares through rare rows is at that count; a line that falls counts as level.
        """
        x, y, squares, products = self.along
        slope = (products - x * y).clamp_min(0) / (squares - x * x).clamp_min(LEAST_SPREAD)
        usual: Tensor = y + slope * (count.to(y.dtype).log() - x)
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
        mean = self.mean
        for name, buffer in type(self)(mean.shape[0], device=mean.device, dtype=mean.dtype).named_buffers():
            if name not in self._buffers:
                self.register_buffer(name, buffer)
        self.along = level_line(self.along)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> RunningStatistics:
        before = {name: getattr(self, name) for name in ("mean", "norms", "along")}
        super()._apply(fn, recurse)
        for name, old in before.items():
            new = getattr(self, name)
            if torch.finfo(new.dtype).bits < 32:
                setattr(self, name, old.to(new.device, torch.promote_types(new.dtype, torch.float32)))
        return self

    def _load_from_state_dict(self, *args: Any) -> None:
        self._knows_rows = False
        super()._load_from_state_dict(*args)
        for name in ("mean", "norms", "along"):  # with assign=True a state of another dtype is taken as it is
            value = getattr(self, name)
            setattr(self, name, value.to(torch.promote_types(value.dtype, torch.float32)))
        self.seen = self.seen.long()
