r"""The engine for GPUs: Triton takes the softmax inside the product that makes the logits; cuBLAS does the rest.

For a chunk of rows, with E, its row sums and the factors f as in :mod:`hebbian_softmax.loss.gpu.scores`,

.. math::
    dZ = \mathrm{diag}(f)\, E, \qquad dh = \mathrm{diag}(f)\,(E\, W), \qquad
    dW \mathrel{+}= E^\top (\mathrm{diag}(f)\, h)

so E, with two bytes a logit, is written once and read twice, and nothing else of that size exists. Nothing waits for
the device, and everything can be captured in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

import torch

from hebbian_softmax._triton import is_hopper, processors
from hebbian_softmax.loss.gpu.rows import Rows
from hebbian_softmax.loss.gpu.schedule import TILE_CLASSES, TILE_ROWS, Schedule, default_workspace, padded
from hebbian_softmax.loss.gpu.scores import LOG2E, launch_scores, room_for_sums
from hebbian_softmax.loss.gpu.sums import Sums
from hebbian_softmax.loss.problem import Gradients, Needs, Problem, RowTerms, Scales

__all__ = ["available", "default_workspace", "gradients", "row_terms", "row_terms_and_gradients"]

SHARED_MEMORY = 210 * 1024
"""The bytes that a program of ``scores``, the largest kernel, needs for the stages of its tiles and for the logits.

Hopper GPUs have 227 KiB, and desktop cards of a later capability 99 KiB.
"""
_F = TypeVar("_F", bound=Callable[..., Any])


def available(problem: Problem) -> bool:
    """Return whether the kernels work on these tensors and their GPU.

    They are made for bfloat16, for GPUs of the Hopper generation or later, and for rows of whole 16-byte units that
    start at such a unit, which TMA reads. They have no label smoothing behind a softcap.
    """
    h, w = problem.input, problem.weight
    return (
        h.device.type == "cuda"
        and h.dtype == w.dtype == torch.bfloat16
        and h.shape[1] > 0
        and h.shape[1] % 8 == 0
        and problem.spread is None
        # Parts of a flat buffer of parameters may start elsewhere. Ranks must not take different engines.
        and (problem.part is not None or h.data_ptr() % 16 == w.data_ptr() % 16 == 0)
        and is_hopper(h.device, SHARED_MEMORY)
    )


def _on_its_device(engine: _F) -> _F:
    """Launch on the device of the tensors, which need not be the current one."""

    @wraps(engine)
    def launched(problem: Problem, *rest: Any, **options: Any) -> Any:
        with torch.cuda.device_of(problem.input):
            return engine(problem, *rest, **options)

    return cast(_F, launched)


@_on_its_device
def row_terms(problem: Problem, workspace: int, *, entropy: bool = False) -> RowTerms:
    """Return the terms of every row, without the entropy; no logit is stored."""
    assert not entropy
    classes, rows = problem.planned_classes, problem.target.shape[0]
    per_row = 4 * -(-classes // TILE_CLASSES)
    chunk = min(padded(max(rows, 1), TILE_ROWS), max(workspace // per_row // TILE_ROWS, 1) * TILE_ROWS)
    found = Rows.of(problem, chunk)
    for start in range(0, rows, chunk):
        found.take_in(start, min(start + chunk, rows))
    return found.terms()


@_on_its_device
def row_terms_and_gradients(
    problem: Problem,
    scales: Scales,
    needs: Needs,
    workspace: int,
    schedule: Schedule | None = None,
) -> tuple[RowTerms, Gradients]:
    """Return the terms and the wanted gradients, in one pass over chunks of rows.

    Where the workspace holds only few rows, two passes cost less. ``schedule`` replaces the chunks that it suggests.
    """
    schedule = schedule or Schedule.of_rows(problem, needs, workspace, processors(problem.input.device))
    if schedule is None:
        terms = row_terms(problem, workspace)
        return terms, gradients(problem, terms, scales, needs, workspace)
    rows, everything = problem.target.shape[0], slice(0, problem.weight.shape[0])
    found = Rows.of(problem, schedule.rows)
    sums = Sums(problem, needs, schedule, input_rows=schedule.rows)
    for start in range(0, rows, schedule.rows):
        chunk = slice(start, min(start + schedule.rows, rows))
        found.take_in(chunk.start, chunk.stop, sums, scales)
        sums.add_weight(chunk, everything)
        sums.add_input(chunk, everything)
        sums.finish_input(chunk, everything)
    return found.terms(), sums.gradients()


@_on_its_device
def gradients(problem: Problem, terms: RowTerms, scales: Scales, needs: Needs, workspace: int) -> Gradients:
    """Return the wanted gradients; the logits are computed again in chunks of classes, so that dW is written once."""
    rows, classes = problem.target.shape[0], problem.weight.shape[0]
    schedule = Schedule.of_classes(problem, needs, workspace, processors(problem.input.device))
    sums = Sums(problem, needs, schedule, input_rows=rows)
    a = sums.factor.copy_(scales.with_square(terms.normaliser))
    # With the normaliser itself as the shift, E is the probability, and the factor is a alone.
    shift = (terms.normaliser * LOG2E.value).masked_fill_(problem.target < 0, torch.inf)
    slope = problem.slope_at_target(terms.target_logit)
    partial = room_for_sums(problem, schedule.rows, schedule.classes)
    for first in range(0, classes, schedule.classes):
        some = slice(first, min(first + schedule.classes, classes))
        for start in range(0, rows, schedule.rows):
            chunk = slice(start, min(start + schedule.rows, rows))
            launch_scores(problem, chunk, some, shift, partial, sums.e)
            sums.set_targets(chunk, some, terms, a, scales.target, slope)
            sums.scale_activations(chunk)
            sums.add_weight(chunk, some)
            sums.add_input(chunk, some)
            if some.stop == classes:
                sums.finish_input(chunk, some)
    return sums.gradients()
