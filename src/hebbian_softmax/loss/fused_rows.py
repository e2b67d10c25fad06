"""The rows of the fused engine: their terms, and E of a chunk of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from hebbian_softmax.loss import kernels
from hebbian_softmax.loss.fused_sums import Sums
from hebbian_softmax.loss.problem import Problem, RowTerms
from hebbian_softmax.loss.schedule import TILE_CLASSES, TILE_FEATURES, TILE_ROWS, padded

_SETTLED_ROWS, _SETTLED_CLASSES = 64, 128
"""What one program settles: a part of a tile, so that more programs share the work."""


@dataclass(frozen=True)
class Rows:
    """What is found of each row, float32, and the memory that finding it takes."""

    problem: Problem
    logit: Tensor
    shift: Tensor
    nll: Tensor
    normaliser: Tensor
    partial: Tensor
    """For each tile of classes, of each row of a chunk."""

    @staticmethod
    def of(problem: Problem, chunk: int) -> Rows:
        rows, features = problem.input.shape
        logit, shift, nll, normaliser = problem.input.new_empty(4, rows, dtype=torch.float32)
        partial = logit.new_empty(-(-problem.weight.shape[0] // TILE_CLASSES) * chunk)
        if rows:
            kernels.target_logits[(rows,)](
                problem.input, problem.weight, problem.bias, problem.target, shift, logit, features,
                HAS_BIAS=problem.bias is not None, BLOCK=512,
            )  # fmt: skip
        return Rows(problem, logit, shift, nll, normaliser, partial)

    def terms(self) -> RowTerms:
        return RowTerms(self.nll, self.logit, self.normaliser)

    def take_in(
        self, start: int, stop: int, sums: Sums | None = None, a: Tensor | None = None, b: Tensor | None = None
    ) -> None:
        """The terms of these rows, and with ``sums`` their E and factors."""
        problem = self.problem
        rows, (classes, features) = stop - start, problem.weight.shape
        e = None if sums is None else sums.e
        launch_scores(problem, slice(start, stop), slice(0, classes), self.shift, self.partial, e)
        kernels.settle[(padded(rows, TILE_ROWS) // _SETTLED_ROWS,)](
            *_descriptors(problem, slice(0, classes), _SETTLED_ROWS, _SETTLED_CLASSES),
            problem.bias, problem.target, self.shift, self.partial, self.logit, a, b, problem.input,
            self.nll, self.normaliser,
            None if sums is None else sums.factor,
            None if sums is None else sums.scaled,
            e, start, rows, classes, features, 0 if e is None else e.stride(0),
            GRADIENT=sums is not None, SCALE=sums is not None and sums.scaled is not None,
            ROWS=_SETTLED_ROWS, CLASSES=_SETTLED_CLASSES, FEATURES=TILE_FEATURES, TILE=TILE_CLASSES,
            PART=64, COLUMNS=128, HAS_BIAS=problem.bias is not None, IEEE=problem.input.dtype == torch.float32,
            num_warps=8, num_stages=2,
        )  # fmt: skip


def launch_scores(
    problem: Problem, chunk: slice, classes: slice, shift: Tensor, partial: Tensor, e: Tensor | None
) -> None:
    """E (if any) and its sums, of a chunk of rows by some classes."""
    rows, width = chunk.stop - chunk.start, classes.stop - classes.start
    programs = processors(problem.input.device)  # a constant of the kernel: not of the batch, which it would wait for
    out = _descriptor(problem.input, TILE_ROWS, TILE_CLASSES)
    if e is not None:
        out = _descriptor(e, TILE_ROWS, TILE_CLASSES, padded(rows, TILE_ROWS))
    kernels.scores[(min(-(-rows // TILE_ROWS) * -(-width // TILE_CLASSES), programs),)](
        *_descriptors(problem, classes, TILE_ROWS, TILE_CLASSES),
        out,
        problem.bias if problem.bias is None or width == len(problem.bias) else problem.bias[classes],
        problem.target, shift, partial, chunk.start, rows, width, problem.input.shape[1], classes.start,
        ROWS=TILE_ROWS, CLASSES=TILE_CLASSES, FEATURES=TILE_FEATURES, GROUP=8, PROGRAMS=programs,
        STORE=e is not None, HAS_BIAS=problem.bias is not None, IEEE=problem.input.dtype == torch.float32,
        num_warps=8, num_stages=3,
    )  # fmt: skip


def _descriptors(problem: Problem, classes: slice, tile_rows: int, tile_classes: int) -> list[Any]:
    """Of the activations, and of some rows of the matrix."""
    w = problem.weight
    if classes.stop - classes.start < w.shape[0]:
        w = w[classes]
    return [_descriptor(problem.input, tile_rows, TILE_FEATURES), _descriptor(w, tile_classes, TILE_FEATURES)]


def _descriptor(matrix: Tensor, rows: int, columns: int, height: int | None = None) -> Any:
    """Of a matrix, or of its first ``height`` rows, in tiles of rows × columns."""
    shape = [matrix.shape[0] if height is None else height, matrix.shape[1]]
    return TensorDescriptor(matrix, shape, [matrix.stride(0), 1], [rows, columns])


def processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
