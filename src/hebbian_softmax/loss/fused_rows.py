"""The rows of the fused engine: their terms, and E of a chunk of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from hebbian_softmax.loss import kernels
from hebbian_softmax.loss.fused_sums import Sums
from hebbian_softmax.loss.problem import Problem, RowTerms
from hebbian_softmax.loss.schedule import PADDING, TILE_CLASSES, TILE_FEATURES, TILE_ROWS, padded


@dataclass(frozen=True)
class Rows:
    """What is found of each row, float32, and the memory that finding it takes."""

    problem: Problem
    logit: Tensor
    shift: Tensor
    nll: Tensor
    partial: Tensor
    """For each tile of classes, of each row of a chunk."""
    retry: Tensor
    """For each chunk, how many of its rows are to be made again."""
    chunk: int

    @staticmethod
    def of(problem: Problem, chunk: int) -> Rows:
        rows, features = problem.input.shape
        logit, shift, nll = problem.input.new_empty(3, rows, dtype=torch.float32)
        partial = logit.new_empty(-(-problem.weight.shape[0] // TILE_CLASSES) * chunk)
        retry = problem.target.new_zeros(-(-rows // chunk), dtype=torch.int32)
        if rows:
            kernels.target_logits[(rows,)](
                problem.input, problem.weight, problem.bias, problem.target, shift, logit, features,
                HAS_BIAS=problem.bias is not None, BLOCK=512,
            )  # fmt: skip
        return Rows(problem, logit, shift, nll, partial, retry, chunk)

    def terms(self) -> RowTerms:
        return RowTerms(self.nll, self.logit)

    def take_in(
        self, start: int, stop: int, sums: Sums | None = None, a: Tensor | None = None, b: Tensor | None = None
    ) -> None:
        """The terms of these rows, and with ``sums`` their E and factors; all over again if a sum was too large.

        Whether it was is decided on the device: the launches of the second time return at once if it was not.
        """
        problem, chunk, everything = self.problem, slice(start, stop), slice(0, self.problem.weight.shape[0])
        retry = self.retry[start // self.chunk :]
        e = None if sums is None else sums.e
        launch_scores(problem, chunk, everything, self.shift, self.partial, e)
        self._finish(chunk, retry, False, sums, a, b)
        launch_scores(problem, chunk, everything, self.shift, self.partial, e, retry, largest=True)
        tiles = -(-everything.stop // TILE_CLASSES)
        kernels.raise_shifts[(-(-(stop - start) // 32),)](
            self.partial, self.logit[chunk], self.shift[chunk], retry, stop - start, tiles, ROWS=32, TILES=64
        )
        launch_scores(problem, chunk, everything, self.shift, self.partial, e, retry)
        self._finish(chunk, retry, True, sums, a, b)

    def _finish(
        self, chunk: slice, retry: Tensor, again: bool, sums: Sums | None, a: Tensor | None, b: Tensor | None
    ) -> None:
        rows = chunk.stop - chunk.start
        reach = padded(rows, TILE_ROWS)
        tiles = -(-self.problem.weight.shape[0] // TILE_CLASSES)
        kernels.finish_rows[(reach // 16,)](
            self.partial,
            self.logit[chunk],
            self.shift[chunk],
            self.problem.target[chunk],
            None if a is None else a[chunk],
            None if b is None else b[chunk],
            self.problem.input[chunk],
            self.nll[chunk],
            None if sums is None else sums.factor[chunk],
            None if sums is None else sums.scaled,
            None if sums is None else sums.e,
            retry, rows, reach, tiles, self.problem.input.shape[1], 0 if sums is None else sums.e.stride(0),
            RETRY=again, GRADIENT=sums is not None, SCALE=sums is not None and sums.scaled is not None,
            ROWS=16, TILES=64, FEATURES=128,
        )  # fmt: skip


def launch_scores(
    problem: Problem,
    chunk: slice,
    classes: slice,
    shift: Tensor,
    partial: Tensor,
    e: Tensor | None,
    retry: Tensor | None = None,
    largest: bool = False,
) -> None:
    """E and its sums, or with ``largest`` the largest logits, of a chunk of rows by some classes."""
    h, w = problem.input[chunk], problem.weight[classes]
    rows, features = h.shape
    programs = min(-(-rows // TILE_ROWS) * -(-w.shape[0] // TILE_CLASSES), processors(h.device))
    out = h if e is None else e[: padded(rows, TILE_ROWS), : padded(w.shape[0], PADDING)]
    kernels.scores[(programs,)](
        TensorDescriptor.from_tensor(h, [TILE_ROWS, TILE_FEATURES]),
        TensorDescriptor.from_tensor(w, [TILE_CLASSES, TILE_FEATURES]),
        TensorDescriptor.from_tensor(out, [TILE_ROWS, TILE_CLASSES]),
        None if problem.bias is None else problem.bias[classes],
        problem.target[chunk], shift[chunk], partial, retry, rows, w.shape[0], features, classes.start,
        ROWS=TILE_ROWS, CLASSES=TILE_CLASSES, FEATURES=TILE_FEATURES, GROUP=8, PROGRAMS=programs,
        STORE=e is not None, LARGEST=largest, RETRY=retry is not None,
        HAS_BIAS=problem.bias is not None, IEEE=h.dtype == torch.float32,
        num_warps=8, num_stages=3,
    )  # fmt: skip


def processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
