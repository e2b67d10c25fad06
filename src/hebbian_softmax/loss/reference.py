"""The plain computation: all logits at once."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Tensor:
    """``F.cross_entropy(F.linear(input, linear_weight, linear_bias), target, ...)`` for input (N, features)."""
    logits = F.linear(input, linear_weight, linear_bias)
    return F.cross_entropy(
        logits,
        target,
        weight=weight,
        reduction=reduction,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
    )


def target_weight(target: Tensor, weight: Tensor | None, ignore_index: int) -> Tensor:
    """What the mean of ``F.cross_entropy`` divides by: the targets not ignored, each with its class weight.

    >>> target_weight(torch.tensor([0, 2, -100]), None, -100)
    tensor(2)
    >>> target_weight(torch.tensor([0, 2, -100]), torch.tensor([1.0, 1.0, 0.5]), -100)
    tensor(1.5000)
    """
    counted = target != ignore_index
    if weight is None:
        return counted.sum()
    return torch.where(counted, weight[torch.where(counted, target, 0)], 0).sum()
