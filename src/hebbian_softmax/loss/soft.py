"""Cross-entropy with probabilities as targets, as mixup and distillation have them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hebbian_softmax.loss import reference
from hebbian_softmax.loss.checks import Options, check_probabilities_possible


def soft_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    probabilities: Tensor,
    linear_bias: Tensor | None,
    options: Options,
) -> Tensor:
    """Return ``F.cross_entropy(F.linear(input, linear_weight, linear_bias), probabilities, ...)``; 0 for no rows.

    The mean is over the rows, also with class weights, as in ``F.cross_entropy``, or over the weights of tokens. All
    logits exist at once: the probabilities are as many. They get a gradient if they want one.
    """
    return soft_loss(reference.logits_of(input, linear_weight, linear_bias), probabilities, options)


def soft_loss(logits: Tensor, probabilities: Tensor, options: Options) -> Tensor:
    """Return the same loss from the logits, which are at least in float32."""
    logits = reference.shaped(logits, options.temperature, options.softcap)
    probabilities = probabilities.to(logits.dtype)
    weight = None if options.weight is None else options.weight.to(logits.dtype)
    smoothing = options.label_smoothing
    if options.prior is None:
        losses = F.cross_entropy(logits, probabilities, weight, reduction="none", label_smoothing=smoothing)
    else:
        check_probabilities_possible(probabilities, options.prior, options.token_weight)
        logits = logits + options.prior.to(logits.dtype)
        losses = _masked_losses(logits, probabilities, options.prior, weight, smoothing)
    if options.z_loss:
        losses = losses + options.z_loss * logits.logsumexp(1).nan_to_num(neginf=0.0).square()
    total: Tensor | int = len(losses)
    if options.token_weight is not None:
        tokens = options.token_weight.reshape(-1).to(losses.dtype)
        losses, total = torch.where(tokens == 0, 0, losses * tokens), tokens.sum()
    if options.reduction == "none":
        return losses
    if options.reduction == "sum":
        return losses.sum()
    return losses.sum() / (max(total, 1) if isinstance(total, int) else torch.where(total == 0, 1, total))


def _masked_losses(
    logits: Tensor, probabilities: Tensor, prior: Tensor, weight: Tensor | None, smoothing: float
) -> Tensor:
    """Return the loss of each row whose logits have a prior: infinite where a masked class has a probability."""
    possible = prior > -torch.inf
    usable = ((probabilities == 0) | possible).all(1)
    log_p = torch.where(usable[:, None], logits, 0).log_softmax(1).masked_fill(~possible, 0)
    target = (1 - smoothing) * probabilities + smoothing * possible.to(logits.dtype) / possible.sum().clamp(min=1)
    losses = -(log_p * (target if weight is None else target * weight)).sum(1)
    return losses.masked_fill(~usable, torch.inf)
