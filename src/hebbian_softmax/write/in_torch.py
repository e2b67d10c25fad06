"""The write: what happens to the head after an optimizer step, or in ``memorize``."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from hebbian_softmax.attach.activations import Activations
from hebbian_softmax.distributed import (
    first_row,
    is_sharded,
    join_counts,
    join_sums,
    local_rows,
    sum_over_shards,
)
from hebbian_softmax.rule import ClassSums, accumulation_dtype, merge_sums, mix_rows, sum_by_class
from hebbian_softmax.write.gpu import rows as device_write

if TYPE_CHECKING:
    from hebbian_softmax.layer import HebbianSoftmax


@torch.no_grad()
def write(
    head: HebbianSoftmax,
    contents: list[Activations | ClassSums],
    weight: Tensor,
    group: dist.ProcessGroup | None,
) -> None:
    """One iteration of Algorithm 1 after its gradient step, in kernels where they can do it.

    ``weight`` is the parameter itself: all rows, or with FSDP2 the rows of this rank, at full precision.
    """
    with record_function("hebbian_softmax::write"):
        if group is None and not is_sharded(weight) and device_write.applies(head, contents, weight):
            device_write.write(head, [each for each in contents if isinstance(each, Activations)], weight)
        else:
            write_batch(head, class_sums(head, contents), weight, group)


def class_sums(head: HebbianSoftmax, contents: list[Activations | ClassSums]) -> ClassSums:
    """Fold single calls and earlier sums into one set of class sums, on the device of the head's counts."""
    dtype = torch.promote_types(head.running.mean.dtype, accumulation_dtype(head.weight))
    device = head.counts.device
    parts = [_moved(content, device) for content in contents if isinstance(content, ClassSums)]
    calls = [content for content in contents if isinstance(content, Activations)]
    if calls or not parts:
        h = [call.h.to(device, dtype) for call in calls] or [head.running.mean.new_zeros(0, head.in_features)]
        targets = [call.targets.to(device) for call in calls] or [head.counts.new_zeros(0)]
        folded = sum_by_class(
            torch.cat(h),
            torch.cat(targets),
            num_classes=head.num_classes,
            ignore_index=head.ignore_index,
            center=head.center_of_activations(),
            dtype=dtype,
        )
        parts.append(folded)
    return merge_sums(parts)


def write_batch(head: HebbianSoftmax, sums: ClassSums, weight: Tensor, group: dist.ProcessGroup | None) -> None:
    """Counts, running values and rows advance: in torch's operations, on any device, in any group."""
    classes, n, nonfinite = join_counts(sums, group)
    head.nonfinite_count += nonfinite
    if classes.numel() == 0:
        return
    before = head.counts[classes]
    rate = head.mixing_rate(before, n)
    written = rate > 0 if head.memorizing else torch.zeros_like(rate, dtype=torch.bool)
    by_class, total, norms = join_sums(sums, classes[written], group)

    centred = by_class / n[written].unsqueeze(1) - head.center_of_activations()
    if head.scale == "match":
        _see_familiar_rows(head, classes[before > 0], weight, group)
    head.running.see_activations(total, norms, n.sum())
    scale = head.scale if isinstance(head.scale, float) else head.running.scale()

    _write_rows(head, classes[written], centred * scale, rate[written], weight)
    head.counts[classes] = before + n


def _write_rows(head: HebbianSoftmax, classes: Tensor, memories: Tensor, rate: Tensor, weight: Tensor) -> None:
    rows, first = local_rows(weight), first_row(weight)
    here = (classes >= first) & (classes < first + rows.shape[0])
    # FSDP may keep the rows on the CPU while everything else is on the GPU.
    classes, memories, rate = (each[here].to(rows.device) for each in (classes, memories, rate))
    if classes.numel() == 0:
        return
    old = rows[classes - first].to(accumulation_dtype(rows))
    target = head.objective(memories.to(old.dtype), old, classes, rows)
    if target.shape != old.shape:
        raise ValueError(f"objective must return w* of shape {tuple(old.shape)}, got {tuple(target.shape)}")
    new = mix_rows(old, target, rate).to(rows.dtype)
    # A value too large for the weight's dtype leaves the row as it is.
    rows[classes - first] = torch.where(torch.isfinite(new).all(1, keepdim=True), new, rows[classes - first])


def _moved(sums: ClassSums, device: torch.device) -> ClassSums:
    """Sums folded before the head was moved."""
    return ClassSums(*(getattr(sums, each.name).to(device) for each in fields(sums)))


def _see_familiar_rows(head: HebbianSoftmax, classes: Tensor, weight: Tensor, group: dist.ProcessGroup | None) -> None:
    """Take in the norms of the batch's familiar rows; at first, of all familiar rows that the head has."""
    first_time = not head.running.knows_rows()
    if first_time:
        classes = head.counts.nonzero().squeeze(1)
    rows, first = local_rows(weight), first_row(weight)
    here = (classes >= first) & (classes < first + rows.shape[0])
    index = (classes[here] - first).to(rows.device)
    dtype = head.running.norms.dtype
    if first_time:  # most of the matrix, perhaps: no copy of its rows
        norms = torch.linalg.vector_norm(rows, dim=1, dtype=dtype)[index]
    else:
        norms = torch.linalg.vector_norm(rows[index], dim=1, dtype=dtype)
    head.running.see_rows(sum_over_shards(norms.sum().to(classes.device), weight, group), classes.numel())
