"""The plain computation with all logits at once: the oracle of the tests, and what torch's transforms can trace."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hebbian_softmax.loss.checks import Options
from hebbian_softmax.loss.dtypes import wide


def cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None,
    options: Options,
    zero_if_empty: bool,
) -> Tensor:
    """Return ``F.cross_entropy(F.linear(input, linear_weight, linear_bias), target, ...)``, at least in float32.

    With ``zero_if_empty``, a mean over no target is 0 with zero gradients instead of NaN.
    """
    logits = shaped(logits_of(input, linear_weight, linear_bias), options.temperature, options.softcap)
    weight = None if options.weight is None else options.weight.to(logits.dtype)
    plain: dict[str, Any] = {
        "weight": weight,
        "ignore_index": options.ignore_index,
        "label_smoothing": options.label_smoothing,
    }
    if options.prior is None and options.token_weight is None and not options.z_loss:
        if options.reduction != "mean" or not zero_if_empty:
            return F.cross_entropy(logits, target, reduction=options.reduction, **plain)
        losses = F.cross_entropy(logits, target, reduction="none", **plain)
        total = target_weight(target, weight, options.ignore_index)
    else:
        rows, y = logits.reshape(-1, logits.shape[-1]), target.reshape(-1)
        tokens = None if options.token_weight is None else options.token_weight.reshape(-1).to(logits.dtype)
        if tokens is not None:  # A token without weight takes no part, even if its loss is infinite.
            y = y.masked_fill(tokens == 0, options.ignore_index)
        prior = rows.new_zeros(rows.shape[1]) if options.prior is None else options.prior.to(rows.dtype)
        losses = _masked_losses(rows, y, prior, **plain, z_loss=options.z_loss, token_weight=tokens)
        losses = losses.reshape(target.shape)
        total = target_weight(y, weight, options.ignore_index, tokens)
    if options.reduction != "mean":
        return losses.sum() if options.reduction == "sum" else losses
    return losses.sum() / (torch.where(total == 0, 1, total) if zero_if_empty else total)


def _masked_losses(
    logits: Tensor,
    target: Tensor,
    prior: Tensor,
    weight: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    token_weight: Tensor | None,
) -> Tensor:
    """Return the loss of each row with a prior that may mask classes: infinite for a masked target, and never NaN."""
    counted = target != ignore_index
    y = torch.where(counted, target, 0)
    possible = prior > -torch.inf
    usable = counted & possible[y]
    logits = torch.where(usable[:, None], logits + prior, 0)  # Without a possible class there is no distribution.
    log_p = logits.log_softmax(1)
    losses = -log_p.gather(1, y[:, None])[:, 0]
    losses = losses if weight is None else losses * weight[y]
    if label_smoothing:
        others = -log_p.masked_fill(~possible, 0)
        others = (others if weight is None else others * weight).sum(1) / possible.sum().clamp(min=1)
        losses = (1 - label_smoothing) * losses + label_smoothing * others
    if z_loss:
        losses = losses + z_loss * logits.logsumexp(1).square()
    if token_weight is not None:
        losses = losses * token_weight
    return torch.where(usable, losses, 0).masked_fill(counted & ~usable, torch.inf)


def shaped(logits: Tensor, temperature: float, softcap: float | None) -> Tensor:
    """Return softcap · tanh(logits / softcap) / temperature."""
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return logits if temperature == 1 else logits / temperature


def logits_of(input: Tensor, linear_weight: Tensor, linear_bias: Tensor | None) -> Tensor:
    """Return the logits, rounded to the dtype of the products as ``F.linear`` does it, but at least in float32."""
    logits = F.linear(input, linear_weight, linear_bias)
    return logits.to(wide(logits.dtype))


def without_classes(
    input: Tensor,
    linear_weight: Tensor,
    linear_bias: Tensor | None,
    reduction: str,
    zero_if_empty: bool,
) -> Tensor:
    """Return the loss where there are no classes, so that every row is ignored: 0 with zero gradients.

    The mean over no target is NaN, as in ``F.cross_entropy``, unless ``zero_if_empty``.
    """
    bias = None if linear_bias is None else linear_bias.to(input.dtype)
    losses = F.linear(input, linear_weight.to(input.dtype), bias).sum(-1, dtype=wide(input.dtype))
    if reduction == "none":
        return losses
    return losses.sum() * torch.nan if reduction == "mean" and not zero_if_empty else losses.sum()


def log_prob(
    input: Tensor, linear_weight: Tensor, linear_bias: Tensor | None, target: Tensor, options: Options, entropy: bool
) -> tuple[Tensor, ...]:
    """Return log p(target), the log-normaliser and with ``entropy`` that of each row; all are 0 where target is -1.

    Both are NaN where a logit is +inf, which ``logsumexp`` alone would take for a distribution.
    """
    counted, logits = target >= 0, logits_of(input, linear_weight, linear_bias)
    logits, usable, y = shaped(logits, options.temperature, options.softcap), counted, target.clamp(min=0)
    if options.prior is not None:
        logits = logits + options.prior.to(logits.dtype)
        usable = counted & (options.prior > -torch.inf).any()  # Else every class is masked, which would give NaN.
    logits = torch.where(usable[:, None], logits, 0)
    normaliser = logits.logsumexp(1)
    normaliser = normaliser.masked_fill(normaliser == torch.inf, torch.nan)
    found = [logits.gather(1, y[:, None])[:, 0] - normaliser, normaliser]
    if options.prior is not None:
        found[0] = found[0].masked_fill(options.prior[y] == -torch.inf, -torch.inf)
        found[1] = found[1].masked_fill(~usable, -torch.inf)
    if entropy:
        log_p = logits - normaliser[:, None]
        found.append(-(log_p.exp() * log_p.masked_fill(log_p == -torch.inf, 0)).sum(1).where(usable, 0))
    return tuple(torch.where(counted, each, 0) for each in found)


def target_weight(
    target: Tensor, weight: Tensor | None, ignore_index: int, token_weight: Tensor | None = None
) -> Tensor:
    """Return the divisor of ``F.cross_entropy``'s mean: the number of targets not ignored, or their class weights.

    With ``token_weight``, each target counts that much.

    >>> target_weight(torch.tensor([0, 2, -100]), None, -100)
    tensor(2)
    >>> target_weight(torch.tensor([0, 2, -100]), torch.tensor([1.0, 1.0, 0.5]), -100)
    tensor(1.5000)
    """
    counted = target != ignore_index
    if weight is None and token_weight is None:
        return counted.sum()
    found = counted if weight is None else torch.where(counted, weight[torch.where(counted, target, 0)], 0)
    return (found if token_weight is None else found * token_weight).sum()
