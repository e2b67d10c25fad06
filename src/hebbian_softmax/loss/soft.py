"""Cross-entropy with probabilities as targets, as mixup and distillation have them."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from hebbian_softmax.loss.dtypes import wide


def soft_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    probabilities: Tensor,
    *,
    linear_bias: Tensor | None,
    weight: Tensor | None,
    reduction: str,
    label_smoothing: float,
) -> Tensor:
    """Return ``F.cross_entropy(F.linear(input, linear_weight, linear_bias), probabilities, ...)``; 0 for no rows.

    The mean is over the rows, also with class weights, as in ``F.cross_entropy``. All logits exist at once: the
    probabilities are as many. They get a gradient if they want one.
    """
    logits = F.linear(input, linear_weight, linear_bias)
    dtype = wide(logits.dtype)
    loss = F.cross_entropy(
        logits.to(dtype),
        probabilities.to(dtype),
        None if weight is None else weight.to(dtype),
        reduction="none" if reduction == "none" else "sum",
        label_smoothing=label_smoothing,
    )
    if reduction == "mean":
        loss = loss / max(logits.shape[0], 1)
    return loss
