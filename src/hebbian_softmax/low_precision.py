"""The weight in bfloat16, beside the float32 one that learns."""

from __future__ import annotations

import torch
from torch import Tensor


class LowPrecisionCopy:
    """``weight`` rounded to bfloat16, for the matrix products of a loss in that precision.

    It is derived, so no state dict has it, and is made anew when the weight has changed in any way that autograd
    would notice (not through ``.data``, nor between two replays of a CUDA graph, which asks nobody). The one-pass
    optimizers write it along with the weight.
    """

    def __init__(self) -> None:
        self._tensor: Tensor | None = None
        self._source: tuple[int, int] | None = None

    def of(self, weight: Tensor) -> Tensor:
        """The copy, up to date."""
        copy = self.room_for(weight)
        if self._source != _identity(weight):
            copy.copy_(weight.detach())
            self.note(weight)
        return copy

    def room_for(self, weight: Tensor) -> Tensor:
        """The copy as it is; empty at first and after the weight has grown or moved."""
        copy = self._tensor
        if copy is None or copy.shape != weight.shape or copy.device != weight.device:
            with torch.inference_mode(False):  # an evaluation may come first, and training changes it in place
                copy = torch.empty(weight.shape, dtype=torch.bfloat16, device=weight.device)
            self._tensor, self._source = copy, None
        return copy

    def note(self, weight: Tensor) -> None:
        """The copy holds the weight as it is now."""
        self._source = _identity(weight)


def _identity(weight: Tensor) -> tuple[int, int]:
    return weight.data_ptr(), weight._version


def wants_low_precision(h: Tensor) -> bool:
    """Whether products with ``h`` run in bfloat16: it is, or autocast makes it. Not for torch.func's stand-ins."""
    if torch._C._are_functorch_transforms_active():
        return False  # the weight is then a wrapper without memory
    device = h.device.type
    if torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device) == torch.bfloat16 and h.dtype != torch.float64
    return h.dtype == torch.bfloat16
