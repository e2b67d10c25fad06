"""A copy of the weight in bfloat16, beside the float32 weight that learns."""

from __future__ import annotations

import torch
from torch import Tensor

from hebbian_softmax import _torch
from hebbian_softmax.loss.dtypes import product_dtype


class LowPrecisionCopy:
    """The weight rounded to bfloat16, for the matrix products of a loss in that precision.

    State dicts do not have the copy, because it is made from the weight: anew whenever the weight has changed in a way
    that autograd notices. Changes through ``.data`` are not noticed, and neither are changes between two replays of a
    CUDA graph, which runs no Python. The one-pass optimizers write the copy along with the weight.
    """

    def __init__(self) -> None:
        self._tensor: Tensor | None = None
        self._source: tuple[int, int, int] | None = None

    def for_products(self, weight: Tensor, h: Tensor) -> Tensor | None:
        """Return the copy of ``weight`` if products with ``h`` run in bfloat16; None where they do not."""
        if torch.compiler.is_compiling() or _torch.is_transforming():
            return None  # in a transform the weight is a wrapper without memory
        if h.dtype == torch.float32 and not torch.is_autocast_enabled(h.device.type):
            return None
        return self.of(weight) if product_dtype(h) == torch.bfloat16 else None

    @torch.no_grad()
    def of(self, weight: Tensor) -> Tensor:
        """Return the copy of ``weight``, up to date; of a sharded weight, a copy of the rows that this rank holds."""
        rows = _torch.local_rows(weight)
        copy = self.room_for(rows)
        if self._source != _identity(rows, weight):
            copy.copy_(rows)
            self._source = _identity(rows, weight)
        return copy

    def room_for(self, weight: Tensor) -> Tensor:
        """Return the copy as it is; at first, and after the weight has grown or moved, its values have no meaning."""
        copy = self._tensor
        if copy is None or copy.shape != weight.shape or copy.device != weight.device:
            with torch.inference_mode(False):  # training changes it in place, also if an evaluation came first
                copy = torch.empty(weight.shape, dtype=torch.bfloat16, device=weight.device)
            self._tensor, self._source = copy, None
        return copy

    def note(self, weight: Tensor) -> None:
        """Note that the copy holds the weight as it is now."""
        self._source = _identity(weight, weight)


def _identity(rows: Tensor, weight: Tensor) -> tuple[int, int, int]:
    """Return what tells whether the values changed: a change of a DTensor does not count as one of its rows."""
    return rows.data_ptr(), _torch.version(rows), _torch.version(weight)
