r"""The engine for CUDA: the softmax within the product that makes the logits, in Triton; the other products by cuBLAS.

For a chunk of rows, with E, its row sums and the factors f as in :mod:`hebbian_softmax.loss.kernels`,

.. math::
    dZ = \mathrm{diag}(f)\, E, \qquad dh = \mathrm{diag}(f)\,(E\, W), \qquad
    dW \mathrel{+}= E^\top (\mathrm{diag}(f)\, h)

so E, two bytes a logit, is written once and read twice, and nothing else of that size exists. Nothing waits for the
device, and everything can be captured in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from hebbian_softmax.loss import kernels
from hebbian_softmax.loss.fused_rows import Rows, launch_scores, processors
from hebbian_softmax.loss.fused_sums import Sums
from hebbian_softmax.loss.problem import Gradients, Needs, Problem, RowTerms
from hebbian_softmax.loss.schedule import TILE_CLASSES, TILE_ROWS, Schedule, default_workspace, padded

__all__ = ["available", "default_workspace", "gradients", "row_terms", "row_terms_and_gradients"]

_SHARED_MEMORY = 160 * 1024
"""Bytes of a block; cards at home of the same capability have 99 KiB."""
_F = TypeVar("_F", bound=Callable[..., Any])


def available(problem: Problem) -> bool:
    """bfloat16 on a GPU of the Hopper generation or later, rows of whole 16-byte units that start at such a unit."""
    h, w = problem.input, problem.weight
    return (
        h.device.type == "cuda"
        and h.dtype == w.dtype == torch.bfloat16
        and h.shape[1] % 8 == 0
        and h.data_ptr() % 16 == w.data_ptr() % 16 == 0  # not so in a part of a flat buffer of parameters
        and _fits(h.device)
    )


@cache
def _fits(device: torch.device) -> bool:
    """Whether the GPU has what the kernels are made for: TMA, and room for three stages of a tile."""
    properties = torch.cuda.get_device_properties(device)
    shared = getattr(properties, "shared_memory_per_block_optin", _SHARED_MEMORY)
    return bool(properties.major >= 9 and shared >= _SHARED_MEMORY)


def _on_its_device(engine: _F) -> _F:
    """Triton launches on the current device, which need not be that of the tensors."""

    @wraps(engine)
    def launched(problem: Problem, *rest: Any) -> Any:
        with torch.cuda.device_of(problem.input):
            return engine(problem, *rest)

    return cast(_F, launched)


@_on_its_device
def row_terms(problem: Problem, workspace: int) -> RowTerms:
    """The terms of every row. No logit is stored."""
    classes, rows = problem.weight.shape[0], problem.target.shape[0]
    per_row = 4 * -(-classes // TILE_CLASSES)
    chunk = min(padded(max(rows, 1), TILE_ROWS), max(workspace // per_row // TILE_ROWS, 1) * TILE_ROWS)
    found = Rows.of(problem, chunk)
    for start in range(0, rows, chunk):
        found.take_in(start, min(start + chunk, rows))
    return found.terms()


@_on_its_device
def row_terms_and_gradients(
    problem: Problem, normaliser_scale: Tensor, target_scale: Tensor, needs: Needs, workspace: int
) -> tuple[RowTerms, Gradients]:
    """Both in one pass over chunks of rows; in two, where the workspace holds so few rows that this costs less."""
    schedule = Schedule.of_rows(problem, needs, workspace, processors(problem.input.device))
    if schedule is None:
        terms = row_terms(problem, workspace)
        return terms, gradients(problem, terms, normaliser_scale, target_scale, needs, workspace)
    rows, everything = problem.target.shape[0], slice(0, problem.weight.shape[0])
    found = Rows.of(problem, schedule.rows)
    sums = Sums(problem, needs, schedule, input_rows=schedule.rows)
    for start in range(0, rows, schedule.rows):
        chunk = slice(start, min(start + schedule.rows, rows))
        found.take_in(chunk.start, chunk.stop, sums, normaliser_scale, target_scale)
        sums.add_weight(chunk, everything)
        sums.add_input(chunk, everything)
        sums.finish_input(chunk, everything)
    return found.terms(), sums.gradients()


@_on_its_device
def gradients(
    problem: Problem,
    terms: RowTerms,
    normaliser_scale: Tensor,
    target_scale: Tensor,
    needs: Needs,
    workspace: int,
) -> Gradients:
    """From known terms; the logits are made again, for chunks of classes, so that rows of dW are written once."""
    rows, classes = problem.target.shape[0], problem.weight.shape[0]
    schedule = Schedule.of_classes(problem, needs, workspace, processors(problem.input.device))
    sums = Sums(problem, needs, schedule, input_rows=rows)
    sums.factor.copy_(normaliser_scale)
    # With the normaliser itself as the shift, E is the probability, and the factor a alone.
    shift = (terms.normaliser * kernels.LOG2E.value).masked_fill_(problem.target < 0, torch.inf)
    partial = shift.new_empty(-(-schedule.classes // TILE_CLASSES) * schedule.rows)
    for first in range(0, classes, schedule.classes):
        some = slice(first, min(first + schedule.classes, classes))
        for start in range(0, rows, schedule.rows):
            chunk = slice(start, min(start + schedule.rows, rows))
            launch_scores(problem, chunk, some, shift, partial, sums.e)
            kernels.set_targets[(-(-(chunk.stop - start) // 128),)](
                sums.e, terms.nll, problem.target, normaliser_scale, target_scale,
                start, chunk.stop - start, first, some.stop - first, sums.e.stride(0), ROWS=128,
            )  # fmt: skip
            sums.scale_activations(chunk)
            sums.add_weight(chunk, some)
            sums.add_input(chunk, some)
            if some.stop == classes:
                sums.finish_input(chunk, some)
    return sums.gradients()
