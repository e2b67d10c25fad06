"""The gradients of the GPU's engine, summed over chunks by cuBLAS, or stored by a kernel of ours where that is faster.

The fast kernels of cuBLAS take only sizes that are multiples of 8. So E and the sum of dW are padded, and the last few
classes of dh are added by the kernel that multiplies its rows by their factors.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from hebbian_softmax import _triton
from hebbian_softmax.loss.gpu.schedule import PADDING, TILE_ROWS, Schedule, padded
from hebbian_softmax.loss.problem import Gradients, Needs, Problem, RowTerms

_TAIL = 64
"""More than the classes left over when they are divided among at most 8 products, each of a multiple of 8 classes."""


class Sums:
    """E of a chunk of rows by classes, and the sums to which its products are added.

    ``input_rows`` is the number of rows in the unfinished sum of dh: the rows of one chunk where a chunk has all
    classes, and otherwise all rows.
    """

    def __init__(self, problem: Problem, needs: Needs, schedule: Schedule, input_rows: int) -> None:
        self.problem, self.needs, self.schedule = problem, needs, schedule
        h = problem.input
        rows, features = h.shape
        classes = problem.weight.shape[0]
        self.e = h.new_empty(schedule.rows, padded(schedule.classes, PADDING))
        self.factor = h.new_empty(rows, dtype=torch.float32)
        """The factor of each row: dZ = factor · E."""
        self.scaled: Tensor | None = None
        """The activations of the chunk times their factors; 0 in the rows that pad the chunk."""
        self.input = self.weight = self.bias = None
        if needs.input is not None:
            self.input = h.new_empty(rows, features, dtype=needs.input)
            reach = padded(input_rows, TILE_ROWS)
            self._parts = h.new_empty(schedule.splits, reach, features, dtype=torch.float32)
            self._parts_of_chunk = input_rows <= schedule.rows
        if needs.weight is not None:
            self.scaled = h.new_empty(schedule.rows, features)
            once = schedule.rows >= rows and needs.weight == h.dtype  # A single product is rounded once either way.
            dtype = h.dtype if once else torch.float32
            self.weight = h.new_empty(padded(classes, PADDING), features, dtype=dtype)
        if needs.bias is not None:
            self.bias = h.new_zeros(classes, dtype=torch.float32)
        if rows == 0 and self.weight is not None:
            self.weight.zero_()

    def scale_activations(self, chunk: slice) -> None:
        """Multiply the activations by their factors for :meth:`add_weight`, where no kernel has done it."""
        if self.scaled is not None:
            rows = chunk.stop - chunk.start
            torch.mul(self.problem.input[chunk], self.factor[chunk, None], out=self.scaled[:rows])
            self.scaled[rows : padded(rows, TILE_ROWS)].zero_()

    def add_weight(self, chunk: slice, classes: slice) -> None:
        """Add a chunk to dW and to the gradient of the bias."""
        rows, width = chunk.stop - chunk.start, classes.stop - classes.start
        if self.weight is not None:
            assert self.scaled is not None
            reach, span = padded(rows, TILE_ROWS), padded(width, PADDING)
            whole = span == self.weight.shape[0]
            out = self.weight if whole else self.weight[classes.start : classes.start + span]
            e, h, first = _first(self.e, reach), _first(self.scaled, reach), chunk.start == 0
            e = e if whole else e[:, :span]
            hopper = _triton.load("loss.gpu.hopper")
            if hopper is not None and hopper.stores_faster(out, first):
                hopper.launch_product(out, e, h)
            else:
                add_product(out, e.T, h, first)
        if self.bias is not None:
            column_sums[(-(-width // 128),)](
                self.e, self.factor, self.bias[classes], chunk.start, rows, width, self.e.stride(0),
                ROWS=64, CLASSES=128,
            )  # fmt: skip

    def add_input(self, chunk: slice, classes: slice) -> None:
        """Add E W of a chunk to parts, which :meth:`finish_input` adds up."""
        part = self._part(classes)
        if self.input is None or part == 0:
            return
        out = self._rows_of_parts(chunk)
        splits, reach, first = out.shape[0], out.shape[1], classes.start == 0
        w = self.problem.weight
        if splits * part < w.shape[0]:
            w = w[classes.start : classes.start + splits * part]
        if splits == 1:
            e = _first(self.e, reach)
            add_product(out[0], e if part == e.shape[1] else e[:, :part], w, first)
        else:
            e = self.e.as_strided((splits, reach, part), (part, self.e.stride(0), 1))
            add_product(out, e, w.view(splits, part, -1), first)

    def finish_input(self, chunk: slice, classes: slice) -> None:
        """Store dh: the sum of the parts and of the last classes' product, times the factors."""
        if self.input is None:
            return
        rows, features = chunk.stop - chunk.start, self.input.shape[1]
        parts = self._rows_of_parts(chunk)
        done = self._part(classes) * parts.shape[0]
        width = classes.stop - classes.start
        every = width == self.problem.weight.shape[0]
        w = self.problem.weight if every else self.problem.weight[classes]
        finish_input[(-(-rows // 32), -(-features // 128))](
            parts, self.e, w, self.factor, self.input, chunk.start,
            rows, parts.stride(0), features, done, width, self.e.stride(0),
            PARTS=parts.shape[0] if classes.start or done else 0, TAIL=_TAIL if width > done else 0,
            ROWS=32, FEATURES=128, IEEE=self.e.dtype == torch.float32,
        )  # fmt: skip

    def set_targets(
        self, chunk: slice, classes: slice, terms: RowTerms, a: Tensor, b: Tensor, slope: Tensor | None
    ) -> None:
        """Store E at the targets of a chunk from known terms."""
        rows = chunk.stop - chunk.start
        set_targets[(-(-rows // 128),)](
            self.e, terms.nll, self.problem.column, a, b, slope,
            chunk.start, rows, classes.start, classes.stop - classes.start, self.e.stride(0),
            ROWS=128, CAPPED=slope is not None,
        )  # fmt: skip

    def gradients(self) -> Gradients:
        """Return the gradients, each in the dtype in which it is wanted."""
        weight = None if self.weight is None else _first(self.weight, self.problem.weight.shape[0])
        pairs = ((self.input, self.needs.input), (weight, self.needs.weight), (self.bias, self.needs.bias))
        return Gradients(*(None if total is None else total.to(dtype) for total, dtype in pairs))

    def _part(self, classes: slice) -> int:
        """Return how many classes each of the products takes."""
        width: int = classes.stop - classes.start
        return width // (8 * self.schedule.splits) * 8

    def _rows_of_parts(self, chunk: slice) -> Tensor:
        """Return the parts of dh of a chunk, padded to whole tiles."""
        start, reach = 0 if self._parts_of_chunk else chunk.start, padded(chunk.stop - chunk.start, TILE_ROWS)
        return self._parts if reach == self._parts.shape[1] else self._parts[:, start : start + reach]


def _first(matrix: Tensor, rows: int) -> Tensor:
    """Return the first rows of a matrix, without making a view where they are all."""
    return matrix if matrix.shape[0] == rows else matrix[:rows]


def add_product(out: Tensor, left: Tensor, right: Tensor, first: bool) -> None:
    """Add left @ right to ``out``, or store it there the first time, summed in the dtype of ``out``."""
    # With one dtype for all, another overload is called, which is the only one without CUDA.
    wide: dict[str, Any] = {} if out.dtype == left.dtype else {"out_dtype": out.dtype}
    if out.dim() == 2:
        torch.mm(left, right, out=out, **wide) if first else torch.addmm(out, left, right, out=out, **wide)
    else:
        torch.bmm(left, right, out=out, **wide) if first else torch.baddbmm(out, left, right, out=out, **wide)


@triton.jit(do_not_specialize=["start", "rows", "first_class", "classes"])
def set_targets(
    e_ptr, nll_ptr, column_ptr, a_ptr, b_ptr, slope_ptr, start, rows, first_class, classes, e_stride,
    ROWS: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """Store E = p - b / a at each target that is among these classes, with p from the known nll, times any slope."""
    at = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = at < rows
    column = tl.load(column_ptr + start + at, inside, other=-1) - first_class
    here = inside & (column >= 0) & (column < classes)
    nll = tl.load(nll_ptr + start + at, here, other=0.0)
    a = tl.load(a_ptr + start + at, here, other=0.0)
    b = tl.load(b_ptr + start + at, here, other=0.0)
    # Where 1 - exp(-nll) would cancel, its series is used.
    series = nll * (1.0 - nll * (0.5 - nll * (1.0 / 6.0 - nll * (1.0 / 24.0))))
    rest = tl.where(nll < 0.03, series, 1.0 - tl.exp(-nll))
    value = tl.where(a != 0, (a - b) / a, 0.0) - rest
    if CAPPED:
        value *= tl.load(slope_ptr + start + at, here, other=0.0)
    tl.store(e_ptr + at.to(tl.int64) * e_stride + column, value.to(e_ptr.dtype.element_ty), here)


@triton.jit(do_not_specialize=["start", "rows", "done", "classes"])
def finish_input(
    parts_ptr, e_ptr, w_ptr, factor_ptr, out_ptr, start, rows, part_stride, features, done, classes, e_stride,
    PARTS: tl.constexpr, TAIL: tl.constexpr, ROWS: tl.constexpr, FEATURES: tl.constexpr, IEEE: tl.constexpr,
):  # fmt: skip
    """Store dh = factor · (the sum of the parts + the product over the classes not yet done, fewer than ``TAIL``)."""
    at = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    feature = tl.program_id(1) * FEATURES + tl.arange(0, FEATURES)
    valid = (at < rows)[:, None] & (feature < features)[None, :]
    where = at[:, None].to(tl.int64) * features + feature[None, :]
    total = tl.zeros((ROWS, FEATURES), tl.float32)
    for i in tl.static_range(PARTS):
        total += tl.load(parts_ptr + i * part_stride + where, valid, other=0.0)
    if TAIL > 0:
        k = done + tl.arange(0, TAIL)
        is_class = k < classes
        e_at = at[:, None].to(tl.int64) * e_stride + k[None, :]
        e = tl.load(e_ptr + e_at, (at < rows)[:, None] & is_class[None, :], other=0.0)
        w_at = k[:, None].to(tl.int64) * features + feature[None, :]
        w = tl.load(w_ptr + w_at, is_class[:, None] & (feature < features)[None, :], other=0.0)
        if IEEE:
            total = tl.dot(e, w, total, input_precision="ieee")
        else:
            total = tl.dot(e, w, total)
    factor = tl.load(factor_ptr + start + at, at < rows, other=0.0)
    where += start.to(tl.int64) * features
    tl.store(out_ptr + where, (total * factor[:, None]).to(out_ptr.dtype.element_ty), valid)


@triton.jit(do_not_specialize=["start", "rows", "classes"])
def column_sums(
    e_ptr, factor_ptr, out_ptr, start, rows, classes, e_stride, ROWS: tl.constexpr, CLASSES: tl.constexpr
):  # fmt: skip
    """Add to the gradient of the bias: out += Σ_i factor_i · E_iv."""
    column = tl.program_id(0) * CLASSES + tl.arange(0, CLASSES)
    is_class = column < classes
    total = tl.zeros((CLASSES,), tl.float32)
    for some in range(0, rows, ROWS):
        at = some + tl.arange(0, ROWS)
        where = at[:, None].to(tl.int64) * e_stride + column[None, :]
        e = tl.load(e_ptr + where, (at < rows)[:, None] & is_class[None, :], other=0.0).to(tl.float32)
        factor = tl.load(factor_ptr + start + at, at < rows, other=0.0)
        total += tl.sum(e * factor[:, None], 0)
    tl.store(out_ptr + column, tl.load(out_ptr + column, is_class, other=0.0) + total, is_class)
