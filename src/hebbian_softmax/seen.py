"""Classes never seen, and how ``seen_only`` leaves them out of the softmax.

A class takes part once it was counted, and its targets bring it into the call at hand: the additive term of its logits
is 0, and -inf for the others. All of it is computed on the device from tensors of fixed shape, so nothing waits for the
device and a CUDA graph can hold it. Counts are whole on every rank, also where ranks share the rows.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hebbian_softmax import _torch, checks, state
from hebbian_softmax.loss.checks import Options

if TYPE_CHECKING:
    from hebbian_softmax.layer import HebbianSoftmax


def with_left_out(head: HebbianSoftmax, targets: Tensor, options: Options) -> Options:
    """Return the options of a call of ``head.loss`` with ``targets`` (N,) or (N, classes): the prior has -inf, too.

    While training this needs an attached head, since nothing counts the classes of another one.
    """
    if head.training and not head.remembers():
        return options
    _ensure_counts(head, head.num_classes)
    part = _taking_part(head, targets, options.token_weight)
    return replace(options, prior=torch.where(part, 0.0 if options.prior is None else options.prior, -torch.inf))


def prior_of(head: HebbianSoftmax, targets: Tensor | None) -> Tensor:
    """Return 0 for the classes that take part beside ``targets``, and -inf for the others."""
    _ensure_counts(head, head.num_classes)
    if targets is not None:
        targets = checks.check_targets(targets, head.num_classes)
        checks.check_target_values(targets, num_classes=head.num_classes, ignore_index=head.ignore_index)
        if targets.device != head.counts.device:
            raise ValueError(f"targets must be on the device of the head, {head.counts.device}, got {targets.device}")
    return torch.where(_taking_part(head, targets, None), 0.0, -torch.inf)


def without_unseen(head: HebbianSoftmax, logits: Tensor) -> Tensor:
    """Return ``logits`` (..., classes), which nobody else has, with -inf for the classes never seen."""
    _ensure_counts(head, logits.shape[-1])
    return logits.masked_fill_(~_taking_part(head, None, None), -torch.inf)


def _ensure_counts(head: HebbianSoftmax, classes: int) -> None:
    """Refuse counts that are memory garbage, and give counts to rows that others have added."""
    if torch.compiler.is_compiling() or _torch.is_transforming() or _torch.is_fake(head.counts):
        return
    state.ensure_filled(head)
    if classes > head.counts.shape[0]:
        state.follow_weight(head)


def _taking_part(head: HebbianSoftmax, targets: Tensor | None, token_weight: Tensor | None) -> Tensor:
    """Return whether each class was counted or is a target. Where that leaves too few of them, all take part."""
    part = head.counts > 0
    if targets is None or not head.training:  # a head that never counted has learned no class more than another
        part = part | ~part.any()
    if targets is None:
        return part
    if targets.is_floating_point():
        present = targets.detach() != 0
        if token_weight is not None:
            present = present & (token_weight.reshape(-1, 1) != 0)
        part = part | present.any(0)
    else:
        classes = part.shape[0]
        counted = (targets != head.ignore_index) & (targets >= 0) & (targets < classes)
        if token_weight is not None:
            counted = counted & (token_weight.reshape(-1) != 0)
        # What is left out goes to a place behind the last class, so that shapes do not depend on values.
        index = torch.where(counted, targets.long(), classes)
        part = part | torch.zeros(classes + 1, dtype=torch.bool, device=part.device).scatter(0, index, True)[:-1]
    if head.training:
        # A single class has no gradient, and zeros that are clipped look like a gradient that was cleared.
        part = part | (part.sum() < 2)
    return part
