"""The gradient step on a GPU: what the kernels need to know of it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor

NO_STEP, RMSPROP, ADAM = 0, 1, 2


@dataclass(frozen=True)
class Update:
    """A step of RMSprop (without ``first``) or Adam for one parameter, about to be made."""

    grad: Tensor
    first: Tensor | None
    """m, Adam's mean of the gradient."""
    second: Tensor
    """v, the mean of its square."""
    step: Tensor
    """On the device, this step included."""
    lr: float | Tensor
    weight_decay: float
    betas: tuple[float, float]
    """RMSprop has the second one only."""
    eps: float

    def arguments(self) -> tuple[list[Any], dict[str, Any]]:
        """As ``kernels/step.py`` lists them, and the kind of step."""
        beta1, beta2 = self.betas
        lr = self.lr if isinstance(self.lr, Tensor) and self.lr.device == self.grad.device else float(self.lr)
        values = [
            self.grad,
            self.second if self.first is None else self.first,
            self.second,
            self.step,
            lr,
            float(self.weight_decay),
            float(1 - beta1),
            float(beta2),
            float(1 - beta2),
            _log(beta1),
            _log(beta2),
            float(self.eps),
        ]
        kind = RMSPROP if self.first is None else ADAM
        return values, {"UPDATE": kind, "LR_TENSOR": isinstance(lr, Tensor)}


def no_update(weight: Tensor) -> tuple[list[Any], dict[str, Any]]:
    """The arguments of a step that was made before."""
    return [weight, weight, weight, weight, *[0.0] * 8], {"UPDATE": NO_STEP, "LR_TENSOR": False}


def _log(beta: float) -> float:
    return math.log(beta) if beta > 0 else -math.inf
