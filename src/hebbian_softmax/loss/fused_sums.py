"""The gradients of the fused engine, summed over chunks by cuBLAS.

Sizes given to cuBLAS are multiples of 8, since its fast kernels take no others: E and the sum of dW are padded, and the
last few classes of dh are added by the kernel that multiplies its rows with their factors.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hebbian_softmax.loss import kernels
from hebbian_softmax.loss.problem import Gradients, Needs, Problem
from hebbian_softmax.loss.schedule import PADDING, TILE_ROWS, Schedule, padded

_TAIL = 64
"""More than the classes left over when they are divided among at most 8 products, each of a multiple of 8 classes."""


class Sums:
    """E of a chunk of rows by classes, and the sums that it is added to.

    ``input_rows``: those of the unfinished sum of dh: of one chunk, where each has all classes, or all rows.
    """

    def __init__(self, problem: Problem, needs: Needs, schedule: Schedule, input_rows: int) -> None:
        self.problem, self.needs, self.schedule = problem, needs, schedule
        h = problem.input
        rows, features = h.shape
        classes = problem.weight.shape[0]
        self.e = h.new_empty(schedule.rows, padded(schedule.classes, PADDING))
        self.factor = h.new_empty(rows, dtype=torch.float32)
        """Of each row: dZ = factor · E."""
        self.scaled: Tensor | None = None
        """The activations of the chunk times their factors; 0 in the rows beyond."""
        self.input = self.weight = self.bias = None
        if needs.input is not None:
            self.input = h.new_empty(rows, features, dtype=needs.input)
            reach = padded(input_rows, TILE_ROWS)
            self._parts = h.new_empty(schedule.splits, reach, features, dtype=torch.float32)
            self._parts_of_chunk = input_rows <= schedule.rows
        if needs.weight is not None:
            self.scaled = h.new_empty(schedule.rows, features)
            once = schedule.rows >= rows and needs.weight == h.dtype  # a single product is rounded once either way
            dtype = h.dtype if once else torch.float32
            self.weight = h.new_empty(padded(classes, PADDING), features, dtype=dtype)
        if needs.bias is not None:
            self.bias = h.new_zeros(classes, dtype=torch.float32)
        if rows == 0 and self.weight is not None:
            self.weight.zero_()

    def scale_activations(self, chunk: slice) -> None:
        """For :meth:`add_weight`, where no kernel has done it."""
        if self.scaled is not None:
            rows = chunk.stop - chunk.start
            torch.mul(self.problem.input[chunk], self.factor[chunk, None], out=self.scaled[:rows])
            self.scaled[rows : padded(rows, TILE_ROWS)].zero_()

    def add_weight(self, chunk: slice, classes: slice) -> None:
        """dW and the gradient of the bias."""
        rows, width = chunk.stop - chunk.start, classes.stop - classes.start
        if self.weight is not None:
            assert self.scaled is not None
            reach, span = padded(rows, TILE_ROWS), padded(width, PADDING)
            whole = span == self.weight.shape[0]
            out = self.weight if whole else self.weight[classes.start : classes.start + span]
            e = _first(self.e, reach)
            add_product(out, (e if whole else e[:, :span]).T, _first(self.scaled, reach), first=chunk.start == 0)
        if self.bias is not None:
            kernels.column_sums[(-(-width // 128),)](
                self.e,
                self.factor,
                self.bias[classes],
                chunk.start,
                rows,
                width,
                self.e.stride(0),
                ROWS=64,
                CLASSES=128,
            )

    def add_input(self, chunk: slice, classes: slice) -> None:
        """E W, in parts that :meth:`finish_input` adds up."""
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
        """The sum of the parts and of the last classes' product, times the factors."""
        if self.input is None:
            return
        rows, features = chunk.stop - chunk.start, self.input.shape[1]
        parts = self._rows_of_parts(chunk)
        done = self._part(classes) * parts.shape[0]
        width = classes.stop - classes.start
        every = width == self.problem.weight.shape[0]
        w = self.problem.weight if every else self.problem.weight[classes]
        kernels.finish_input[(-(-rows // 32), -(-features // 128))](
            parts, self.e, w, self.factor, self.input, chunk.start,
            rows, parts.stride(0), features, done, width, self.e.stride(0),
            PARTS=parts.shape[0] if classes.start or done else 0, TAIL=_TAIL if width > done else 0,
            ROWS=32, FEATURES=128, IEEE=self.e.dtype == torch.float32,
        )  # fmt: skip

    def gradients(self) -> Gradients:
        weight = None if self.weight is None else _first(self.weight, self.problem.weight.shape[0])
        pairs = ((self.input, self.needs.input), (weight, self.needs.weight), (self.bias, self.needs.bias))
        return Gradients(*(None if total is None else total.to(dtype) for total, dtype in pairs))

    def _part(self, classes: slice) -> int:
        """How many classes each of the products takes."""
        width: int = classes.stop - classes.start
        return width // (8 * self.schedule.splits) * 8

    def _rows_of_parts(self, chunk: slice) -> Tensor:
        start, reach = 0 if self._parts_of_chunk else chunk.start, padded(chunk.stop - chunk.start, TILE_ROWS)
        return self._parts if reach == self._parts.shape[1] else self._parts[:, start : start + reach]


def _first(matrix: Tensor, rows: int) -> Tensor:
    return matrix if matrix.shape[0] == rows else matrix[:rows]


def add_product(out: Tensor, left: Tensor, right: Tensor, first: bool) -> None:
    """out += left @ right, or out = left @ right the first time, summed in float32 whatever the factors' dtype."""
    # One dtype for all is an overload of its own, and without CUDA the only one.
    wide: dict[str, Any] = {} if out.dtype == left.dtype else {"out_dtype": out.dtype}
    if out.dim() == 2:
        torch.mm(left, right, out=out, **wide) if first else torch.addmm(out, left, right, out=out, **wide)
    else:
        torch.bmm(left, right, out=out, **wide) if first else torch.baddbmm(out, left, right, out=out, **wide)
