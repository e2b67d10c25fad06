"""The write of a trained head: rows of new classes from what :mod:`hebbian_softmax.calibration` knows.

Without gradients in between, rows depend only on what was seen, not on how it was divided into calls: a memory is the
running mean of a class with k imagined activations at the mean of all, and what the row holds besides is taken out of
the row before the memory is mixed, and put back afterwards. What gradients have changed counts as memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from hebbian_softmax._torch import is_sharded
from hebbian_softmax.calibration import Calibration, FamiliarRows, Prepared
from hebbian_softmax.distributed import join_activations, join_counts, join_sums
from hebbian_softmax.rule import ClassSums, add_counts
from hebbian_softmax.write.activations import Activations
from hebbian_softmax.write.in_torch import class_sums
from hebbian_softmax.write.timing import Timing, has_begun

if TYPE_CHECKING:
    from hebbian_softmax.layer import HebbianSoftmax


@torch.no_grad()
def write(
    head: HebbianSoftmax,
    contents: Sequence[Activations | ClassSums],
    weight: Tensor,
    group: dist.ProcessGroup | None,
    timing: Timing,
) -> None:
    """Advance counts, running values and the rows of new classes by one batch, over all ranks of ``group``."""
    calibration = known(head)
    _refuse_shards(weight)
    sums = class_sums(head, contents)
    classes, n, nonfinite = (sums.classes, sums.n, sums.nonfinite) if group is None else join_counts(sums, group)
    head.nonfinite_count += nonfinite
    if classes.numel() == 0:
        return
    before, since = head.counts[classes], head.since_start[classes]
    begun = has_begun(head)
    written = (head.mixing_rate(before, n) > 0) & ~calibration.familiar_of(head.num_classes)[classes] & head.memorizing
    if timing.waits:
        written = written & begun
    if group is None:
        by_class, total, norms = sums.of(written), sums.total, sums.norms
    else:
        by_class, total, norms = join_sums(sums, classes[written], group)
    head.running.see_activations(total, norms, n.sum())
    _count_all(head, calibration, n.sum())
    if written.any():
        strength = torch.as_tensor(timing.strength(), dtype=torch.float64).to(since.device)
        fading = torch.where(since > 0, strength, 1)[written]
        # What was counted before a first write is not in the memory.
        remembered = torch.where(calibration.constants_of(head.num_classes)[classes] == 0, 0, before)
        rate = fading * n[written] / (remembered + n + head.new_classes.shrunk_by)[written]
        means = by_class.double() / n[written].unsqueeze(1)
        _mix(head, classes[written], means, rate, add_counts(before, n)[written])
    head.counts[classes] = add_counts(before, n)
    if head.memorizing:
        head.since_start[classes] = torch.where(begun, add_counts(since, n), since)


@torch.no_grad()
def prepare(head: HebbianSoftmax, h: Tensor, targets: Tensor, weight: Tensor, group: dist.ProcessGroup | None) -> None:
    """Let a trained head that has seen little look at activations which are about to be memorised.

    Once it has seen more activations than it has features, only :func:`calibrate` adds to them.
    """
    calibration = head.calibration
    if calibration is None or is_sharded(weight):
        return
    few, imagined = calibration.seen() <= head.in_features, bool(calibration.imagined)
    if not few and not imagined:
        return
    kept = (targets != head.ignore_index) & (targets >= 0) & (targets < head.num_classes)
    classes, h = targets[kept].to(head.counts.device), h[kept.to(h.device)]
    known = calibration.familiar_of(head.num_classes)[classes]
    found = torch.stack([known.any(), kept.any().to(known.device)]).long()
    if group is not None:
        dist.all_reduce(found, dist.ReduceOp.MAX, group=group)
    has_familiar, has_any = found.tolist()
    if has_familiar:
        calibrate(head, h, weight, group)
    elif has_any and few and (imagined or not calibration.ready):
        calibrate(head, h, weight, group, imagine=True)


@torch.no_grad()
def calibrate(
    head: HebbianSoftmax, h: Tensor, weight: Tensor, group: dist.ProcessGroup | None, imagine: bool = False
) -> None:
    """Let the head see activations (N, features), and bring the rows that were written before up to date."""
    _refuse_shards(weight)
    calibration = Calibration(head.counts > 0) if head.calibration is None else head.calibration
    if not calibration.ready:  # what was written until now was not written from here
        calibration.familiar = calibration.familiar_of(head.num_classes) | (head.since_start > 0)
    rows = _familiar_rows(head, calibration, weight)
    head.calibration = calibration
    if head.settling is not None and head.settling.measures():
        head.settling.reset(begun=True)  # the features of a trained head have settled
    h = h[torch.isfinite(torch.linalg.vector_norm(h.double(), dim=1))].to(weight.device)
    if imagine and group is not None:
        h, group = join_activations(h, group), None
    if h.shape[0] == 0 and group is None:
        return
    earlier = calibration.prepared(head.new_classes) if calibration.ready else None
    if imagine:
        calibration.imagine(h, rows)
    else:
        calibration.see(h, rows, group)
    classes = _in_play(head, calibration)
    if earlier is None or classes.numel() == 0:
        return
    later, counts = calibration.prepared(head.new_classes), head.counts[classes]
    share = counts / (counts + head.new_classes.shrunk_by)
    memories = _memories(head, classes, earlier) + share.unsqueeze(1) * (earlier.mean - later.mean)
    _put(head, classes, memories, counts, later)


def _familiar_rows(head: HebbianSoftmax, calibration: Calibration, weight: Tensor) -> FamiliarRows:
    """Return the rows of familiar classes, without copying them where new classes come after them."""
    which = calibration.familiar_of(head.num_classes)
    n = int(which.sum())
    if n == 0:
        raise RuntimeError("the head has no familiar classes; train it before it is calibrated, or use from_linear")
    index: slice | Tensor = slice(n) if bool(which[:n].all()) else which
    return FamiliarRows(weight[index], None if head.bias is None else head.bias[index], which)


class Held(NamedTuple):
    """Rows of new classes as they were before a gradient step."""

    classes: Tensor
    rows: Tensor
    bias: Tensor | None


@torch.no_grad()
def hold(head: HebbianSoftmax) -> Held | None:
    """Return the rows of new classes that were seen too rarely for gradients to move them, if there are any."""
    calibration, weight = head.calibration, head.weight
    if calibration is None or head.new_classes.gradients_from == 0 or is_sharded(weight):
        return None
    rare = (head.counts < head.new_classes.gradients_from) & ~calibration.familiar_of(head.num_classes)
    classes = rare.nonzero().squeeze(1)
    return Held(classes, weight[classes], None if head.bias is None else head.bias[classes])


@torch.no_grad()
def release(head: HebbianSoftmax, held: Held) -> None:
    """Undo what the gradient step has done to these rows."""
    head.weight[held.classes] = held.rows
    if head.bias is not None and held.bias is not None:
        head.bias[held.classes] = held.bias


def known(head: HebbianSoftmax) -> Calibration:
    """Return the calibration of a head that has one."""
    assert head.calibration is not None
    return head.calibration


def _in_play(head: HebbianSoftmax, calibration: Calibration) -> Tensor:
    """Return the classes whose rows were written here and are not yet left to gradient descent."""
    constants = calibration.constants_of(head.num_classes)
    return ((constants != 0) & (head.counts < head.limit)).nonzero().squeeze(1)


def _count_all(head: HebbianSoftmax, calibration: Calibration, n: Tensor) -> None:
    """Count ``n`` memorised activations: every class that is not among them is less likely by that."""
    classes = _in_play(head, calibration)
    counts = head.counts[classes]
    before = calibration.log_prior(counts, head.num_classes, head.new_classes)
    calibration.memorized += n
    change = calibration.log_prior(counts, head.num_classes, head.new_classes) - before
    if change.any():
        _add_constants(head, classes, change, calibration.prepared(head.new_classes))


def _mix(head: HebbianSoftmax, classes: Tensor, means: Tensor, rate: Tensor, counts: Tensor) -> None:
    """Mix the mean activations of a batch into the memories of their classes, seen ``counts`` times with the batch."""
    prepared = known(head).prepared(head.new_classes)
    memories = _memories(head, classes, prepared)
    memories = memories + rate.unsqueeze(1) * (means - prepared.mean - memories)
    _put(head, classes, memories, counts, prepared)


def _memories(head: HebbianSoftmax, classes: Tensor, prepared: Prepared) -> Tensor:
    """Return the memories that rows hold, which are 0 where nothing was written yet."""
    constants = known(head).constants[classes]
    influence = head.weight[classes].double() - prepared.slope
    if head.bias is None:
        influence = influence - constants.outer(prepared.one)
    return torch.where(constants.unsqueeze(1) != 0, prepared.memory_in(influence), 0)


def _put(head: HebbianSoftmax, classes: Tensor, memories: Tensor, counts: Tensor, prepared: Prepared) -> None:
    """Write rows and constants that hold these memories."""
    calibration = known(head)
    log_prior = calibration.log_prior(counts, head.num_classes, head.new_classes)
    constants = prepared.constants(memories, log_prior)
    rows = prepared.slope + prepared.influence(memories)
    if head.bias is None:
        rows = rows + constants.outer(prepared.one)
    new = rows.to(head.weight.dtype)
    # A value too large for the weight's dtype leaves the row as it is.
    fits = torch.isfinite(new).all(1) & torch.isfinite(constants)
    classes, constants, new = classes[fits], constants[fits], new[fits]
    head.weight[classes] = new
    _write_bias(head, classes, constants)
    calibration.constants[classes] = constants


def _add_constants(head: HebbianSoftmax, classes: Tensor, change: Tensor, prepared: Prepared) -> None:
    """Add to the constants of rows that stay as they are otherwise."""
    constants = known(head).constants
    _write_bias(head, classes, constants[classes] + change)
    constants[classes] += change
    if head.bias is None:
        moved = head.weight[classes].double() + change.outer(prepared.one)
        head.weight[classes] = moved.to(head.weight.dtype)


def _write_bias(head: HebbianSoftmax, classes: Tensor, constants: Tensor) -> None:
    """Write constants into the bias, if there is one, and keep what gradients have added to the earlier ones."""
    if head.bias is None:
        return
    old = known(head).constants[classes]
    by_gradients = torch.where(old == 0, 0, head.bias[classes].double() - old.to(head.bias.dtype).double())
    head.bias[classes] = (constants + by_gradients).to(head.bias.dtype)


def _refuse_shards(weight: Tensor) -> None:
    if is_sharded(weight):
        raise RuntimeError(
            "a trained head whose rows are sharded over ranks cannot write new classes by their logits. Calibrate and "
            "memorize before sharding, and shard HebbianSoftmax.from_linear(head.to_linear(), gamma=..., limit=..., "
            "counts=head.counts), which goes on as a head that is trained from scratch"
        )
