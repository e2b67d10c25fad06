"""The options of a loss that decide what is computed."""

from __future__ import annotations

from dataclasses import dataclass, fields

from torch import Tensor

from hebbian_softmax.loss import checks
from hebbian_softmax.rows import RowPart


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
        checks.check_options(self.reduction, self.ignore_index, self.label_smoothing)
        checks.check_constant_of_classes("weight", self.weight, linear_weight, part)
        checks.check_prior(self.prior, linear_weight, part)
        checks.check_token_weight(self.token_weight, linear_weight, shape)
        checks.check_shape_of_logits(self.temperature, self.softcap, self.z_loss)

    def decisive(self) -> list[object]:
        """Return what of them decides on exchanges between ranks: all but the values of tensors."""
        values = (getattr(self, each.name) for each in fields(self))
        return [tuple(value.shape) if isinstance(value, Tensor) else value for value in values]

    @property
    def plain(self) -> bool:
        """Whether the loss of a row is its negative log-likelihood under the logits as they are."""
        given = self.weight, self.prior, self.token_weight, self.softcap
        return all(each is None for each in given) and (self.label_smoothing, self.temperature, self.z_loss) == (
            0,
            1,
            0,
        )
