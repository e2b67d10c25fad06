"""Reading a batch of activations once: which take part, their norms, their sum, and a copy on the way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hebbian_softmax import _torch
from hebbian_softmax.write.activations import Activations, Call
from hebbian_softmax.write.gpu import tile
from hebbian_softmax.write.running import HORIZON

if TYPE_CHECKING:
    from hebbian_softmax.layer import HebbianSoftmax

_PARTS = 512
"""Programs that share a pass over the activations: each leaves a partial sum of every column."""


class PartialSums(NamedTuple):
    """The sums that each program has made over its part of the activations."""

    columns: Tensor
    """float32 (parts, features): sums of the activations."""
    norms: Tensor
    """float32 (parts,): sums of the norms of the centred activations."""
    kept: Tensor
    """int32 (parts,): how many activations take part."""
    nonfinite: Tensor
    """int32 (parts,): how many were left out because their norm is not finite."""
    share: Tensor
    """float32 (1,): the weight of this batch in the running values."""
    before: Tensor
    """int64 (1,): how many batches came before this one."""


@dataclass(frozen=True)
class Inspection:
    """The result of inspecting a batch, before it is sorted."""

    keys: Tensor
    """int16 or int32 (N,): the class of each activation; -1 for those left out."""
    sums: PartialSums
    settings: tuple[object, ...]
    """The settings of the head that the inspection depends on."""


def copy_and_inspect(head: HebbianSoftmax, h: Tensor, targets: Tensor, call: Call) -> Activations:
    """Copy activations and inspect them in the same pass."""
    own = torch.empty_like(h), torch.empty_like(targets)
    inspection = inspect(head, h.detach(), targets.contiguous(), own)
    return Activations(own[0].detach(), own[1], call, inspection)


def inspection_of(head: HebbianSoftmax, contents: Sequence[Activations], h: Tensor, targets: Tensor) -> Inspection:
    """Return the inspection made with the copy of the batch if it still holds, else inspect the batch now."""
    early = contents[0].inspection
    if len(contents) == 1 and isinstance(early, Inspection) and early.settings == _settings(head):
        return early
    return inspect(head, h, targets, None)


def inspect(head: HebbianSoftmax, h: Tensor, targets: Tensor, copies: tuple[Tensor, Tensor] | None) -> Inspection:
    """Inspect contiguous activations (N, features), N > 0; copy them and their targets if ``copies`` are given."""
    n, features = h.shape
    shape, running = tile(features), head.running
    parts = min(_PARTS, -(-n // shape["ROWS"]))
    # Fewer bits are sorted in fewer passes.
    keys = torch.empty_like(targets, dtype=torch.int16 if head.num_classes <= 2**15 else torch.int32)
    columns = h.new_empty(parts, features, dtype=torch.float32)
    kept, nonfinite = keys.new_empty(2, parts, dtype=torch.int32)
    share, before = columns.new_empty(1), targets.new_empty(1, dtype=torch.int64)
    sums = PartialSums(columns, columns.new_empty(parts), kept, nonfinite, share, before)
    with torch.cuda.device_of(h):
        inspect_kernel[(parts,)](
            h, targets, running.mean, running.batches, keys, sums, *(copies or (h, targets)),
            n, features, head.num_classes, head.ignore_index, HORIZON,
            CENTER=head.write != "literal", COPY=copies is not None,
            STAGES=3 if shape["BLOCK"] <= 4096 else 1,  # what is fetched ahead must fit in shared memory
            **shape,
        )  # fmt: skip
    return Inspection(keys, sums, _settings(head))


def _settings(head: HebbianSoftmax) -> tuple[object, ...]:
    mean = head.running.mean  # all running values change together with it
    return head.num_classes, head.ignore_index, head.write != "literal", mean.data_ptr(), _torch.version(mean)


@triton.jit
def inspect_kernel(
    h, targets, mean, batches, keys, sums, copy, targets_copy, n, features, classes, ignore_index, horizon,
    CENTER: tl.constexpr, COPY: tl.constexpr, STAGES: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Read the activations once and leave the keys and the partial sums; copy the activations if ``COPY``."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    column = tl.arange(0, BLOCK)
    inside = column < features
    center = tl.zeros([BLOCK], tl.float32)
    if CENTER:
        center = tl.load(mean + column, mask=inside, other=0.0)
    total = tl.zeros([BLOCK], tl.float32)
    norms = tl.zeros([ROWS], tl.float32)
    many = tl.zeros([ROWS], tl.int32)
    bad = tl.zeros([ROWS], tl.int32)
    for first in tl.range(program * ROWS, n, programs * ROWS, num_stages=STAGES):
        row = first + tl.arange(0, ROWS)
        here = row < n
        target = tl.load(targets + row, mask=here, other=-1)
        at = h + row.to(tl.int64)[:, None] * features + column[None, :]
        x = tl.load(at, mask=here[:, None] & inside[None, :], other=0.0).to(tl.float32)
        if COPY:
            to = copy + row.to(tl.int64)[:, None] * features + column[None, :]
            tl.store(to, x.to(copy.dtype.element_ty), mask=here[:, None] & inside[None, :])
            tl.store(targets_copy + row, target, mask=here)
        known = here & (target != ignore_index) & (target >= 0) & (target < classes)
        finite = tl.sum(x * x, 1) < float("inf")  # false for a NaN, too
        keep = known & finite
        tl.store(keys + row, tl.where(keep, target, -1).to(keys.dtype.element_ty), mask=here)
        away = x - center[None, :]
        norms += tl.where(keep, tl.sqrt_rn(tl.sum(away * away, 1)), 0.0)
        total += tl.sum(tl.where(keep[:, None], x, 0.0), 0)
        many += keep.to(tl.int32)
        bad += (known & (finite == 0)).to(tl.int32)
    tl.store(sums.columns + program * features + column, total, mask=inside)
    tl.store(sums.norms + program, tl.sum(norms, 0))
    tl.store(sums.kept + program, tl.sum(many, 0))
    tl.store(sums.nonfinite + program, tl.sum(bad, 0))
    if program == 0:  # the programs of ``statistics`` all need these, and one of them advances ``batches``
        seen = tl.load(batches + 1)
        tl.store(sums.share, tl.div_rn(1.0, tl.minimum(seen + 1, horizon).to(tl.float32)))
        tl.store(sums.before, seen)
