"""The write in torch's operations: on any device, with any objective, over any number of processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from hebbian_softmax._torch import is_sharded
from hebbian_softmax.distributed import check_same_batch, join_counts, join_sums, own_rows, sum_over_shards
from hebbian_softmax.rule import (
    ClassSums,
    RecentRate,
    accumulation_dtype,
    add_counts,
    merge_sums,
    mix_rows,
    sum_by_class,
)
from hebbian_softmax.write.activations import Activations
from hebbian_softmax.write.timing import AT_ONCE, Timing, has_begun, shortens

if TYPE_CHECKING:
    from hebbian_softmax.layer import HebbianSoftmax


class _Shard(NamedTuple):
    """The rows that this process holds: all, or with FSDP2 and ``shard_rows`` some."""

    rows: Tensor
    first: int
    """The class of the first row."""

    def holds(self, classes: Tensor) -> Tensor:
        return (classes >= self.first) & (classes < self.first + self.rows.shape[0])


@torch.no_grad()
def write(
    head: HebbianSoftmax,
    contents: Sequence[Activations | ClassSums],
    weight: Tensor,
    group: dist.ProcessGroup | None,
    timing: Timing = AT_ONCE,
) -> None:
    """Advance counts, running values and rows by one iteration of Algorithm 1, over all ranks of ``group``.

    These are the ranks that share the batch; the ranks that hold other rows are those of the weight's mesh.

    If the rate or the objective raises, nothing has changed on this rank.
    """
    sums = class_sums(head, contents)
    classes, n, nonfinite = (sums.classes, sums.n, sums.nonfinite) if group is None else join_counts(sums, group)
    if head.row_mesh is not None:
        check_same_batch(head.row_mesh, classes, n)
    if classes.numel() == 0:
        head.nonfinite_count += nonfinite
        return
    before, since = head.counts[classes], head.since_start[classes]
    begun, strength = has_begun(head), torch.as_tensor(timing.strength(), dtype=torch.float64).to(since.device)
    rate = head.mixing_rate(before, n, in_step=timing.waits, fallen=timing.fallen(since.device)).double()
    length = RecentRate.length(n, rate) if shortens(head, timing) else torch.ones_like(rate)
    rate = rate * torch.where(since > 0, strength, 1)
    if timing.waits:
        rate = rate * begun
    written = rate > 0 if head.memorizing else torch.zeros_like(rate, dtype=torch.bool)
    settling = head.settling if head.settling is not None and head.settling.measures() else None
    needed = written if settling is None else written | settling.sampled(classes)
    if group is None:
        by_class, total, norms = sums.of(needed), sums.total, sums.norms
    else:
        by_class, total, norms = join_sums(sums, classes[needed], group)

    shard = _Shard(*own_rows(weight)) if is_sharded(weight) else _Shard(weight, 0)
    means = by_class / n[needed].unsqueeze(1)
    centred = means[written[needed]] - head.center_of_activations()
    seen, mean = head.running.batches_seen().clone(), head.running.mean.clone()
    across = head.running.direction() if head.write == "across" else None
    with head.running.restored_on_error():
        if head.scale == "match":
            _see_familiar_rows(head, classes[before > 0], shard, weight)
        if across is not None:
            head.running.see_returning(head.counts, classes, n)
        head.running.see_activations(total, norms, n.sum())
        scale = head.scale if isinstance(head.scale, float) else head.running.scale()
        beside = None
        if across is not None:
            rare = (before > 0) & (before < head.limit)
            _see_rare_rows(head, classes[rare], before[rare], across, shard, weight)
            first = (before[written] == 0) & (head.running.along_batches > 0)
            beside = _Along(across, first, head.running.usual_component())
        memories = centred * scale * length[written].to(centred.dtype).unsqueeze(1)
        _write_rows(head, classes[written], memories, rate[written], shard, beside)
    if settling is not None:
        sampled = settling.sampled(classes)
        settling.see(classes[sampled], means[sampled[needed]], before[sampled], mean, seen)
    head.counts[classes] = add_counts(before, n)
    if head.memorizing:
        head.since_start[classes] = torch.where(begun, add_counts(since, n), since)
    head.nonfinite_count += nonfinite


def class_sums(head: HebbianSoftmax, contents: Sequence[Activations | ClassSums]) -> ClassSums:
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


def _moved(sums: ClassSums, device: torch.device) -> ClassSums:
    """Return sums on ``device``: the head may have moved since they were folded."""
    return ClassSums(*(getattr(sums, each.name).to(device) for each in fields(sums)))


def _see_familiar_rows(head: HebbianSoftmax, classes: Tensor, shard: _Shard, weight: Tensor) -> None:
    """Take in the norms of the batch's familiar rows; the first time, those of all familiar rows of the head."""
    first_time = not head.running.knows_rows()
    if first_time:
        classes = head.counts.nonzero().squeeze(1)
    index = classes[shard.holds(classes)].to(shard.rows.device) - shard.first
    dtype = head.running.norms.dtype
    if first_time:  # most of the matrix, perhaps: do not copy its rows
        norms = torch.linalg.vector_norm(shard.rows, dim=1, dtype=dtype)[index]
    else:
        norms = torch.linalg.vector_norm(shard.rows[index], dim=1, dtype=dtype)
    norm_sum = norms.sum().to(classes.device)
    if is_sharded(weight):
        norm_sum = sum_over_shards(norm_sum, weight)
    head.running.see_rows(norm_sum, classes.numel())


def _see_rare_rows(
    head: HebbianSoftmax, classes: Tensor, before: Tensor, direction: Tensor, shard: _Shard, weight: Tensor
) -> None:
    """Take in the components along the mean activation of the batch's rows that were seen fewer than T times."""
    here = shard.holds(classes)
    index = classes[here].to(shard.rows.device) - shard.first
    y = (shard.rows[index].to(direction.dtype) @ direction.to(shard.rows.device)).to(classes.device)
    x = before[here].to(direction.dtype).log()
    sums = torch.stack([x, y, x * x, x * y]).sum(1)
    if is_sharded(weight):
        sums = sum_over_shards(sums, weight)
    head.running.see_along(sums, direction.any() * classes.numel())


class _Along(NamedTuple):
    """What a write across the mean activation needs to leave the rows as they are along it."""

    direction: Tensor
    """(features,): zeros while the mean has no direction."""
    first: Tensor
    """(K,): which of the written classes had never occurred, if it is known what rows of others have."""
    usual: Tensor
    """The component that these are given."""

    def kept(self, target: Tensor, old: Tensor, here: Tensor) -> Tensor:
        """Return w* with the row's own component along the mean, or for a first write with that of other rare rows."""
        direction, usual = (each.to(old.device, old.dtype) for each in (self.direction, self.usual))
        wanted = torch.where(self.first[here].to(old.device), usual, old @ direction)
        return target + (wanted - target @ direction).unsqueeze(1) * direction


def _write_rows(
    head: HebbianSoftmax, classes: Tensor, memories: Tensor, rate: Tensor, shard: _Shard, along: _Along | None
) -> None:
    rows, here = shard.rows, shard.holds(classes)
    # FSDP may keep the rows on the CPU while everything else is on the GPU.
    classes, memories, rate = (each[here].to(rows.device) for each in (classes, memories, rate))
    if classes.numel() == 0:
        return
    index = classes - shard.first
    old = rows[index].to(accumulation_dtype(rows))
    target = head.objective(memories.to(old.dtype), old, classes, rows)
    if target.shape != old.shape:
        raise ValueError(f"objective must return w* of shape {tuple(old.shape)}, got {tuple(target.shape)}")
    if along is not None:
        target = along.kept(target, old, here)
    new = mix_rows(old, target, rate).to(rows.dtype)
    # A value too large for the weight's dtype leaves the row as it is.
    rows[index] = torch.where(torch.isfinite(new).all(1, keepdim=True), new, rows[index])
