"""Checks of the layer's arguments. Each raises before anything changes, and names the argument and what is allowed."""

from __future__ import annotations

import math
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor, nn

from hebbian_softmax import _torch

WRITES = ("literal", "centred", "across")
_PROBABILITIES = "that are not class indices must be probabilities, none negative and with the sum 1 over the classes"


def check_number(name: str, value: Any, low: float, high: float = math.inf) -> float:
    """Return ``value`` as a float if it is a number in [low, high]."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number, got {value!r}")
    if not low <= float(value) <= high:
        allowed = f"at least {low:g}" if high == math.inf else f"in [{low:g}, {high:g}]"
        raise ValueError(f"{name} must be {allowed}, got {value!r}")
    return float(value)


def check_integer(name: str, value: Any, low: int, high: int | None = None) -> int:
    """Return ``value`` as an int if it is an integer of at least ``low``, and at most ``high`` if that is given."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} must be an integer, got {value!r}")
    number = int(value)
    if number < low:
        raise ValueError(f"{name} must be at least {low}, got {value!r}")
    if high is not None and number > high:
        raise ValueError(f"{name} must be at most {high}, got {value!r}")
    return number


def check_flag(name: str, value: Any) -> bool:
    """Return ``value`` if it is True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}")
    return value


def check_dtype(dtype: Any) -> torch.dtype | None:
    """Return ``dtype`` if it is None or a floating-point dtype of torch."""
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise TypeError(f"dtype must be a floating-point dtype of torch, got {dtype!r}")
    return dtype


def check_scale(scale: Any) -> float | str:
    """Return ``scale`` if it is ``"match"`` or a finite number."""
    if isinstance(scale, str):
        if scale != "match":
            raise ValueError(f'scale must be "match" or a number, got {scale!r}')
        return scale
    value = check_number("scale", scale, -math.inf)
    if not math.isfinite(value):
        raise ValueError(f'scale must be "match" or a finite number, got {scale!r}')
    return value


def check_write(write: Any) -> str:
    """Return ``write`` if it names a way to write."""
    if write not in WRITES:
        raise ValueError(f"write must be one of {', '.join(map(repr, WRITES))}, got {write!r}")
    return str(write)


def check_start(start: Any, most: int) -> int | str:
    """Return ``start`` if it is ``"auto"`` or a number of batches."""
    if isinstance(start, str):
        if start != "auto":
            raise ValueError(f'start must be "auto" or a number of batches, got {start!r}')
        return start
    return check_integer("start", start, 0, most)


def check_rate_values(value: Any, counts: Tensor) -> Tensor:
    """Return what a rate computed for ``counts`` if it is one λ for each; on the CPU its values are checked, too."""
    if not isinstance(value, Tensor) or value.shape != counts.shape:
        what = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(f"rate must return one λ for each of {counts.numel()} counts, got {what}")
    if value.device.type == "cpu" and not bool(((value >= 0) & (value <= 1)).all()):
        raise ValueError(f"rate must return λ in [0, 1], got {value.tolist()} for counts {counts.tolist()}")
    return value


def check_batch(h: Tensor, targets: Tensor, *, features: int, classes: int | None = None) -> tuple[Tensor, Tensor]:
    """Check shapes and dtypes of activations (..., features) and targets (...); return both flattened.

    With ``classes``, targets may also be probabilities (..., classes), which become (N, classes).
    """
    for name, value in (("h", h), ("targets", targets)):
        if not isinstance(value, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(value).__name__}")
    if not h.is_floating_point():
        raise TypeError(f"h must be floating point, got {h.dtype}")
    soft = classes is not None and targets.is_floating_point() and targets.dim() == h.dim()
    if not soft and (targets.is_floating_point() or targets.is_complex() or targets.dtype == torch.bool):
        or_else = "" if classes is None else f"; probabilities must have shape (..., {classes})"
        raise TypeError(f"targets must be class indices of an integer dtype, got {targets.dtype}{or_else}")
    if h.dim() == 0 or h.shape[-1] != features:
        logits = classes is not None and h.dim() > 0 and h.shape[-1] == classes
        hint = "; give the head's input, not its logits" if logits else ""
        raise ValueError(f"h must have shape (..., {features}), got {tuple(h.shape)}{hint}")
    if soft and targets.shape != (*h.shape[:-1], classes):
        shape = (*h.shape[:-1], classes)
        raise ValueError(f"targets of probabilities must have shape {shape} to go with h, got {tuple(targets.shape)}")
    if not soft and targets.shape != h.shape[:-1]:
        hint = "; probabilities must be floating point" if targets.shape == (*h.shape[:-1], classes) else ""
        shape = tuple(h.shape[:-1])
        raise ValueError(f"targets must have shape {shape} to go with h, got {tuple(targets.shape)}{hint}")
    if targets.device != h.device:
        raise ValueError(f"targets must be on the device of h, {h.device}, got {targets.device}")
    flat = h.reshape(-1, features)
    return flat, targets.reshape(flat.shape[0], targets.shape[-1]) if soft else targets.reshape(-1).long()


def check_targets(targets: Tensor, classes: int) -> Tensor:
    """Return targets without their activations, classes as (N,) and probabilities as (N, classes), if they are such."""
    if not isinstance(targets, Tensor):
        raise TypeError(f"targets must be a tensor, got {type(targets).__name__}")
    soft = targets.is_floating_point() and targets.dim() > 0 and targets.shape[-1] == classes
    shape = targets.shape[:-1] if soft else targets.shape
    return check_batch(torch.empty((*shape, 1), device=targets.device), targets, features=1, classes=classes)[1]


def check_activations(h: Tensor, features: int) -> Tensor:
    """Return activations (..., features) as (N, features), if they are such."""
    targets = torch.zeros(h.shape[:-1], dtype=torch.int64, device=h.device) if isinstance(h, Tensor) else h
    return check_batch(h, targets, features=features)[0]


def check_probabilities(targets: Tensor) -> None:
    """Check that the rows of soft targets (N, classes) are probabilities: none negative, each row with the sum 1.

    Sums may be off by 0.001, and for dtypes with fewer digits by four times the rounding of 1. An accelerator checks by
    itself, since reading the values back would stall it.
    """
    if targets.is_meta or targets.numel() == 0 == targets.shape[0] or _torch.is_transforming():
        return
    targets = targets.detach()
    sums = targets.sum(1, dtype=torch.promote_types(targets.dtype, torch.float32))
    negative = ~(targets >= 0).all(1)  # a NaN counts as negative
    bad = negative | ~((sums - 1).abs() <= max(1e-3, 4 * torch.finfo(targets.dtype).eps))
    if targets.device.type != "cpu":
        _torch.assert_on_device(~bad.any(), f"targets {_PROBABILITIES}")
    elif bool(bad.any()):
        row = int(bad.nonzero()[0])
        found = f"{float(targets[row].min()):g} in" if bool(negative[row]) else f"the sum {float(sums[row]):g} of"
        raise ValueError(f"targets {_PROBABILITIES}, got {found} row {row}")


def majority_class(probabilities: Tensor, ignore_index: int) -> Tensor:
    """Return the class that has more than half of the probability (..., classes); ``ignore_index`` where none has.

    >>> majority_class(torch.tensor([[0.7, 0.3, 0.0], [0.5, 0.5, 0.0], [0.1, 0.0, 0.9]]), -100).tolist()
    [0, -100, 2]
    """
    if probabilities.shape[-1] == 0:
        return probabilities.new_full(probabilities.shape[:-1], ignore_index, dtype=torch.int64)
    largest, classes = probabilities.detach().max(-1)
    return torch.where(largest > 0.5, classes, ignore_index)


def classes_to_memorize(targets: Tensor, ignore_index: int, token_weight: Tensor | None = None) -> Tensor:
    """Return the classes (N,) of classes or probabilities; ``ignore_index`` for tokens whose weight is 0 or less."""
    classes = majority_class(targets, ignore_index) if targets.is_floating_point() else targets
    return classes if token_weight is None else classes.masked_fill(token_weight.reshape(-1) <= 0, ignore_index)


def check_same_place(weight: Tensor, h: Tensor) -> None:
    """Refuse activations on another device than the weight, and a weight without values."""
    if weight.is_meta and not h.is_meta:
        raise ValueError("weight is on the meta device and has no values; materialise the head first (to_empty, load)")
    if weight.device.type != h.device.type:
        raise ValueError(f"h must be on the device of the head's weight, {weight.device}, got {h.device}")


def check_target_values(targets: Tensor, *, num_classes: int, ignore_index: int) -> None:
    """Check the values of classes or probabilities, of classes on the CPU only: reading them back would stall a GPU.

    The values of a sample inside of ``vmap`` cannot be read; there the loss fails as ``F.cross_entropy`` does.
    """
    if targets.is_floating_point():
        check_probabilities(targets)
        return
    if targets.device.type != "cpu" or _torch.is_vmapped(targets):
        return
    bad = ((targets < 0) | (targets >= num_classes)) & (targets != ignore_index)
    if bool(bad.any()):
        value = int(targets[bad][0])
        raise ValueError(f"targets must be {allowed_targets(num_classes, ignore_index)}, got {value}")


def allowed_targets(num_classes: int, ignore_index: int) -> str:
    """Return in words which values targets may have.

    >>> allowed_targets(10, -100)
    'in [0, 9] or ignore_index=-100'
    """
    if num_classes == 0:
        return f"ignore_index={ignore_index} while there are no classes"
    return f"in [0, {num_classes - 1}] or ignore_index={ignore_index}"


def check_weight(module: nn.Module) -> nn.Parameter:
    """Return the weight of ``module`` if the rule can write it: a real parameter with one row for each class."""
    weight = _torch.own_parameter(module, "weight")
    if not isinstance(weight, nn.Parameter):
        raise TypeError(
            "weight must be a parameter of the head; a computed one (parametrizations, weight norm) has no rows"
        )
    if weight.is_meta:
        raise ValueError("weight is on the meta device and has no values; materialise the head first (to_empty, load)")
    if weight.dim() != 2:
        raise ValueError(
            f"weight has shape {tuple(weight.shape)}, not one row for each class; "
            "of sharded weights the rule writes those of fully_shard (FSDP2) only"
        )
    return weight
