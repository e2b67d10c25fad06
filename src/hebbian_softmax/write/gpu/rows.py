"""The write itself: the mean of each run is mixed into the row of its class."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from hebbian_softmax.objectives import Euclidean, InnerProduct
from hebbian_softmax.write.gpu import tile
from hebbian_softmax.write.gpu.means import mean_of_run
from hebbian_softmax.write.gpu.runs import count_run, find_runs
from hebbian_softmax.write.timing import shortens

if TYPE_CHECKING:
    from hebbian_softmax.layer import HebbianSoftmax
    from hebbian_softmax.write.activations import Activations
    from hebbian_softmax.write.timing import Timing

AS_IT_IS, INTO_BALL, ONTO_SPHERE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
"""OBJECTIVE: w* = h̄, h̄ projected into a ball, or h̄ stretched to a sphere."""
_PROGRAMS = 16_384
"""The most programs of the write; in batches up to this size each has one position. Most find nothing to do."""


def write(head: HebbianSoftmax, contents: Sequence[Activations], weight: Tensor, timing: Timing) -> None:
    """Make one iteration of Algorithm 1 after its gradient step, as ``in_torch.write`` does."""
    with torch.cuda.device_of(weight):
        runs = find_runs(head, contents, weight, timing)
        if runs is None:
            return
        objective, radius = objective_of(head)
        positions = runs.keys.numel()
        write_rows_kernel[(min(positions, _PROGRAMS),)](
            runs, head.counts, head.since_start, weight, positions, head.in_features, float(radius),
            SHORTENS=shortens(head, timing), MEMORIZING=head.memorizing, OBJECTIVE=objective,
            ACROSS=head.write == "across", **tile(head.in_features),
        )  # fmt: skip
        # Autograd refuses to go back through values that have changed, so it must be told.
        torch.autograd.graph.increment_version((weight, head.counts, head.since_start))


def objective_of(head: HebbianSoftmax) -> tuple[int, float]:
    """Return which of the kernel's objectives it is, and its radius."""
    objective = head.objective
    if isinstance(objective, InnerProduct):
        return ONTO_SPHERE.value, objective.radius
    assert isinstance(objective, Euclidean)
    return (AS_IT_IS.value, 0.0) if objective.radius is None else (INTO_BALL.value, objective.radius)


@triton.jit
def write_rows_kernel(
    runs, counts, since_start, weight, positions, features, radius, SHORTENS: tl.constexpr,
    MEMORIZING: tl.constexpr, OBJECTIVE: tl.constexpr, ACROSS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Look at one or a few sorted positions in each program; at the start of a run mix the row where λ > 0, and count.

    What a program looks at is far apart: the classes with the last keys, which are often the rare ones, have one
    position each. How many rows are under way at once decides the time, so a program holds as few values as it can.
    """
    for position in range(tl.program_id(0), positions, tl.num_programs(0)):
        n = tl.load(runs.n + position)
        rate = tl.load(runs.rate + position)
        key = tl.load(runs.keys + position).to(tl.int64)
        if n > 0:
            if MEMORIZING:
                if rate > 0:
                    memory = memory_of_run(runs, position, n, features, radius, SHORTENS, OBJECTIVE, ROWS, BLOCK)
                    column = tl.arange(0, BLOCK)
                    inside = column < features
                    at = weight + key * features + column
                    row = tl.load(at, mask=inside, other=0.0).to(tl.float32)
                    if ACROSS:
                        memory = kept_along(runs, position, memory, row, features, BLOCK)
                    tl.store(at, mixed(row, memory, rate, weight.dtype.element_ty), mask=inside)
            count_run(runs, position, n, counts + key, since_start + key, MEMORIZING)


@triton.jit
def memory_of_run(
    runs, position, n, features, radius, SHORTENS: tl.constexpr, OBJECTIVE: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Return w* of the run at ``position``: the mean of its activations, centred, scaled, through the objective."""
    column = tl.arange(0, BLOCK)
    mean = mean_of_run(runs.h, runs.order, runs.blocks, position, n, features, ROWS, BLOCK)
    scale = tl.load(runs.scale)
    if SHORTENS:
        scale *= tl.load(runs.length + position)
    w = (mean - tl.load(runs.center + column, mask=column < features, other=0.0)) * scale
    if OBJECTIVE == INTO_BALL:
        w = tl.where(tl.sqrt_rn(tl.sum(w * w, 0)) <= radius, w, _onto_sphere(w, radius))
    if OBJECTIVE == ONTO_SPHERE:
        w = _onto_sphere(w, radius)
    return w


@triton.jit
def kept_along(runs, position, memory, row, features, BLOCK: tl.constexpr):
    """Return w* with the row's own component along the mean, or for a first write with that of other rare rows."""
    column = tl.arange(0, BLOCK)
    m = tl.load(runs.center + column, mask=column < features, other=0.0) * tl.load(runs.direction)
    first = (tl.load(runs.before + position) == 0) & (tl.load(runs.along + 1) > 0)
    missing = tl.sum((tl.where(first, 0.0, row) - memory) * m, 0) + tl.where(first, tl.load(runs.along), 0.0)
    return memory + missing * m


@triton.jit
def _onto_sphere(w, radius):
    """Return radius · w / ‖w‖, never outside the sphere, and 0 for w = 0, as ``objectives`` does."""
    largest = tl.max(tl.abs(w), 0)
    w = w / tl.where(largest == 0, 1.0, largest)
    norm = tl.sqrt_rn(tl.sum(w * w, 0))
    w = w * (radius / tl.where(norm == 0, 1.0, norm))
    outside = tl.sqrt_rn(tl.sum(w * w, 0)) > radius
    return tl.where(outside, w * (1 - 4 * 1.1920929e-7), w)


@triton.jit
def mixed(row, memory, rate, DTYPE: tl.constexpr):
    """Return equation 3 in float32, rounded once; the row as it is where that has no finite value."""
    new = (rate * memory + (1 - rate) * row).to(DTYPE)
    finite = tl.min((tl.abs(new.to(tl.float32)) < float("inf")).to(tl.int32), 0)
    return tl.where(finite == 1, new, row.to(DTYPE))
