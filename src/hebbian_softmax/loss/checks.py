"""The options of a loss, and the checks of all arguments: errors name the argument, what was given, what is allowed."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from hebbian_softmax import _torch
from hebbian_softmax.checks import allowed_targets, check_integer, check_number
from hebbian_softmax.loss.dtypes import autocasts
from hebbian_softmax.rows import RowPart

IMPLEMENTATIONS = ("auto", "reference", "chunked", "triton")
REDUCTIONS = ("mean", "sum", "none")


@dataclass(frozen=True)
class Options:
    """The options that ``linear_cross_entropy`` and ``head.loss`` have in common; they are described there."""

    weight: Tensor | None = None
    reduction: str = "mean"
    ignore_index: int = -100
    label_smoothing: float = 0.0
    prior: Tensor | None = None
    token_weight: Tensor | None = None
    temperature: float = 1.0
    softcap: float | None = None
    z_loss: float = 0.0

    def check(self, linear_weight: Tensor, shape: tuple[int, ...] = (), part: RowPart | None = None) -> None:
        """Check all of them, for a matrix with a row for each class, or a part of it, and targets of a shape."""
        check_options(self.reduction, self.ignore_index, self.label_smoothing)
        check_constant_of_classes("weight", self.weight, linear_weight, part)
        check_prior(self.prior, linear_weight, part)
        check_token_weight(self.token_weight, linear_weight, shape)
        check_shape_of_logits(self.temperature, self.softcap, self.z_loss)

    def decisive(self) -> list[object]:
        """Return what of them decides on exchanges between ranks: all but the values of tensors."""
        numbers = self.label_smoothing, self.temperature, self.softcap, self.z_loss
        tensors = self.weight, self.prior, self.token_weight
        return [
            self.reduction,
            self.ignore_index,
            *(None if each is None else float(each) for each in numbers),  # so that 0 and 0.0 are alike
            *(None if each is None else tuple(each.shape) for each in tensors),
        ]

    @property
    def plain(self) -> bool:
        """Whether the loss of a row is its negative log-likelihood under the logits as they are."""
        given, numbers = (self.weight, self.prior, self.token_weight, self.softcap), (self.label_smoothing, self.z_loss)
        return all(each is None for each in given) and numbers == (0, 0) and self.temperature == 1


def check_operands(input: Any, linear_weight: Any, linear_bias: Any, target: Any = None) -> None:
    """Check the types, shapes, devices and dtypes of the tensors."""
    optional = {"linear_bias": linear_bias, "target": target}
    present = {name: value for name, value in optional.items() if value is not None}
    for name, value in ({"input": input, "linear_weight": linear_weight} | present).items():
        if not isinstance(value, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(value).__name__}")
        if name != "target" and not value.is_floating_point():
            raise TypeError(f"{name} must be floating point, got {value.dtype}")
        if value.device != input.device:
            raise ValueError(f"{name} must be on the device of input, {input.device}, got {value.device}")
    if linear_weight.dim() != 2:
        raise ValueError(f"linear_weight must have shape (classes, features), got {tuple(linear_weight.shape)}")
    classes, features = linear_weight.shape
    if input.dim() not in (1, 2) or input.shape[-1] != features:
        allowed = f"({features},) or (N, {features})"
        found = f"{tuple(linear_weight.shape)} (classes, features)"
        raise ValueError(f"input must have shape {allowed} to go with linear_weight {found}, got {tuple(input.shape)}")
    if linear_bias is not None and linear_bias.shape != (classes,):
        raise ValueError(f"linear_bias must have shape ({classes},), got {tuple(linear_bias.shape)}")
    if target is not None:
        if target.is_floating_point() or target.is_complex() or target.dtype == torch.bool:
            raise TypeError(f"target must be class indices of an integer dtype, got {target.dtype}")
        if target.shape != input.shape[:-1]:
            shape = tuple(input.shape[:-1])
            raise ValueError(f"target must have shape {shape} to go with input, got {tuple(target.shape)}")
    if not autocasts(input):  # Autocast brings all of them to one dtype.
        for name, value in (("linear_weight", linear_weight), ("linear_bias", linear_bias)):
            if value is not None and value.dtype != input.dtype:
                raise TypeError(f"{name} must have the dtype of input, {input.dtype}, got {value.dtype}")


def is_usual(input: Any, linear_weight: Any, target: Any) -> bool:
    """Return whether the tensors are right at a glance; False means that they need the other checks.

    Those take longer than a small loss does.
    """
    try:
        (n, features), (classes, width), (m,) = input.shape, linear_weight.shape, target.shape
    except (AttributeError, TypeError, ValueError):
        return False
    return bool(
        features == width
        and n == m
        and classes > 0
        and input.dtype is linear_weight.dtype
        and target.dtype is torch.int64
        and input.is_floating_point()
        and input.device == linear_weight.device == target.device
    )


def check_same_dtype(weight: Tensor, h: Tensor) -> None:
    """Check that activations have the dtype of the head's weight, or that autocast brings both to one dtype."""
    if h.dtype != weight.dtype and not autocasts(h):
        raise TypeError(
            f"h must have the dtype of the head's weight, {weight.dtype}, got {h.dtype}; call head.loss under "
            "torch.autocast, or convert h"
        )


def agreement(rows: Any, like: Any) -> AbstractContextManager[list[Any]]:
    """Return the context in which arguments are checked: where ranks share the rows, they refuse them together."""
    if rows is None:
        return nullcontext([])
    if not isinstance(rows, RowPart):
        raise TypeError(f"rows must be a RowPart, as RowPart.of(weight) gives it, got {type(rows).__name__}")
    if isinstance(like, Tensor) and must_be_traced(like):
        raise RuntimeError(
            "a matrix whose rows are shared among ranks cannot go through torch.func, forward-mode differentiation, "
            "torch.export or tensors without values"
        )
    return rows.agreement(like)


def check_part(rows: RowPart, impl: str, linear_weight: Any, *others: Any) -> None:
    """Check that ``linear_weight`` has the rows that this rank is to have, and that an engine can exchange the rest."""
    if any(isinstance(each, Tensor) and _torch.is_sharded(each) for each in (linear_weight, *others)):
        raise TypeError("with rows=, pass the rows of this rank, weight.to_local(), and no DTensor")
    if isinstance(linear_weight, Tensor) and linear_weight.dim() == 2 and linear_weight.shape[0] != rows.rows:
        raise ValueError(
            f"linear_weight must have the {rows.rows} rows of this rank, from class {rows.start} on, got shape "
            f"{tuple(linear_weight.shape)}"
        )
    if impl == "reference":
        raise ValueError('impl="reference" needs all rows on one rank; with rows= use "auto", "chunked" or "triton"')


def must_be_traced(*tensors: Tensor) -> bool:
    """Return whether something must trace the computation, which an autograd node would hide from it.

    That is so under torch.func, in forward-mode differentiation, for export, and for tensors without values.
    """
    if _torch.is_transforming() or _torch.is_exporting():
        return True
    if any(each.is_meta or _torch.is_fake(each) for each in tensors):
        return True
    return _torch.is_in_forward_mode() and any(forward_ad.unpack_dual(each).tangent is not None for each in tensors)


def check_constant_of_classes(name: str, value: Any, linear_weight: Tensor, part: RowPart | None = None) -> None:
    """Check class weights or a prior: constants, one for each class of all ranks; None is allowed."""
    instead = "learn a linear_bias instead" if name == "prior" else "class weights are those of F.cross_entropy"
    classes, of_each = (linear_weight.shape[0], "class") if part is None else (part.total, "class of all ranks")
    _check_constant(name, value, of_each, (classes,), linear_weight, instead)


def _check_constant(
    name: str, value: Any, of_each: str, shape: tuple[int, ...], linear_weight: Tensor, instead: str
) -> None:
    """Check numbers without a gradient, one for each class or target; ``instead`` says what has one."""
    if value is None:
        return
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a tensor with a number for each {of_each}, got {type(value).__name__}")
    if not value.is_floating_point():
        raise TypeError(f"{name} must be floating point, got {value.dtype}")
    if value.shape != shape:
        raise ValueError(
            f"{name} must have shape {tuple(shape)}, one number for each {of_each}, got {tuple(value.shape)}"
        )
    if value.device != linear_weight.device:
        raise ValueError(f"{name} must be on the device of linear_weight, {linear_weight.device}, got {value.device}")
    if value.requires_grad:
        raise ValueError(f"{name} must not require a gradient, because it is a constant: {instead}")


def check_prior(prior: Any, linear_weight: Tensor, part: RowPart | None = None) -> None:
    """Check the additive terms of classes: constants that are numbers or -inf. An accelerator checks the values."""
    check_constant_of_classes("prior", prior, linear_weight, part)
    if prior is None or not _has_values(prior):
        return
    good = prior < torch.inf  # which a NaN is not
    message = "prior must be a number or -inf for each class"
    if prior.device.type != "cpu":
        _torch.assert_on_device(good.all(), message)
    elif not bool(good.all()):
        raise ValueError(f"{message}, got {float(prior[~good][0])}")


def check_possible(target: Tensor, prior: Tensor, ignore_index: int) -> None:
    """Refuse targets that ``prior`` masks, on a CPU only; elsewhere reading them would wait for the device."""
    if target.device.type != "cpu" or not _has_values(target) or not _has_values(prior):
        return
    counted = target[target != ignore_index]
    masked = counted[prior[counted] == -torch.inf]
    if masked.numel():
        raise ValueError(f"target must not be a class that prior masks with -inf, got {int(masked[0])}")


def check_probabilities_possible(probabilities: Tensor, prior: Tensor, token_weight: Tensor | None) -> None:
    """Refuse soft targets (N, V) with a probability for a class that ``prior`` masks, on a CPU only.

    Rows whose weight is 0 take no part, whatever their targets are.
    """
    if probabilities.device.type != "cpu" or not _has_values(probabilities) or not _has_values(prior):
        return
    masked = (probabilities.detach() != 0) & (prior == -torch.inf)
    if token_weight is not None:
        masked = masked & (token_weight.reshape(-1, 1) != 0)
    masked = masked.any(0)
    if bool(masked.any()):
        where = int(masked.nonzero()[0])
        raise ValueError(
            f"targets must have no probability for a class that prior masks with -inf, got some for {where}"
        )


def check_token_weight(weight: Any, linear_weight: Tensor, shape: tuple[int, ...]) -> None:
    """Check the weights of tokens: finite constants, one for each target. An accelerator checks the values."""
    instead = 'multiply the losses of reduction="none" instead'
    _check_constant("token_weight", weight, "target", shape, linear_weight, instead)
    if weight is None or not _has_values(weight):
        return
    good = weight.isfinite()
    if weight.device.type != "cpu":
        _torch.assert_on_device(good.all(), "token_weight must be finite")
    elif not bool(good.all()):
        raise ValueError(f"token_weight must be finite, got {float(weight[~good][0])}")


def check_shape_of_logits(temperature: Any, softcap: Any, z_loss: Any = 0.0) -> None:
    """Check what is done to all logits alike, and the weight of the z-loss."""
    for name, value in (("temperature", temperature), ("softcap", softcap)):
        if value is not None or name == "temperature":
            check_number(name, value, 0, sys.float_info.max)
            if value == 0:
                raise ValueError(f"{name} must be above 0, got {value!r}")
    check_number("z_loss", z_loss, 0, sys.float_info.max)


def _has_values(tensor: Tensor) -> bool:
    """Return whether Python can read the values of ``tensor``."""
    hidden = torch.compiler.is_compiling() or _torch.is_exporting() or _torch.is_vmapped(tensor)
    return not (hidden or tensor.is_meta or _torch.is_fake(tensor))


def check_options(reduction: Any, ignore_index: Any, label_smoothing: Any) -> None:
    """Check the options that decide what is computed."""
    if reduction not in REDUCTIONS:
        raise ValueError(f'reduction must be "mean", "sum" or "none", got {reduction!r}')
    check_integer("ignore_index", ignore_index, -(2**63), 2**63 - 1)
    check_number("label_smoothing", label_smoothing, 0, 1)


def check_how(impl: Any, workspace: Any) -> None:
    """Check the options that decide how it is computed."""
    if impl not in IMPLEMENTATIONS:
        raise ValueError(f"impl must be one of {', '.join(IMPLEMENTATIONS)}, got {impl!r}")
    if workspace is not None:
        check_integer("workspace", workspace, 1)


def check_values(target: Tensor, classes: int, ignore_index: int) -> None:
    """Check that every target is a class or ``ignore_index``.

    On an accelerator the device checks, as in ``F.cross_entropy``: reading the values back would wait for it. The
    values of a sample inside of ``vmap`` cannot be read.
    """
    if target.numel() == 0 or _torch.is_vmapped(target):
        return
    good = (target == ignore_index) | ((target >= 0) & (target < classes))
    if target.device.type != "cpu":
        _torch.assert_on_device(good.all(), refused(classes, ignore_index))
    elif not bool(good.all()):
        raise IndexError(f"{refused(classes, ignore_index)}, got {int(target[~good].flatten()[0])}")


def refused(classes: int, ignore_index: int) -> str:
    """Return the message for a target that is no class."""
    return f"target must be {allowed_targets(classes, ignore_index)}"


def refuse_engine_in_transform(impl: str) -> None:
    """Raise the error of an engine that was asked for by name inside of a transform, which cannot see through it."""
    raise RuntimeError(
        f'impl="{impl}" cannot be used inside of a transform of torch.func (vmap, grad, jacrev, hessian …), which only '
        'the plain computation takes: pass impl="reference", or "auto", which takes it there'
    )
