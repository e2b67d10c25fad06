r"""The mean cross-entropy from all logits in half precision, for problems that other engines take longer to launch.

With z = h Wᵀ, the row's largest logit m and the sum :math:`s = \sum_v e^{z_v - m}`,

.. math::
    \ell = (m - z_y) + \log s, \qquad dZ = (e^{z - m} / s - \mathrm{onehot}(y)) \cdot \mathrm{upstream} / \mathrm{count}

cuBLAS computes z and the two products with dZ, which takes the place of z in backward. One kernel reads z in forward,
and one reads and writes it in backward, all in float32 apart from z itself.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from hebbian_softmax import _torch
from hebbian_softmax._triton import Launcher, is_capturing, power_of_two
from hebbian_softmax.loss.checks import refused
from hebbian_softmax.loss.dtypes import autocasts, wide

UNIT: tl.constexpr = tl.constexpr(8)
"""A row of z takes a multiple of so many numbers, 16 bytes, which a thread reads at once."""
LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)

_LONG, _LONGER, _FEW_ROWS = 4096, 8192, 1024
"""The most columns that a program reads at once; with few rows there are more, since there are few programs."""
_OF_A_WARP = 1024
"""The logits that a warp reads at once: each thread has four loads of 16 bytes on their way together."""


class WholeCrossEntropy(torch.autograd.Function):
    """The mean of the cross-entropies of F.linear(input, weight) over the targets that count, in float32."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, target: Tensor, ignore_index: int) -> Tensor:
        """Return the loss of contiguous operands in one half-precision dtype; ``target`` is (N,), int64."""
        rows, classes = input.shape[0], weight.shape[0]
        with torch.cuda.device_of(input):
            z = _padded_logits(input, weight)
            target = target.contiguous()
            # For each row the largest logit, 1 / s and the loss; then 1 / count.
            terms = torch.empty(3 * rows + 1, dtype=torch.float32, device=z.device)
            loss = torch.empty((), dtype=torch.float32, device=z.device)
            good = torch.empty((), dtype=torch.int32, device=z.device)
            block, columns, warps = _block(rows, classes)
            grid, constants = (-(-rows // block), 1, 1), (ignore_index, block, columns)
            _launch_terms(grid, (z, target, terms, rows, classes), constants, warps, z)
            arguments = target, terms, loss, good, rows, classes
            _launch_mean((1, 1, 1), arguments, (ignore_index, 4096 if rows <= 4096 else 8192), 16, z)
            _torch.assert_on_device(good, refused(classes, ignore_index))
        ctx.save_for_backward(input, weight, target, z, terms)
        ctx.ignore_index, ctx.spent = ignore_index, False
        return loss

    @staticmethod
    def backward(ctx: Any, *upstreams: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of input and weight that are needed."""
        (upstream,) = upstreams
        if ctx.spent:
            raise RuntimeError("an earlier backward pass of this loss has failed midway; compute the loss again")
        input, weight, target, z, terms = ctx.saved_tensors
        for_input, for_weight = ctx.needs_input_grad[:2]
        if torch.is_grad_enabled() or _torch.is_batched(upstream):
            return (*_gradients_by_torch(ctx, input, weight, target, upstream), None, None)
        rows, classes = z.shape[0], weight.shape[0]
        block, columns, warps = _block(rows, classes)
        # Hooks may give saved tensors back in other places, and the kernels read 16 bytes at once.
        z, terms = (each if each.data_ptr() % 16 == 0 else each.clone() for each in (z, terms))
        with torch.cuda.device_of(z), _without_autocast(z):
            # A graph that was captured may be replayed although autograd was told that it is not kept.
            ctx.spent = not (_torch.backward_keeps_graph() or is_capturing())
            dz = z if ctx.spent else torch.empty_like(z)
            grid, constants = (-(-rows // block), -(-classes // columns), 1), (ctx.ignore_index, block, columns)
            _launch_gradient(grid, (z, dz, target, terms, upstream, rows, classes), constants, warps, z)
            dz = _of_classes(dz, classes)
            d_input = torch.mm(dz, weight) if for_input else None
            d_weight = torch.mm(dz.t(), input) if for_weight else None
        return d_input, d_weight, None, None


def _gradients_by_torch(
    ctx: Any, input: Tensor, weight: Tensor, target: Tensor, upstream: Tensor
) -> tuple[Tensor | None, ...]:
    """Return the gradients so that they can be differentiated again, or for several upstream gradients at once."""
    again = torch.is_grad_enabled()
    with torch.enable_grad(), _without_autocast(input):
        # Other tensors than the operands, which may be one and the same.
        operands = [each.view_as(each) for each in (input, weight)]
        logits = F.linear(*operands)
        loss = F.cross_entropy(logits.to(wide(logits.dtype)), target, ignore_index=ctx.ignore_index)
        wanted = [each for each, needed in zip(operands, ctx.needs_input_grad, strict=False) if needed]
        found = iter(torch.autograd.grad(loss, wanted, upstream, create_graph=again))
    return tuple(next(found) if needed else None for needed in ctx.needs_input_grad[:2])


def _without_autocast(tensor: Tensor) -> AbstractContextManager[None]:
    """Return a context without autocast, which a caller of backward may have on with another dtype."""
    return torch.autocast(tensor.device.type, enabled=False) if autocasts(tensor) else nullcontext()


def _padded_logits(input: Tensor, weight: Tensor) -> Tensor:
    """Return F.linear(input, weight) with rows of whole units; what follows the classes may be anything."""
    rows, classes = input.shape[0], weight.shape[0]
    if classes % UNIT.value == 0:
        return torch.mm(input, weight.t())
    width = -(-classes // UNIT.value) * UNIT.value
    z = torch.empty(rows, width, dtype=input.dtype, device=input.device)
    torch.mm(input, weight.t(), out=_of_classes(z, classes))
    return z


def _of_classes(z: Tensor, classes: int) -> Tensor:
    """Return the columns of the classes."""
    return z if z.shape[1] == classes else z[:, :classes]


def _block(rows: int, classes: int) -> tuple[int, int, int]:
    """Return the rows and columns that a program reads at once, several rows if they are short, and its warps."""
    columns = min(max(power_of_two(classes), 16), _LONGER if rows < _FEW_ROWS else _LONG)
    return max(_OF_A_WARP // columns, 1), columns, max(columns // _OF_A_WARP, 1)


@triton.jit
def _targets(target_ptr, rows, classes, IGNORED: tl.constexpr, ROWS: tl.constexpr):
    """Return the rows of this program, which of them exist, their targets, and which targets count and are classes."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    target = tl.load(target_ptr + row, row < rows, other=IGNORED)
    return row, row < rows, target, (target != IGNORED) & (target >= 0) & (target < classes)


@triton.jit
def _places(row, first, rows, classes, COLUMNS: tl.constexpr):
    """Return the columns from ``first`` on, the places in z of these columns of the rows, and which of them exist.

    Whole units exist, so that a thread loads or stores 16 bytes at once.
    """
    width = tl.cdiv(classes, UNIT) * UNIT
    column = first + tl.arange(0, COLUMNS)[None, :]
    return column, row[:, None] * width + column, (row < rows)[:, None] & (column < width)


@triton.jit
def _logits(z_ptr, place, exists, column, classes):
    """Return logits in float32, and -inf in place of what follows the classes."""
    z = tl.load(z_ptr + place, exists, other=float("-inf")).to(tl.float32)
    return tl.where(column < classes, z, float("-inf"))


@triton.jit(do_not_specialize=["rows", "classes"], do_not_specialize_on_alignment=["target_ptr"])
def row_terms(
    z_ptr, target_ptr, terms_ptr, rows, classes, IGNORED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """Store the largest logit m of each row, 1 / s and the loss."""
    row, here, target, counted = _targets(target_ptr, rows, classes, IGNORED, ROWS)
    own = tl.load(z_ptr + row * (tl.cdiv(classes, UNIT) * UNIT) + target, counted, other=0.0).to(tl.float32)
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(0, classes, COLUMNS):
        column, place, exists = _places(row, first, rows, classes, COLUMNS)
        z = _logits(z_ptr, place, exists, column, classes)
        higher = tl.maximum(top, tl.max(z, 1))
        shift = tl.where(higher == float("-inf"), 0.0, higher)  # where all logits so far are -inf
        total = total * tl.exp2((top - shift) * LOG2E)[:, None] + tl.exp2((z - shift[:, None]) * LOG2E)
        top = higher
    s = tl.sum(total, 1)
    tl.store(terms_ptr + row, top, here)
    tl.store(terms_ptr + rows + row, 1.0 / s, here)
    tl.store(terms_ptr + 2 * rows + row, tl.where(counted, (top - own) + tl.log(s), 0.0), here)


@triton.jit(do_not_specialize=["rows", "classes"], do_not_specialize_on_alignment=["target_ptr"])
def mean_loss(
    target_ptr, terms_ptr, loss_ptr, good_ptr, rows, classes, IGNORED: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Store the mean of the losses, 1 / count, and whether all targets are classes. One program does it all."""
    many = tl.zeros((BLOCK,), tl.int32)
    bad = tl.zeros((BLOCK,), tl.int32)
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, rows, BLOCK):
        at = first + tl.arange(0, BLOCK)
        target = tl.load(target_ptr + at, at < rows, other=IGNORED)
        counted = target != IGNORED
        many += counted.to(tl.int32)
        bad += (counted & ((target < 0) | (target >= classes))).to(tl.int32)
        total += tl.load(terms_ptr + 2 * rows + at, at < rows, other=0.0)
    count = tl.sum(many, 0).to(tl.float32)
    tl.store(loss_ptr, tl.div_rn(tl.sum(total, 0), count))
    tl.store(terms_ptr + 3 * rows, tl.div_rn(1.0, count))
    tl.store(good_ptr, (tl.sum(bad, 0) == 0).to(tl.int32))


@triton.jit(
    do_not_specialize=["rows", "classes"], do_not_specialize_on_alignment=["target_ptr", "upstream_ptr"]
)  # fmt: skip
def row_gradient(
    z_ptr, dz_ptr, target_ptr, terms_ptr, upstream_ptr, rows, classes,
    IGNORED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Store dZ of one block; it may take the place of z."""
    row, here, target, counted = _targets(target_ptr, rows, classes, IGNORED, ROWS)
    factor = tl.load(upstream_ptr) * tl.load(terms_ptr + 3 * rows)
    top = tl.load(terms_ptr + row, here, other=0.0)
    reciprocal = tl.load(terms_ptr + rows + row, here, other=0.0)
    column, place, exists = _places(row, tl.program_id(1) * COLUMNS, rows, classes, COLUMNS)
    z = _logits(z_ptr, place, exists, column, classes)
    p = tl.exp2((z - top[:, None]) * LOG2E) * reciprocal[:, None]
    dz = (p - (column == target[:, None]).to(tl.float32)) * factor
    tl.store(dz_ptr + place, tl.where(counted[:, None], dz, 0.0).to(dz_ptr.dtype.element_ty), exists)


_launch_terms, _launch_mean, _launch_gradient = Launcher(row_terms), Launcher(mean_loss), Launcher(row_gradient)
