"""The gradient step of RMSprop and Adam for single elements, which the other kernels build on."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 2048

NO_STEP, RMSPROP, ADAM = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
"""KIND: the step was made before, is one of RMSprop, or is one of Adam."""


class StepArguments(NamedTuple):
    """A gradient step as the kernels take it. 1 − β is given beside β, since float32 would lose digits of it."""

    grad: Tensor
    mean: Tensor
    """m, the mean of the gradient; Adam only."""
    square: Tensor
    """v, the mean of the squared gradient."""
    number: Tensor
    """The number of this step, on the device; Adam only."""
    lr: float | Tensor
    """A tensor on the device where LR_TENSOR."""
    decay: float
    """The weight of the L2 penalty."""
    rest1: float
    """1 − β₁"""
    beta2: float
    rest2: float
    """1 − β₂"""
    log1: float
    """log β₁"""
    log2: float
    """log β₂"""
    eps: float


@dataclass(frozen=True)
class Update:
    """A step of RMSprop (without ``mean``) or Adam for one parameter, about to be made."""

    grad: Tensor
    mean: Tensor | None
    """m, Adam's mean of the gradient."""
    square: Tensor
    """v, the mean of the squared gradient."""
    number: Tensor
    """The number of this step, on the device."""
    lr: float | Tensor
    weight_decay: float
    betas: tuple[float, float]
    """RMSprop has the second one only."""
    eps: float

    def arguments(self) -> tuple[StepArguments, dict[str, Any]]:
        """Return the step for the kernels, and its kind as compile-time arguments."""
        beta1, beta2 = self.betas
        lr = self.lr if isinstance(self.lr, Tensor) and self.lr.device == self.grad.device else float(self.lr)
        arguments = StepArguments(
            grad=self.grad,
            mean=self.square if self.mean is None else self.mean,
            square=self.square,
            number=self.number,
            lr=lr,
            decay=float(self.weight_decay),
            rest1=float(1 - beta1),
            beta2=float(beta2),
            rest2=float(1 - beta2),
            log1=_log(beta1),
            log2=_log(beta2),
            eps=float(self.eps),
        )
        return arguments, {
            "KIND": RMSPROP.value if self.mean is None else ADAM.value,
            "LR_TENSOR": isinstance(lr, Tensor),
        }


def no_step(weight: Tensor) -> tuple[StepArguments, dict[str, Any]]:
    """Return the arguments of a step that was made before; the kernels read none of them."""
    return StepArguments(weight, weight, weight, weight, *[0.0] * 8), {"KIND": NO_STEP.value, "LR_TENSOR": False}


def _log(beta: float) -> float:
    return math.log(beta) if beta > 0 else -math.inf


def step_elements(parameter: Tensor, update: Update) -> None:
    """Make the gradient step of a parameter of any shape."""
    arguments, kind = update.arguments()
    n = parameter.numel()
    with torch.cuda.device_of(parameter):
        step_elements_kernel[(-(-n // _BLOCK),)](parameter, n, arguments, **kind, BLOCK=_BLOCK)
    torch.autograd.graph.increment_version((parameter,))


@triton.jit
def step_elements_kernel(
    weight, n, step,
    KIND: tl.constexpr, LR_TENSOR: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Step one block of elements in each program."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    w, m, v = stepped(weight, at, inside, step, KIND, LR_TENSOR)
    tl.store(weight + at, w, mask=inside)
    store_moments(step, at, inside, m, v, KIND)


@triton.jit
def stepped(weight, at, inside, step, KIND: tl.constexpr, LR_TENSOR: tl.constexpr):
    """Return θ̂ as the step leaves it, rounded to the weight's dtype, and the new m and v; store nothing."""
    w = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    m = w
    v = w
    if KIND != NO_STEP:
        rate = step.lr
        if LR_TENSOR:
            rate = tl.load(step.lr).to(tl.float32)
        g = tl.load(step.grad + at, mask=inside, other=0.0).to(tl.float32) + step.decay * w
        v = step.beta2 * tl.load(step.square + at, mask=inside, other=0.0).to(tl.float32) + step.rest2 * g * g
        if KIND == RMSPROP:
            w -= rate * tl.div_rn(g, tl.sqrt_rn(v) + step.eps)
        if KIND == ADAM:
            m = tl.load(step.mean + at, mask=inside, other=0.0).to(tl.float32)
            m = tl.where(step.rest1 < 0.5, m + step.rest1 * (g - m), g - (g - m) * (1 - step.rest1))  # torch's lerp
            t = tl.load(step.number).to(tl.float64)
            correction1 = (1.0 - tl.exp(t * step.log1)).to(tl.float32)
            correction2 = tl.sqrt_rn((1.0 - tl.exp(t * step.log2)).to(tl.float32))
            w -= tl.div_rn(rate, correction1) * tl.div_rn(m, tl.div_rn(tl.sqrt_rn(v), correction2) + step.eps)
    return w.to(weight.dtype.element_ty).to(tl.float32), m, v


@triton.jit
def store_moments(step, at, inside, m, v, KIND: tl.constexpr):
    """Store what ``stepped`` has returned for the optimizer's state."""
    tl.store(step.square + at, v, mask=inside)
    if KIND == ADAM:
        tl.store(step.mean + at, m, mask=inside)
