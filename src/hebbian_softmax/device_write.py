"""The write on a GPU: a sort and a few kernels in place of dynamic shapes, and never a wait for the device.

The same semantics as ``write.write_batch`` in one process. Shapes depend on the number of activations alone, so the
write can be captured in a CUDA graph together with the training step it belongs to.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hebbian_softmax.device_step import Update, no_update
from hebbian_softmax.objectives import Euclidean, InnerProduct
from hebbian_softmax.rule import ClassSums, ConstantRate, InclusiveRate, InverseCountRate, PaperRate, Rate
from hebbian_softmax.running import HORIZON

if TYPE_CHECKING:
    from hebbian_softmax.layer import HebbianSoftmax
    from hebbian_softmax.pending import Activations

_WIDEST = 16_384
"""Features beyond this do not fit in a program's registers."""
_PARTS = 512
"""Programs that share a pass over the activations: each leaves a partial sum of every column."""
_ROW_PARTS = 512
_TILE = 4_096
"""Values that a program holds of several activations at once."""
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@cache
def kernels() -> Any:
    """The kernels; None where there is no Triton."""
    try:
        return importlib.import_module("hebbian_softmax.kernels")
    except ImportError:
        return None


def applies(head: HebbianSoftmax, contents: Sequence[Activations | ClassSums], weight: Tensor) -> bool:
    """Whether the kernels can write this batch into ``weight``, which this process holds all rows of, alone."""
    return on_gpu(weight) and suits(head, weight) and not any(isinstance(each, ClassSums) for each in contents)


def on_gpu(tensor: Tensor) -> bool:
    """Whether kernels can work on it. Subclasses, as DTensor, are not the memory that they stand for."""
    plain = type(tensor) in (Tensor, nn.Parameter) and tensor.dtype in _DTYPES and tensor.is_contiguous()
    return tensor.is_cuda and plain and kernels() is not None


def suits(head: HebbianSoftmax, weight: Tensor) -> bool:
    """Whether the kernels can do what this head is set to."""
    return (
        type(head.objective) in (Euclidean, InnerProduct)
        and weight.dtype in _DTYPES
        and head.running.mean.dtype == torch.float32
        and head.counts.device == weight.device
        and head.in_features <= _WIDEST
        and head.num_classes < 2**31 - 1
    )


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
        kernels().write_rows[(runs.keys.numel(),)](
            runs.h,
            runs.keys,
            runs.order,
            runs.blocks,
            runs.before,
            runs.n,
            runs.rate,
            runs.center,
            runs.scale,
            head.counts,
            weight,
            head.in_features,
            float(radius),
            MEMORIZING=head.memorizing,
            OBJECTIVE=objective,
            **tile(head.in_features),
        )
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
    triton, running = kernels(), head.running
    shape = tile(features)
    parts = min(_PARTS, -(-n // shape["ROWS"]))
    # Fewer bits are sorted in fewer passes.
    keys = torch.empty_like(targets, dtype=torch.int16 if head.num_classes <= 2**15 else torch.int32)
    column_sums, norm_sums = h.new_empty(parts, features, dtype=torch.float32), h.new_empty(parts, dtype=torch.float32)
    kept, nonfinite = keys.new_empty(2, parts, dtype=torch.int32)
    share, scale = h.new_empty(2, 1, dtype=torch.float32)
    triton.inspect[(parts,)](
        h,
        targets,
        running.mean,
        running.batches,
        keys,
        column_sums,
        norm_sums,
        kept,
        nonfinite,
        share,
        n,
        features,
        head.num_classes,
        head.ignore_index,
        HORIZON,
        CENTER=head.center,
        **shape,
    )
    keys, order = keys.sort(stable=True)
    before, many = torch.empty_like(order), torch.empty_like(order, dtype=torch.int32)
    rate, norms = (h.new_empty(n, dtype=torch.float32) for _ in range(2))
    kind, gamma, limit = _known_rate(head.rate)
    match = head.scale == "match"
    step, kind_of_step = no_update(weight) if update is None else update.arguments()
    row = {"BLOCK": shape["BLOCK"], "num_warps": min(16, max(1, shape["BLOCK"] // 512))}  # most programs have no row
    triton.find_runs[(n,)](
        keys,
        head.counts,
        weight,
        before,
        many,
        rate,
        norms,
        n,
        features,
        float(gamma),
        limit or 0,
        many if slots is None else slots,
        *step,
        RATE=kind,
        LIMITED=limit is not None,
        MATCH=match,
        SLOTS=slots is not None,
        **kind_of_step,
        **row,
    )
    if kind == triton.GIVEN:
        rate = head.mixing_rate(before, many.clamp_min(1).long()).to(rate.dtype)
    row_parts = min(_ROW_PARTS, head.num_classes)
    all_norms, all_rows = h.new_empty(row_parts, dtype=torch.float32), many.new_empty(row_parts)
    if match:
        triton.see_all_rows[(row_parts,)](
            head.counts,
            weight,
            running.batches,
            all_norms,
            all_rows,
            features,
            head.num_classes,
            *step,
            **kind_of_step,
            **row,
        )
    center = torch.empty_like(running.mean)
    triton.statistics[(-(-features // 32),)](
        column_sums,
        norm_sums,
        kept,
        nonfinite,
        share,
        before,
        norms,
        all_norms,
        all_rows,
        running.mean,
        running.norms,
        running.batches,
        head.nonfinite_count,
        center,
        scale,
        n,
        features,
        parts,
        row_parts,
        1.0 if match else head.scale,
        HORIZON,
        MATCH=match,
        CENTER=head.center,
        PARTS=power_of_two(parts),
        ALL_PARTS=power_of_two(row_parts),
        COLUMNS=32,
        POSITIONS=min(8192, power_of_two(n)),
        num_warps=8,
    )
    torch.autograd.graph.increment_version((running.mean, running.norms, running.batches, head.nonfinite_count))
    blocks = h.new_empty(max(n // triton.BLOCK_LENGTH, 1), features, dtype=torch.float32)
    if head.memorizing and n >= triton.BLOCK_LENGTH:
        grid = (blocks.shape[0], -(-features // 256))
        triton.sum_blocks[grid](h, keys, order, rate, blocks, features, COLUMNS=256)
    return Runs(h, keys, order, blocks, before, many, rate, center, scale)


def any_nonzero(values: Tensor) -> Tensor:
    """``values.any()``; on a GPU it looks no further once a value is found, and does not wait for the device."""
    if not on_gpu(values):
        return values.any()
    found = values.new_zeros((), dtype=torch.uint8)
    with torch.cuda.device_of(values):
        programs = min(_ROW_PARTS, -(-values.numel() // 1024))
        if programs:
            kernels().any_nonzero[(programs,)](values, found, values.numel(), BLOCK=1024)
    return found.view(torch.bool)


def tile(features: int) -> dict[str, int]:
    """How many activations a program holds at once, of how many values, with how many warps."""
    block = power_of_two(features)
    rows = max(1, min(4, _TILE // block))
    return {"ROWS": rows, "BLOCK": block, "num_warps": min(16, max(1, rows * block // 1024, block // 512))}


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least ``n``."""
    return 1 << (n - 1).bit_length()


def objective_of(head: HebbianSoftmax) -> tuple[int, float]:
    objective = head.objective
    if isinstance(objective, InnerProduct):
        return kernels().ONTO_SPHERE, objective.radius
    assert isinstance(objective, Euclidean)
    if objective.radius is None:
        return kernels().AS_IT_IS, 0.0
    return kernels().INTO_BALL, objective.radius


def _known_rate(rate: Rate) -> tuple[int, float, int | None]:
    """Which of the kernel's rates it is, its γ and its T. A subclass may compute something else."""
    triton = kernels()
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
