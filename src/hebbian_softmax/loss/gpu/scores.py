r"""E of a chunk of rows by some classes: the matrix product that makes the logits does not store them.

While a tile of logits is still in registers, in float32, it becomes

.. math::
    E_{iv} = e^{z_{iv} - m_i} \quad (v \ne y_i), \qquad s_i = \sum_{v \ne y_i} E_{iv}

with a shift m for each row, and only E is stored, in the dtype of the inputs, and the sum of each tile and row. The
kernel here has every option. On H100 and H200 GPUs those of :mod:`hebbian_softmax.loss.gpu.hopper` are faster.

Kernels keep shifts and logits in units of log 2, because the hardware has exp2. They are not specialised on sizes that
change from batch to batch, so that no batch waits for a compilation.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from hebbian_softmax import _triton
from hebbian_softmax._triton import processors
from hebbian_softmax.loss.gpu.schedule import TILE_CLASSES, TILE_FEATURES, TILE_ROWS, padded
from hebbian_softmax.loss.problem import Problem

LOG2E = tl.constexpr(1.4426950408889634)
_T = TypeVar("_T", Tensor, Tensor | None)


def launch_scores(
    problem: Problem, chunk: slice, classes: slice, shift: Tensor, partial: Tensor, e: Tensor | None
) -> int:
    """Compute the sums of E, and with ``e`` also E itself, for a chunk of rows by some classes.

    Return how many sums there are of each row.
    """
    hopper = _triton.load("loss.gpu.hopper") if problem.softcap is None else None
    if hopper is not None and hopper.runs_on(problem.input.device):
        parts: int = hopper.launch_scores(problem, chunk, classes, shift, partial, e)
        return parts
    rows: int = chunk.stop - chunk.start
    width: int = classes.stop - classes.start
    programs = processors(problem.input.device)  # A constant of the kernel, so it must not depend on the batch.
    out = descriptor(problem.input, TILE_ROWS, TILE_CLASSES)
    if e is not None:
        out = descriptor(e, TILE_ROWS, TILE_CLASSES, padded(rows, TILE_ROWS))
    scores[(min(-(-rows // TILE_ROWS) * -(-width // TILE_CLASSES), programs),)](
        *descriptors(problem, classes, TILE_ROWS, TILE_CLASSES),
        out,
        of_classes(problem.bias, classes), of_classes(problem.prior, classes),
        problem.column, shift, partial, chunk.start, rows, width, problem.input.shape[1], classes.start,
        *shape_of_logits(problem),
        ROWS=TILE_ROWS, CLASSES=TILE_CLASSES, FEATURES=TILE_FEATURES, GROUP=8, PROGRAMS=programs,
        STORE=e is not None, IEEE=problem.input.dtype == torch.float32, **switches(problem),
        num_warps=8, num_stages=3,
    )  # fmt: skip
    return -(-width // TILE_CLASSES)


def room_for_sums(problem: Problem, rows: int, classes: int) -> Tensor:
    """Return room for the sums that ``launch_scores`` stores of at most so many rows and classes.

    There is one for each row and tile of classes, or two for each row and program that has classes of that row.
    """
    device = problem.input.device
    numbers = max(rows * -(-classes // TILE_CLASSES), 2 * TILE_ROWS * (processors(device) + 2 * -(-rows // TILE_ROWS)))
    return torch.empty(numbers, dtype=torch.float32, device=device)


def shape_of_logits(problem: Problem) -> tuple[float, float]:
    """Return the scale of the logits, and the c of their softcap."""
    return problem.scale, problem.softcap or 0.0


def switches(problem: Problem) -> dict[str, bool]:
    """Return the constants by which a kernel leaves out what is done to logits."""
    return {
        "HAS_BIAS": problem.bias is not None,
        "HAS_PRIOR": problem.prior is not None,
        "SCALED": problem.scale != 1,
        "CAPPED": problem.softcap is not None,
    }


def of_classes(tensor: _T, classes: slice) -> _T:
    """Return the rows of some classes, without making a view where these are all of them."""
    return tensor if tensor is None or classes.stop - classes.start == len(tensor) else tensor[classes]


def descriptors(problem: Problem, classes: slice, tile_rows: int, tile_classes: int) -> list[Any]:
    """Return the descriptors of the activations and of some rows of the matrix."""
    w = of_classes(problem.weight, classes)
    return [descriptor(problem.input, tile_rows, TILE_FEATURES), descriptor(w, tile_classes, TILE_FEATURES)]


def descriptor(matrix: Tensor, rows: int, columns: int, height: int | None = None) -> Any:
    """Return the descriptor of a matrix, or of its first ``height`` rows, in tiles of rows × columns."""
    shape = [matrix.shape[0] if height is None else height, matrix.shape[1]]
    return TensorDescriptor(matrix, shape, [matrix.stride(0), 1], [rows, columns])


@triton.jit
def capped(u, cap):
    """Return c · tanh(u / c) and its derivative, both exact where tanh is near 0 and where it is near 1."""
    t = tl.abs(u) / cap
    below = 2.0 / (tl.exp(2.0 * t) + 1.0)  # 1 - |tanh|
    square = t * t
    series = t * (1.0 - square * (1.0 / 3.0 - square * (2.0 / 15.0 - square * (17.0 / 315.0))))
    tanh = tl.where(t < 0.25, series, 1.0 - below)
    return tl.where(u < 0, -cap, cap) * tanh, below * (2.0 - below)


@triton.jit
def product(h_desc, w_desc, row, column, features, ROWS: tl.constexpr, CLASSES: tl.constexpr, FEATURES: tl.constexpr,
             IEEE: tl.constexpr):  # fmt: skip
    """Return a tile of h Wᵀ, in float32."""
    z = tl.zeros((ROWS, CLASSES), tl.float32)
    for k in range(0, tl.cdiv(features, FEATURES)):
        h = h_desc.load([row, k * FEATURES])
        w = w_desc.load([column, k * FEATURES])
        if IEEE:
            z = tl.dot(h, w.T, z, input_precision="ieee")
        else:
            z = tl.dot(h, w.T, z)
    return z


@triton.jit
def finished(z, bias_ptr, prior_ptr, at, classes, scale, cap, HAS_BIAS: tl.constexpr, HAS_PRIOR: tl.constexpr,
              SCALED: tl.constexpr, CAPPED: tl.constexpr):  # fmt: skip
    """Return the logits of a tile of products in units of log 2, -inf for columns that are no class, and slopes.

    The slopes are the derivatives of a softcap. Without one, they are no tile but 1.
    """
    is_class = at < classes
    slope = 1.0
    if CAPPED:
        if HAS_BIAS:
            z += tl.load(bias_ptr + at, is_class, other=0.0).to(tl.float32)[None, :]
        z, slope = capped(z, cap)
        offset = tl.where(is_class, 0.0, float("-inf"))
    elif HAS_BIAS:
        offset = tl.load(bias_ptr + at, is_class, other=float("-inf")).to(tl.float32) * LOG2E
        if SCALED:
            offset *= scale
    else:
        offset = tl.where(is_class, 0.0, float("-inf"))
    if HAS_PRIOR:
        offset += tl.load(prior_ptr + at, is_class, other=0.0) * LOG2E
    if SCALED:
        z = z * (scale * LOG2E) + offset[None, :]
    else:
        z = z * LOG2E + offset[None, :]
    return z, slope


@triton.jit(do_not_specialize=["start", "rows", "classes", "first_class"])
def scores(
    h_desc, w_desc, e_desc, bias_ptr, prior_ptr, column_ptr, shift_ptr, partial_ptr, start, rows, classes, features,
    first_class, scale, cap, ROWS: tl.constexpr, CLASSES: tl.constexpr, FEATURES: tl.constexpr, GROUP: tl.constexpr,
    PROGRAMS: tl.constexpr, STORE: tl.constexpr, IEEE: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_PRIOR: tl.constexpr,
    SCALED: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """Compute E of the rows start … start + rows, and sum it for each tile of classes and each row without the target.

    Columns beyond ``classes`` and rows beyond ``rows`` are stored as 0.
    """
    row_tiles = tl.cdiv(rows, ROWS)
    class_tiles = tl.cdiv(classes, CLASSES)
    in_group = GROUP * class_tiles
    for tile in tl.range(tl.program_id(0), row_tiles * class_tiles, PROGRAMS, flatten=True):
        # The tiles of GROUP rows of tiles follow each other, so that rows of the matrix are read from the cache.
        first = tile // in_group * GROUP
        height = min(row_tiles - first, GROUP)
        row = (first + tile % in_group % height) * ROWS
        column_tile = tile % in_group // height
        column = column_tile * CLASSES
        z = product(h_desc, w_desc, start + row, column, features, ROWS, CLASSES, FEATURES, IEEE)
        at_row = row + tl.arange(0, ROWS)
        at_column = column + tl.arange(0, CLASSES)
        is_row = at_row < rows
        target = tl.load(column_ptr + start + at_row, is_row, other=-1).to(tl.int32) - first_class
        shift = tl.load(shift_ptr + start + at_row, is_row, other=float("inf"))
        z, slope = finished(z, bias_ptr, prior_ptr, at_column, classes, scale, cap, HAS_BIAS, HAS_PRIOR, SCALED, CAPPED)
        e = tl.exp2(z - shift[:, None])
        is_here = (target >= column) & (target < column + CLASSES)
        if tl.max(is_here.to(tl.int32), 0) > 0:  # Tiles without a target, nearly all of them, skip the comparison.
            e = tl.where(at_column[None, :] == target[:, None], 0.0, e)
        tl.store(partial_ptr + column_tile.to(tl.int64) * rows + at_row, tl.sum(e, 1), is_row)
        if STORE:
            if CAPPED:
                e *= slope
            e_desc.store([row, column], e.to(e_desc.dtype))
