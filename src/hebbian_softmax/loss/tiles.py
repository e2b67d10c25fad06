"""The matrix products of a tile of logits, and the buffers that they need."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from hebbian_softmax.loss.dtypes import fast_dtype, wide
from hebbian_softmax.loss.problem import Problem

_ALIGNMENT = 64
"""Rows of the buffer of logits start at multiples of this many elements; an odd V would misalign them."""

_FEWEST_ROWS = 64
"""With fewer rows, a product is slower than the machine allows, so the vocabulary is split instead."""

_MOST_ROWS = 1024
"""Enough rows for fast products where the vocabulary is split."""

_CACHE = 2**21
"""Bytes of logits that a CPU works on at once, so that they stay in its cache from one pass to the next."""

_CONVERTED = 2**23
"""Bytes of the matrix that are converted at once; more would not stay in the cache."""

_LARGEST_WORKSPACE = {"cpu": 2**27, "cuda": 2**30}
"""Bytes with which products run at full speed."""


def largest_workspace(device: torch.device) -> int:
    """Return the bytes of workspace beyond which products do not become faster."""
    return _LARGEST_WORKSPACE.get(device.type, 2**28)


def ranges(total: int, size: int) -> Iterator[slice]:
    """Yield slices of ``size`` that cover ``total``; the last may be shorter."""
    for start in range(0, total, size):
        yield slice(start, min(start + size, total))


@dataclass(frozen=True)
class Plan:
    """The tiles into which the (N, V) logits are cut: ``rows`` × ``classes``, processed ``group`` rows at a time."""

    rows: int
    classes: int
    group: int
    block: int
    """The classes whose rows of the matrix, or of its gradient, are converted at a time."""

    @classmethod
    def of(cls, problem: Problem, workspace: int, entropy: bool = False) -> Plan:
        """Return the plan for a workspace in bytes. While a tile is processed, at most these are held:

        - rows × classes logits in the compute dtype (their gradient overwrites them), and, where the problem is
          converted to that dtype, twice rows × d for the input and its gradient;
        - group × classes logits in float32 where the compute dtype is narrower, as many derivatives of a softcap, and
          as many logits to be summed for label smoothing or an entropy: each up to a quarter of the workspace;
        - block × d of the matrix, its gradient, or the operands of the targets' logits, where they are converted: up
          to a quarter.

        Tiles have all classes while at least 64 rows fit. The smallest tile is one row by 64 classes, with 64 classes
        a block.
        """
        (n, d), v = problem.input.shape, problem.planned_classes
        dtype = fast_dtype(problem.input.dtype, problem.input.device)
        cpu, narrow, converts = problem.input.device.type == "cpu", dtype.itemsize < 4, dtype != problem.input.dtype
        quarter = workspace // 4
        grouped = min(quarter, _CACHE) if cpu else quarter
        blocked = min(quarter, _CONVERTED)
        left = workspace - (grouped if narrow else 0) - (blocked if converts or narrow else 0)
        left -= grouped * ((problem.softcap is not None) + (problem.spread is not None) + entropy)
        elements = max(left // dtype.itemsize, _ALIGNMENT)
        beside = 2 * d if converts else 0
        classes = padded(v)
        rows = elements // (classes + beside)
        if rows < min(n, _FEWEST_ROWS):
            rows = max(min(n, _MOST_ROWS, elements // (_ALIGNMENT + beside)), 1)
            classes = max((elements // rows - beside) // _ALIGNMENT, 1) * _ALIGNMENT
        rows, classes = max(min(rows, n), 1), min(classes, padded(v))
        rows = -(-n // -(-n // rows)) if n else 1  # The same number of tiles, cut evenly.
        group = max(grouped // (max(dtype.itemsize, 4) * classes), 1)
        block = max(blocked // (4 * max(d, 1)), _ALIGNMENT)
        return cls(rows, min(classes, v), min(group, rows), min(block, classes))


def padded(classes: int) -> int:
    """Return the elements of a row of the buffer of logits."""
    return -(-classes // _ALIGNMENT) * _ALIGNMENT


class Tiles:
    """The products of one problem, with one buffer of logits that all tiles share."""

    def __init__(self, problem: Problem, plan: Plan) -> None:
        self.problem, self.plan = problem, plan
        self.dtype = fast_dtype(problem.input.dtype, problem.input.device)
        self.wide = wide(self.dtype)
        self.converts = self.dtype != problem.weight.dtype
        self.read_beyond = problem.input.device.type == "cpu" and self.dtype != self.wide
        """Whether a product may read a row of logits beyond its end. In half precision oneDNN does so on CPUs with AMX,
        up to a multiple of 32 elements, and multiplies what stands there by 0, which makes NaN of NaN (torch 2.13)."""
        self._logits = problem.input.new_empty(plan.rows, padded(plan.classes), dtype=self.dtype)
        self._group: Tensor | None = None
        self._slope: Tensor | None = None

    def logits(self, rows: slice, classes: slice) -> Tensor:
        """Return u = h Wᵀ + bias of a tile, in the shared buffer; :meth:`finish` makes z of it."""
        h = self.problem.input[rows].to(self.dtype)
        width = classes.stop - classes.start
        z = self._logits[: h.shape[0], :width]
        if self.read_beyond:
            self._logits[: h.shape[0], width : padded(width)] = 0
        for part, here in self._blocks(classes, self.converts):
            matrix = self.problem.weight[part].to(self.dtype).t()
            if self.problem.bias is None:
                torch.mm(h, matrix, out=z[:, here])
            else:
                torch.addmm(self.problem.bias[part].to(self.dtype), h, matrix, out=z[:, here])
        return z

    def target_logits(self, rows: slice) -> Tensor | None:
        """Return z[y] as a column, from dot products in float32; None where :meth:`logits` are as exact.

        It is 0 where another rank has the target.
        """
        if self.dtype == self.wide:
            return None
        column = self.problem.column[rows]
        target = column.clamp(0, self.problem.weight.shape[0] - 1)
        found = target.new_empty(len(target), 1, dtype=self.wide)
        for some in ranges(len(target), max(self.plan.block // 2, 1)):
            h = self.problem.input[rows][some].to(self.wide)
            torch.bmm(h[:, None], self.problem.weight[target[some]].to(self.wide)[:, :, None], out=found[some, None])
        if self.problem.bias is not None:
            found += self.problem.bias[target, None]
        self._shape(found)
        if self.problem.prior is not None:
            found += self.problem.prior[target, None]
        return found if self.problem.part is None else torch.where((column == target)[:, None], found, 0)

    def finish(self, z: Tensor, classes: slice, slope: Tensor | None = None) -> Tensor:
        """Make the logits of some rows and classes final, in place and in at least float32; return them.

        ``slope`` gets the derivative of the softcap.
        """
        self._shape(z, slope)
        return z if self.problem.prior is None else z.add_(self.problem.prior[classes])

    def _shape(self, z: Tensor, slope: Tensor | None = None) -> None:
        """Apply softcap and temperature in place."""
        scale, cap = self.problem.scale, self.problem.softcap
        if cap is not None:
            z.div_(cap).tanh_()
            if slope is not None:
                torch.mul(z, z, out=slope).neg_().add_(1)
            scale *= cap
        if scale != 1:
            z.mul_(scale)

    def groups(self, z: Tensor, classes: slice, back: bool = True) -> Iterator[tuple[slice, Tensor, Tensor | None]]:
        """Yield the final logits of a tile, in at least float32, some rows at a time.

        ``back`` copies what is written there to z, and yields the derivative of a softcap, too.
        """
        for rows in ranges(z.shape[0], self.plan.group):
            height, width = rows.stop - rows.start, z.shape[1]
            slope = None
            if back and self.problem.softcap is not None:
                if self._slope is None:
                    self._slope = z.new_empty(self.plan.group, padded(self.plan.classes), dtype=self.wide)
                slope = self._slope[:height, :width]
            if self.dtype == self.wide:
                yield rows, self.finish(z[rows], classes, slope), slope
                continue
            if self._group is None:
                self._group = z.new_empty(self.plan.group, padded(self.plan.classes), dtype=self.wide)
            group = self._group[:height, :width].copy_(z[rows])
            yield rows, self.finish(group, classes, slope), slope
            if back:
                z[rows].copy_(group)

    def add_input_gradient(self, total: Tensor, z: Tensor, classes: slice, first: bool) -> None:
        """Add dZ W, over the classes of a tile, to ``total``; ``first`` overwrites instead."""
        if not self.converts:
            _add_product(total, z, self.problem.weight[classes], first)
            return
        product = z.new_empty(total.shape)
        for part, here in self._blocks(classes, True):
            _add_product(product, z[:, here], self.problem.weight[part].to(self.dtype), here.start == 0)
        _add(total, product, first)

    def add_weight_gradient(self, total: Tensor, z: Tensor, rows: slice, first: bool) -> None:
        """Add dZᵀ h, over the rows of a tile, to ``total``; ``first`` overwrites instead."""
        h = self.problem.input[rows].to(self.dtype)
        apart = total.dtype != self.dtype and total.device.type == "cpu"
        for _, here in self._blocks(slice(0, z.shape[1]), apart):
            _add_product(total[here], z[:, here].t(), h, first)

    def _blocks(self, classes: slice, split: bool) -> Iterator[tuple[slice, slice]]:
        """Yield classes as rows of the matrix and as columns of the tile, in blocks where ``split`` saves memory."""
        count = classes.stop - classes.start
        for here in ranges(count, self.plan.block if split else count):
            yield slice(classes.start + here.start, classes.start + here.stop), here


def _add_product(total: Tensor, left: Tensor, right: Tensor, first: bool) -> None:
    """Add left @ right to ``total``, without rounding the product where the device can add it to a wider total."""
    beta = 0 if first else 1
    if total.dtype == left.dtype:
        torch.addmm(total, left, right, beta=beta, out=total)
    elif total.device.type == "cuda" and total.dtype == torch.float32:
        torch.addmm(total, left, right, out_dtype=torch.float32, beta=beta, out=total)
    else:
        _add(total, left @ right, first)


def _add(total: Tensor, summand: Tensor, first: bool) -> None:
    if first:
        total.copy_(summand)
    else:
        total.add_(summand)
