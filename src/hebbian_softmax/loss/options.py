"""The options of a loss that decide what is computed."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from hebbian_softmax.loss import checks


@dataclass(frozen=True)
class Options:
    """The options that ``linear_cross_entropy`` and ``head.loss`` have in common; they are described there."""

    weight: Tensor | None = None
    reduction: str = "mean"
    ignore_index: int = -100
    label_smoothing: float = 0.0
    prior: Tensor | None = None

    def check(self, linear_weight: Tensor) -> None:
        """Check all of them, for a matrix with a row for each class."""
        checks.check_options(self.reduction, self.ignore_index, self.label_smoothing)
        checks.check_constant_of_classes("weight", self.weight, linear_weight)
        checks.check_prior(self.prior, linear_weight)
