"""The checks of the memories' arguments. Every error names the argument, what was given and what is allowed."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from hebbian_softmax.checks import check_integer, check_number
from hebbian_softmax.loss.dtypes import wide

P = ParamSpec("P")
T = TypeVar("T")


def evaluating(method: Callable[P, T]) -> Callable[P, T]:
    """Run a method of (self, h, ...) without gradients, and without autocast, which would coarsen its products."""

    @functools.wraps(method)
    def evaluate(*args: P.args, **options: P.kwargs) -> T:
        h = options.get("h", args[1] if len(args) > 1 else None)
        device = h.device.type if isinstance(h, Tensor) else "cpu"
        with torch.no_grad(), torch.autocast(device, enabled=False):
            return method(*args, **options)

    return evaluate


def check_positive(name: str, value: Any) -> float:
    """Return ``value`` as a float; it must be positive, and float32 must hold it with full precision."""
    number = check_number(name, value, 0)
    limits = torch.finfo(torch.float32)
    if not limits.tiny <= number <= limits.max:
        raise ValueError(f"{name} must be positive and finite in float32, from 1.2e-38 to 3.4e38, got {value!r}")
    return number


def check_workspace(workspace: Any, device: torch.device, *, cpu: int = 2**25, other: int = 2**30) -> int:
    """Return the workspace in bytes; the default is small on a CPU, where tiles should stay in its caches."""
    if workspace is None:
        return cpu if device.type == "cpu" else other
    return check_integer("workspace", workspace, 1)


def check_list(name: str, values: Any) -> list[Any]:
    """Return ``values`` as a list; it must be a sequence of at least one value."""
    if isinstance(values, str) or not isinstance(values, Sequence) or len(values) == 0:
        raise ValueError(f"{name} must be a list of at least one value, got {values!r}")
    return list(values)


def check_activations(h: Any) -> Tensor:
    """Return activations (d,), (T, d) or (B, T, d) as (B, T, d); their inner products must be finite.

    The values are read on every device. That costs one wait, but a bad value would stay stored for n positions.
    """
    if not isinstance(h, Tensor):
        raise TypeError(f"h must be a tensor, got {type(h).__name__}")
    if not h.is_floating_point():
        raise TypeError(f"h must be floating point, got {h.dtype}")
    if h.dim() not in (1, 2, 3) or h.shape[-1] == 0:
        raise ValueError(f"h must have shape (d,), (T, d) or (streams, T, d), got {tuple(h.shape)}")
    if h.numel():
        low, high = h.detach().aminmax()
        largest = float(torch.maximum(-low, high))
        if not math.isfinite(largest):
            raise ValueError(f"h must be finite, got {int((~h.isfinite()).sum())} values that are inf or NaN")
        # Differences, distances and the GPU's kernel need room, so only a ten-thousandth of the range is used.
        if largest * largest * h.shape[-1] > torch.finfo(wide(h.dtype)).max * 1e-4:
            raise ValueError(f"h must have finite inner products in {wide(h.dtype)}, got values up to {largest:g}")
    return h.detach().reshape((1,) * (3 - h.dim()) + tuple(h.shape))


def check_pair(h: Any, targets: Any) -> tuple[Tensor, Tensor]:
    """Return activations (..., d) and their classes (...) as (B, T, d) and int64 (B, T)."""
    streams = check_activations(h)
    if not isinstance(targets, Tensor):
        raise TypeError(f"targets must be a tensor, got {type(targets).__name__}")
    if targets.is_floating_point() or targets.is_complex() or targets.dtype == torch.bool:
        raise TypeError(f"targets must be class indices of an integer dtype, got {targets.dtype}")
    if targets.shape != h.shape[:-1]:
        raise ValueError(f"targets must have shape {tuple(h.shape[:-1])} to go with h, got {tuple(targets.shape)}")
    if targets.device != h.device:
        raise ValueError(f"targets must be on the device of h, {h.device}, got {targets.device}")
    if targets.numel() and int(targets.min()) < 0:
        raise ValueError(f"targets must be at least 0, got {int(targets.min())}")
    return streams, targets.long().reshape(streams.shape[:-1])


def check_classes(name: str, labels: Tensor, num_classes: int) -> None:
    """Check that labels, which are at least 0, are below ``num_classes``."""
    if labels.numel() and int(labels.max()) >= num_classes:
        raise ValueError(f"{name} must be in [0, {num_classes - 1}], got {int(labels.max())}")


def check_layer(h: Tensor, weight: Any, bias: Any) -> None:
    """Check that an output layer, (V, d) and (V,), goes with activations (..., d)."""
    for name, value in (("weight", weight), ("bias", bias)):
        if name == "bias" and value is None:
            continue
        if not isinstance(value, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(value).__name__}")
        if value.dtype != h.dtype:
            raise TypeError(f"{name} must have the dtype of h, {h.dtype}, got {value.dtype}")
        if value.device != h.device:
            raise ValueError(f"{name} must be on the device of h, {h.device}, got {value.device}")
    if weight.dim() != 2 or weight.shape[1] != h.shape[-1]:
        raise ValueError(f"weight must have shape (classes, {h.shape[-1]}), got {tuple(weight.shape)}")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias must have shape ({weight.shape[0]},), got {tuple(bias.shape)}")
