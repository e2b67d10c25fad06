"""The write on a GPU: a sort and a few kernels in place of dynamic shapes, and never a wait for the device.

The same semantics as ``write.write_batch`` in one process. Shapes depend on the number of activations alone, so the
write can be captured in a CUDA graph together with the training step it belongs to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hebbian_softmax.objectives import Euclidean, InnerProduct
from hebbian_softmax.rule import ClassSums, ConstantRate, InclusiveRate, InverseCountRate, PaperRate, Rate
from hebbian_softmax.write.gpu import device
from hebbian_softmax.write.gpu.inspect import inspection_of
from hebbian_softmax.write.gpu.sort import stable_sort
from hebbian_softmax.write.gpu.update import Update, no_update
from hebbian_softmax.write.running import HORIZON

if TYPE_CHECKING:
    from hebbian_softmax.attach.activations import Activations
    from hebbian_softmax.layer import HebbianSoftmax


def applies(head: HebbianSoftmax, contents: Sequence[Activations | ClassSums], weight: Tensor) -> bool:
    """Whether the kernels can write this batch into ``weight``, which this process holds all rows of, alone."""
    folded = any(isinstance(each, ClassSums) for each in contents)
    return not folded and device.on_gpu(weight) and device.suits(head, weight)


@dataclass(frozen=True)
class Runs:
    """A batch sorted by class. The entries at positions where no run starts have n = 0 and no meaning otherwise."""

    h: Tensor
    """(N, features), in the order of the batch."""
    keys: Tensor
    """int16 or int32 (N,): -1 for what is left out, then the classes, ascending."""
    order: Tensor
    """int64 (N,): where in ``h`` they are."""
    blocks: Tensor
    """float32 (N / 16, features): sums of 16 activations each; only those within a run with λ > 0 have a meaning."""
    before: Tensor
    """int64 (N,): c[i] before the batch, 0 where no run starts."""
    n: Tensor
    """int32 (N,): n[i]."""
    rate: Tensor
    """float32 (N,): λ[i]."""
    center: Tensor
    """float32 (features,): what is subtracted."""
    scale: Tensor
    """float32 (1,): what is multiplied with."""


@torch.no_grad()
def write(head: HebbianSoftmax, contents: Sequence[Activations], weight: Tensor) -> None:
    """One iteration of Algorithm 1 after its gradient step, as ``write.write_batch``."""
    with torch.cuda.device_of(weight):
        runs = find_runs(head, contents, weight)
        if runs is None:
            return
        objective, radius = objective_of(head)
        device.kernels().write_rows[(runs.keys.numel(),)](
            runs.h, runs.keys, runs.order, runs.blocks, runs.before, runs.n, runs.rate, runs.center, runs.scale,
            head.counts, weight, head.in_features, float(radius),
            MEMORIZING=head.memorizing, OBJECTIVE=objective, **device.tile(head.in_features),
        )  # fmt: skip
        # Autograd refuses to go back through values that have changed: it must know.
        torch.autograd.graph.increment_version((weight, head.counts))


def find_runs(
    head: HebbianSoftmax,
    contents: Sequence[Activations],
    weight: Tensor,
    update: Update | None = None,
    slots: Tensor | None = None,
) -> Runs | None:
    """Sort a batch by class and take it into the running values; counts and rows are left to the caller.

    With ``update`` the gradient step is still to be made, and the norms of rows are those that it will leave.
    ``slots``, int32 of one entry a class, gets the position where the run of a class starts.
    None for a batch without activations, which changes nothing.
    """
    h, targets = _joined(contents, weight.device)
    n, features = h.shape
    if n == 0:
        return None
    triton, running = device.kernels(), head.running
    shape, seen = device.tile(features), inspection_of(head, contents, h, targets)
    keys, order = stable_sort(seen.keys, head.num_classes)
    before, many = torch.empty_like(order), torch.empty_like(order, dtype=torch.int32)
    rate, norms = (h.new_empty(n, dtype=torch.float32) for _ in range(2))
    kind, gamma, limit = _known_rate(head.rate)
    match = head.scale == "match"
    step, kind_of_step = no_update(weight) if update is None else update.arguments()
    row = {"BLOCK": shape["BLOCK"], "num_warps": min(16, max(1, shape["BLOCK"] // 512))}  # most programs have no row
    row_parts = min(device.ROW_PARTS, head.num_classes)
    all_norms, all_rows = h.new_empty(row_parts, dtype=torch.float32), many.new_empty(row_parts)
    triton.find_runs[(n + row_parts if match else n,)](
        keys, head.counts, weight, before, many, rate, norms, running.batches, all_norms, all_rows, n, features,
        head.num_classes, float(gamma), limit or 0, many if slots is None else slots, *step,
        RATE=kind, LIMITED=limit is not None, MATCH=match, SLOTS=slots is not None, **kind_of_step, **row,
    )  # fmt: skip
    if kind == triton.GIVEN:
        rate = head.mixing_rate(before, many.clamp_min(1).long()).to(rate.dtype).contiguous()  # not expanded
    center, scale = torch.empty_like(running.mean), seen.share.new_empty(1)
    triton.statistics[(-(-features // 32) + 1,)](
        seen.column_sums, seen.norm_sums, seen.kept, seen.nonfinite, seen.share, before, norms, all_norms, all_rows,
        running.mean, running.norms, running.batches, head.nonfinite_count, center, scale, n, features,
        seen.kept.shape[0], row_parts, 1.0 if match else head.scale, HORIZON,
        MATCH=match, CENTER=head.center, PARTS=device.power_of_two(seen.kept.shape[0]),
        ALL_PARTS=device.power_of_two(row_parts), COLUMNS=32, POSITIONS=min(8192, device.power_of_two(n)),
        num_warps=8,
    )  # fmt: skip
    torch.autograd.graph.increment_version((running.mean, running.norms, running.batches, head.nonfinite_count))
    blocks = h.new_empty(max(n // triton.BLOCK_LENGTH, 1), features, dtype=torch.float32)
    if head.memorizing and n >= triton.BLOCK_LENGTH:
        grid = (blocks.shape[0], -(-features // 256))
        triton.sum_blocks[grid](h, keys, order, rate, blocks, features, COLUMNS=256)
    return Runs(h, keys, order, blocks, before, many, rate, center, scale)


def objective_of(head: HebbianSoftmax) -> tuple[int, float]:
    objective = head.objective
    if isinstance(objective, InnerProduct):
        return device.kernels().ONTO_SPHERE, objective.radius
    assert isinstance(objective, Euclidean)
    if objective.radius is None:
        return device.kernels().AS_IT_IS, 0.0
    return device.kernels().INTO_BALL, objective.radius


def _known_rate(rate: Rate) -> tuple[int, float, int | None]:
    """Which of the kernel's rates it is, its γ and its T. A subclass may compute something else."""
    triton = device.kernels()
    match rate:
        case PaperRate(gamma, limit) if type(rate) is PaperRate:
            return triton.BEFORE, gamma, limit
        case InclusiveRate(gamma, limit) if type(rate) is InclusiveRate:
            return triton.INCLUSIVE, gamma, limit
        case ConstantRate(value, limit) if type(rate) is ConstantRate:
            return triton.CONSTANT, value, limit
        case InverseCountRate(limit) if type(rate) is InverseCountRate:
            return triton.BEFORE, 0.0, limit
    return triton.GIVEN, 0.0, None


def _joined(contents: Sequence[Activations], device: torch.device) -> tuple[Tensor, Tensor]:
    h = [each.h.to(device) for each in contents]
    targets = [each.targets.to(device) for each in contents]
    if len(h) == 1:
        return h[0].contiguous(), targets[0].contiguous()
    return torch.cat(h), torch.cat(targets)
