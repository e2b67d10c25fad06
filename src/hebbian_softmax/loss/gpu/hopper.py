"""E and its sums on H100 and H200 GPUs: products and softmax at the same time.

A tile's softmax takes a quarter as long as its product with 1,024 features, and half as long with 512. So two groups of
four warps share a processor's matrix unit, and while one takes the softmax of its tile, the other one multiplies. A
further warp copies the operands into shared memory ahead of both.

- ``resident`` is for up to 576 features. The activations of 128 rows stay in shared memory, the rows of the matrix pass
  by, and the groups take turns with tiles of 128 × 128.
- ``streamed`` is for more. Both groups work on the same tile of 128 rows by 256 classes, each on 64 rows, so that every
  operand is copied once. Nothing but the number of copies that fit keeps the groups from drifting apart.

``product`` is that of dW where its rows are long: storing them in float32 takes long, so it overlaps with products.

They are written in Gluon, Triton's language for kernels whose layouts, copies and barriers are explicit. It is
experimental, so with versions in which these kernels were not tried, this module cannot be imported.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from hebbian_softmax._triton import is_hopper, processors
from hebbian_softmax.loss.gpu.schedule import padded
from hebbian_softmax.loss.gpu.scores import LOG2E, of_classes
from hebbian_softmax.loss.problem import Problem

TRIED = ("3.6.",)
"""The versions of Triton in which the kernels were tried."""
if not triton.__version__.startswith(TRIED):
    raise ImportError(f"the kernels for H100 and H200 were not tried with Triton {triton.__version__}")

SHARED_MEMORY = 227 * 1024
"""The bytes of shared memory that a program may have."""
_STAGE = 128 * 64 * 2
"""The bytes of one copy of 128 rows by 64 features."""
_LONG_ROWS = 4096
_MOST_RESIDENT = 9
"""The most copies of activations that stay in shared memory: three of the matrix and one for each group are needed."""


@cache
def runs_on(device: torch.device) -> bool:
    """Return whether the kernels run on ``device``: its matrix unit must be that of the Hopper generation."""
    on_gpu = device.type == "cuda" and is_hopper(device, SHARED_MEMORY)
    return on_gpu and torch.cuda.get_device_properties(device).major == 9


def launch_scores(
    problem: Problem, chunk: slice, classes: slice, shift: Tensor, partial: Tensor, e: Tensor | None
) -> int:
    """Compute the sums of E, and with ``e`` also E itself, and return how many sums there are of each row."""
    rows: int = chunk.stop - chunk.start
    width: int = classes.stop - classes.start
    features = problem.input.shape[1]
    w = of_classes(problem.weight, classes)
    bias, prior = of_classes(problem.bias, classes), of_classes(problem.prior, classes)
    blocks = -(-features // 64)
    out = problem.input if e is None else e
    height = None if e is None else padded(rows, 128)
    numbers = chunk.start, rows, width, classes.start, problem.scale
    switches: dict[str, Any] = {
        "STORE": e is not None,
        "HAS_BIAS": bias is not None,
        "HAS_PRIOR": prior is not None,
        "SCALED": problem.scale != 1,
        "num_warps": 4,
    }
    if blocks <= _MOST_RESIDENT:
        stages = min((SHARED_MEMORY - 1024) // _STAGE - 2 - blocks, 6)
        programs, runs = divided(rows, width, processors(problem.input.device))
        resident[(programs,)](
            _descriptor(problem.input, 128, 64), _descriptor(w, 128, 64), _descriptor(out, 128, 64, height),
            bias, prior, problem.column, shift, partial, *numbers, runs, BLOCKS=blocks, STAGES=stages, **switches,
        )  # fmt: skip
        return 2 * runs
    streamed[(processors(problem.input.device),)](
        _descriptor(problem.input, 64, 64), _descriptor(w, 256, 64), _descriptor(out, 64, 128, height),
        bias, prior, problem.column, shift, partial, *numbers, blocks, STAGES=4, GROUP=16, **switches,
    )  # fmt: skip
    return -(-width // 256)


def stores_faster(out: Tensor, first: bool) -> bool:
    """Return whether :func:`launch_product` is faster than cuBLAS: for rows of dW that are long, stored in float32.

    With 4,096 features it takes 2 to 4 % less time; where it would add to what is there, or with fewer, cuBLAS does.
    """
    long = out.shape[1] >= _LONG_ROWS and out.shape[1] % 256 == 0
    return first and long and out.dtype == torch.float32 and out.is_contiguous() and runs_on(out.device)


def launch_product(out: Tensor, e: Tensor, h: Tensor) -> None:
    """Store Eᵀ h in ``out``. E has a multiple of 64 rows, and h as many; ``out`` has at most a row for each column."""
    (classes, features), rows = out.shape, e.shape[0]
    product[(processors(e.device),)](
        _descriptor(e, 64, 64), _descriptor(h, 64, 256), out, classes, features, rows // 64, STAGES=4, num_warps=4
    )  # fmt: skip


def divided(rows: int, classes: int, processors: int) -> tuple[int, int]:
    """Return the number of programs of ``resident``, and the most that share 128 rows.

    There are as many programs for each 128 rows, if that leaves few processors idle. Then programs of different rows
    read the same part of the matrix at about the same time, from the cache.

    >>> divided(1408, 267_735, 132), divided(4096, 267_735, 132), divided(5120, 267_735, 132), divided(200, 300, 132)
    ((132, 12), (128, 4), (132, 5), (6, 3))
    """
    blocks = -(-rows // 128)
    tiles = blocks * -(-classes // 128)
    if tiles <= processors:
        return tiles, tiles // blocks
    even = processors // blocks
    if even * blocks >= 0.94 * processors:
        return even * blocks, even
    return processors, even + 2


def _descriptor(matrix: Tensor, rows: int, columns: int, height: int | None = None) -> Any:
    """Return the descriptor of a matrix, or of its first ``height`` rows, in tiles of rows × columns."""
    shape = [matrix.shape[0] if height is None else height, matrix.shape[1]]
    return TensorDescriptor(matrix, shape, [matrix.stride(0), 1], [rows, columns], _layout(rows, columns))


@cache
def _layout(rows: int, columns: int) -> Any:
    return gl.NVMMASharedLayout.get_default_for([rows, columns], gl.bfloat16)


@gluon.jit
def _either(a, b):
    return a | b


@gluon.jit
def _exponentials(
    z, bias_ptr, prior_ptr, target, shift, column, classes, scale, WIDTH: gl.constexpr, LAYOUT: gl.constexpr,
    HAS_BIAS: gl.constexpr, HAS_PRIOR: gl.constexpr, SCALED: gl.constexpr,
):  # fmt: skip
    """Return E of a tile of products: 0 at the targets and in columns that are no class."""
    at = column + gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT))
    factor = LOG2E
    if SCALED:
        factor = scale * LOG2E
    z = z * factor - shift[:, None]
    if HAS_BIAS:
        offset = gl.load(bias_ptr + at, at < classes, other=0.0).to(gl.float32) * factor
        if HAS_PRIOR:
            offset += gl.load(prior_ptr + at, at < classes, other=0.0) * LOG2E
        z += offset[None, :]
    elif HAS_PRIOR:
        z += (gl.load(prior_ptr + at, at < classes, other=0.0) * LOG2E)[None, :]
    e = gl.exp2(z)
    if column + WIDTH > classes:
        e = gl.where((at < classes)[None, :], e, 0.0)
    is_here = (target >= column) & (target < column + WIDTH)
    if gl.reduce(is_here.to(gl.int32), 0, _either) != 0:  # Nearly all tiles have no target, and skip the comparison.
        e = gl.where(at[None, :] == target[:, None], 0.0, e)
    return e


@gluon.jit
def _store(e, staging, e_desc, row, column, HALF: gl.constexpr):
    """Store a tile of E in two halves, through a part of shared memory that holds one."""
    left, right = e.to(e_desc.dtype).reshape([e.shape[0], 2, HALF]).permute(0, 2, 1).split()
    tma.store_wait(pendings=0)
    staging.store(left)
    fence_async_shared()
    tma.async_copy_shared_to_global(e_desc, [row, column], staging)
    tma.store_wait(pendings=0)
    staging.store(right)
    fence_async_shared()
    tma.async_copy_shared_to_global(e_desc, [row, column + HALF], staging)


@gluon.jit
def _copy_for_resident(
    h_desc, w_desc, h, w, full, empty, h_full, h_empty, start, class_tiles, begin, end,
    BLOCKS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Copy the activations of each row of tiles once, and the matrix's rows for every tile."""
    block = 0
    first_row = begin // class_tiles
    for row in range(first_row, gl.cdiv(end, class_tiles)):
        mbarrier.wait(h_empty, ((row - first_row) & 1) ^ 1)
        mbarrier.expect(h_full, BLOCKS * h_desc.block_type.nbytes)
        for i in gl.static_range(BLOCKS):
            tma.async_copy_global_to_shared(h_desc, [start + row * 128, i * 64], h_full, h.index(i))
        for tile in range(max(begin, row * class_tiles), min(end, (row + 1) * class_tiles)):
            column = (tile - row * class_tiles) * 128
            for k in range(BLOCKS):
                stage = block % STAGES
                bar = full.index(stage)
                mbarrier.wait(empty.index(stage), (block // STAGES & 1) ^ 1)
                mbarrier.expect(bar, w_desc.block_type.nbytes)
                tma.async_copy_global_to_shared(w_desc, [column, k * 64], bar, w.index(stage))
                block += 1


@gluon.jit
def _compute_resident(
    who: gl.constexpr, e_desc, bias_ptr, prior_ptr, target_ptr, shift_ptr, partial_ptr, h, w, staging, full, empty,
    h_full, h_empty, turn, start, rows, classes, first_class, scale, runs, class_tiles, begin, end,
    BLOCKS: gl.constexpr, STAGES: gl.constexpr, STORE: gl.constexpr, HAS_BIAS: gl.constexpr, HAS_PRIOR: gl.constexpr,
    SCALED: gl.constexpr,
):  # fmt: skip
    """Compute every second tile: the product when it is this group's turn, and the softmax during the other's."""
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 16])
    mine = 0
    first_row = begin // class_tiles
    for row in range(first_row, gl.cdiv(end, class_tiles)):
        first = max(begin, row * class_tiles)
        last = min(end, (row + 1) * class_tiles)
        at_row = row * 128 + gl.arange(0, 128, gl.SliceLayout(1, layout))
        is_row = at_row < rows
        target = gl.load(target_ptr + start + at_row, is_row, other=-1).to(gl.int32) - first_class
        shift = gl.load(shift_ptr + start + at_row, is_row, other=float("inf"))
        total = gl.zeros([128], gl.float32, gl.SliceLayout(1, layout))
        mbarrier.wait(h_full, (row - first_row) & 1)
        for tile in range(first + ((first - begin + who) & 1), last, 2):
            column_tile = tile - row * class_tiles
            block = (tile - begin) * BLOCKS
            # Until its turn a group must not look at copies: those of an earlier round look the same.
            mbarrier.wait(turn.index(who), (mine & 1) ^ (1 - who))
            acc = warpgroup_mma_init(gl.zeros([128, 128], gl.float32, layout))
            for k in range(BLOCKS):
                stage = block % STAGES
                mbarrier.wait(full.index(stage), block // STAGES & 1)
                rows_of_w = w.index(stage).permute((1, 0))
                acc = warpgroup_mma(h.index(k), rows_of_w, acc, use_acc=k > 0, is_async=True)
                acc = warpgroup_mma_init(warpgroup_mma_wait(num_outstanding=1, deps=(acc,)))
                if k > 0:
                    mbarrier.arrive(empty.index((block - 1) % STAGES), count=1)
                block += 1
            mbarrier.arrive(turn.index(1 - who), count=1)
            z = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
            mbarrier.arrive(empty.index((block - 1) % STAGES), count=1)
            mine += 1
            e = _exponentials(
                z, bias_ptr, prior_ptr, target, shift, column_tile * 128, classes, scale, 128, layout,
                HAS_BIAS, HAS_PRIOR, SCALED,
            )  # fmt: skip
            total += gl.sum(e, 1)
            if STORE:
                _store(e, staging.index(who), e_desc, row * 128, column_tile * 128, 64)
        mbarrier.arrive(h_empty, count=1)
        # The programs that share these rows follow each other. If they are not as many as might be, zeros follow.
        tiles = gl.cdiv(rows, 128).to(gl.int64) * class_tiles
        run = gl.program_id(0) - ((row * class_tiles + 1).to(gl.int64) * gl.num_programs(0) - 1) // tiles
        gl.store(partial_ptr + (2 * run + who) * rows + at_row, total, is_row)
        if last == (row + 1) * class_tiles:
            for more in range(run.to(gl.int32) + 1, runs):
                nothing = gl.zeros([128], gl.float32, gl.SliceLayout(1, layout))
                gl.store(partial_ptr + (2 * more + who).to(gl.int64) * rows + at_row, nothing, is_row)
    tma.store_wait(pendings=0)


@gluon.jit(do_not_specialize=["start", "rows", "classes", "first_class", "scale", "runs"])
def resident(
    h_desc, w_desc, e_desc, bias_ptr, prior_ptr, target_ptr, shift_ptr, partial_ptr, start, rows, classes, first_class,
    scale, runs, BLOCKS: gl.constexpr, STAGES: gl.constexpr, STORE: gl.constexpr, HAS_BIAS: gl.constexpr,
    HAS_PRIOR: gl.constexpr, SCALED: gl.constexpr,
):  # fmt: skip
    """Compute E of the rows start … start + rows, and sum it without the target.

    Columns beyond ``classes`` and rows beyond ``rows`` are stored as 0. Each program takes a run of at least one tile,
    in the order of the rows, so the tiles of 128 rows belong to at most ``runs`` programs. Each of their groups stores
    a sum of each row.
    """
    h = gl.allocate_shared_memory(h_desc.dtype, [BLOCKS, 128, 64], h_desc.layout)
    w = gl.allocate_shared_memory(h_desc.dtype, [STAGES, 128, 64], w_desc.layout)
    staging = gl.allocate_shared_memory(h_desc.dtype, [2, 128, 64], e_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    turn = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    h_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    h_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    for i in gl.static_range(2):
        mbarrier.init(turn.index(i), count=1)
    mbarrier.init(h_full, count=1)
    mbarrier.init(h_empty, count=2)
    fence_async_shared()
    class_tiles = gl.cdiv(classes, 128)
    tiles = gl.cdiv(rows, 128) * class_tiles
    program = gl.program_id(0).to(gl.int64)
    begin = (program * tiles // gl.num_programs(0)).to(gl.int32)
    end = ((program + 1) * tiles // gl.num_programs(0)).to(gl.int32)
    # fmt: off
    gl.warp_specialize(
        [
            (_compute_resident, (0, e_desc, bias_ptr, prior_ptr, target_ptr, shift_ptr, partial_ptr, h, w, staging,
                full, empty, h_full, h_empty, turn, start, rows, classes, first_class, scale, runs, class_tiles, begin,
                end, BLOCKS, STAGES, STORE, HAS_BIAS, HAS_PRIOR, SCALED)),
            (_compute_resident, (1, e_desc, bias_ptr, prior_ptr, target_ptr, shift_ptr, partial_ptr, h, w, staging,
                full, empty, h_full, h_empty, turn, start, rows, classes, first_class, scale, runs, class_tiles, begin,
                end, BLOCKS, STAGES, STORE, HAS_BIAS, HAS_PRIOR, SCALED)),
            (_copy_for_resident, (h_desc, w_desc, h, w, full, empty, h_full, h_empty, start, class_tiles, begin, end,
                BLOCKS, STAGES)),
        ],
        [4, 1], [232, 40],
    )
    # fmt: on


@gluon.jit
def _place(tile, row_tiles, class_tiles, GROUP: gl.constexpr):
    """Return a tile's row and column; tiles of GROUP rows follow each other, so the matrix is read from the cache."""
    in_group = GROUP * class_tiles
    first = tile // in_group * GROUP
    height = min(row_tiles - first, GROUP)
    return first + tile % in_group % height, tile % in_group // height


@gluon.jit
def _copy_for_streamed(
    h_desc, w_desc, h, w, full, empty, start, row_tiles, class_tiles, blocks,
    STAGES: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """Copy 64 features of a tile's 128 rows and 256 classes at a time."""
    block = 0
    for tile in range(gl.program_id(0), row_tiles * class_tiles, gl.num_programs(0)):
        row, column = _place(tile, row_tiles, class_tiles, GROUP)
        for k in range(blocks):
            stage = block % STAGES
            bar = full.index(stage)
            mbarrier.wait(empty.index(stage), (block // STAGES & 1) ^ 1)
            mbarrier.expect(bar, 2 * h_desc.block_type.nbytes + w_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(h_desc, [start + row * 128, k * 64], bar, h.index(stage * 2))
            tma.async_copy_global_to_shared(h_desc, [start + row * 128 + 64, k * 64], bar, h.index(stage * 2 + 1))
            tma.async_copy_global_to_shared(w_desc, [column * 256, k * 64], bar, w.index(stage))
            block += 1


@gluon.jit
def _compute_streamed(
    who: gl.constexpr, e_desc, bias_ptr, prior_ptr, target_ptr, shift_ptr, partial_ptr, h, w, staging, full, empty,
    start, rows, classes, first_class, scale, row_tiles, class_tiles, blocks, STAGES: gl.constexpr,
    GROUP: gl.constexpr, STORE: gl.constexpr, HAS_BIAS: gl.constexpr, HAS_PRIOR: gl.constexpr, SCALED: gl.constexpr,
):  # fmt: skip
    """Compute this group's 64 rows of every tile."""
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 256, 16])
    block = 0
    for tile in range(gl.program_id(0), row_tiles * class_tiles, gl.num_programs(0)):
        row_tile, column_tile = _place(tile, row_tiles, class_tiles, GROUP)
        row = row_tile * 128 + who * 64
        at_row = row + gl.arange(0, 64, gl.SliceLayout(1, layout))
        is_row = at_row < rows
        target = gl.load(target_ptr + start + at_row, is_row, other=-1).to(gl.int32) - first_class
        shift = gl.load(shift_ptr + start + at_row, is_row, other=float("inf"))
        acc = warpgroup_mma_init(gl.zeros([64, 256], gl.float32, layout))
        for k in range(blocks):
            stage = block % STAGES
            mbarrier.wait(full.index(stage), block // STAGES & 1)
            rows_of_w = w.index(stage).permute((1, 0))
            acc = warpgroup_mma(h.index(stage * 2 + who), rows_of_w, acc, use_acc=k > 0, is_async=True)
            acc = warpgroup_mma_init(warpgroup_mma_wait(num_outstanding=1, deps=(acc,)))
            if k > 0:
                mbarrier.arrive(empty.index((block - 1) % STAGES), count=1)
            block += 1
        z = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
        mbarrier.arrive(empty.index((block - 1) % STAGES), count=1)
        e = _exponentials(
            z, bias_ptr, prior_ptr, target, shift, column_tile * 256, classes, scale, 256, layout,
            HAS_BIAS, HAS_PRIOR, SCALED,
        )  # fmt: skip
        gl.store(partial_ptr + column_tile.to(gl.int64) * rows + at_row, gl.sum(e, 1), is_row)
        if STORE:
            _store(e, staging.index(who), e_desc, row, column_tile * 256, 128)
    tma.store_wait(pendings=0)


@gluon.jit(do_not_specialize=["start", "rows", "classes", "first_class", "scale"])
def streamed(
    h_desc, w_desc, e_desc, bias_ptr, prior_ptr, target_ptr, shift_ptr, partial_ptr, start, rows, classes, first_class,
    scale, blocks, STAGES: gl.constexpr, GROUP: gl.constexpr, STORE: gl.constexpr, HAS_BIAS: gl.constexpr,
    HAS_PRIOR: gl.constexpr, SCALED: gl.constexpr,
):  # fmt: skip
    """Compute the same as ``resident`` for any number of features, with a sum for each 256 classes."""
    h = gl.allocate_shared_memory(h_desc.dtype, [2 * STAGES, 64, 64], h_desc.layout)
    w = gl.allocate_shared_memory(h_desc.dtype, [STAGES, 256, 64], w_desc.layout)
    staging = gl.allocate_shared_memory(h_desc.dtype, [2, 64, 128], e_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    fence_async_shared()
    row_tiles = gl.cdiv(rows, 128)
    class_tiles = gl.cdiv(classes, 256)
    # fmt: off
    gl.warp_specialize(
        [
            (_compute_streamed, (0, e_desc, bias_ptr, prior_ptr, target_ptr, shift_ptr, partial_ptr, h, w, staging,
                full, empty, start, rows, classes, first_class, scale, row_tiles, class_tiles, blocks, STAGES, GROUP,
                STORE, HAS_BIAS, HAS_PRIOR, SCALED)),
            (_compute_streamed, (1, e_desc, bias_ptr, prior_ptr, target_ptr, shift_ptr, partial_ptr, h, w, staging,
                full, empty, start, rows, classes, first_class, scale, row_tiles, class_tiles, blocks, STAGES, GROUP,
                STORE, HAS_BIAS, HAS_PRIOR, SCALED)),
            (_copy_for_streamed, (h_desc, w_desc, h, w, full, empty, start, row_tiles, class_tiles, blocks, STAGES,
                GROUP)),
        ],
        [4, 1], [232, 40],
    )
    # fmt: on


@gluon.jit
def _copy_operands(e_desc, h_desc, e, h, full, empty, tiles, column_tiles, blocks, STAGES: gl.constexpr):
    """Copy 64 rows of a tile's 128 classes and 256 features at a time."""
    block = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        first_class = tile // column_tiles * 128
        for k in range(blocks):
            stage = block % STAGES
            bar = full.index(stage)
            mbarrier.wait(empty.index(stage), (block // STAGES & 1) ^ 1)
            mbarrier.expect(bar, 2 * e_desc.block_type.nbytes + h_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(e_desc, [k * 64, first_class], bar, e.index(stage * 2))
            tma.async_copy_global_to_shared(e_desc, [k * 64, first_class + 64], bar, e.index(stage * 2 + 1))
            tma.async_copy_global_to_shared(h_desc, [k * 64, tile % column_tiles * 256], bar, h.index(stage))
            block += 1


@gluon.jit
def _multiply(
    who: gl.constexpr, out_ptr, e, h, full, empty, tiles, column_tiles, classes, features, blocks, STAGES: gl.constexpr
):
    """Compute this group's 64 classes of every tile."""
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 256, 16])
    block = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        at_class = tile // column_tiles * 128 + who * 64 + gl.arange(0, 64, gl.SliceLayout(1, layout))
        feature = tile % column_tiles * 256 + gl.arange(0, 256, gl.SliceLayout(0, layout))
        acc = warpgroup_mma_init(gl.zeros([64, 256], gl.float32, layout))
        for k in range(blocks):
            stage = block % STAGES
            mbarrier.wait(full.index(stage), block // STAGES & 1)
            columns_of_e = e.index(stage * 2 + who).permute((1, 0))
            acc = warpgroup_mma(columns_of_e, h.index(stage), acc, is_async=True)
            acc = warpgroup_mma_init(warpgroup_mma_wait(num_outstanding=1, deps=(acc,)))
            if k > 0:
                mbarrier.arrive(empty.index((block - 1) % STAGES), count=1)
            block += 1
        found = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
        mbarrier.arrive(empty.index((block - 1) % STAGES), count=1)
        where = at_class.to(gl.int64)[:, None] * features + feature[None, :]
        gl.store(out_ptr + where, found, (at_class < classes)[:, None] & (feature < features)[None, :])


@gluon.jit(do_not_specialize=["classes", "blocks"])
def product(e_desc, h_desc, out_ptr, classes, features, blocks, STAGES: gl.constexpr):
    """Store Eᵀ h in float32: every program takes tiles of 128 classes by 256 features in turn.

    While one group of warps stores its 64 classes of a tile, the other one multiplies.
    """
    e = gl.allocate_shared_memory(e_desc.dtype, [2 * STAGES, 64, 64], e_desc.layout)
    h = gl.allocate_shared_memory(h_desc.dtype, [STAGES, 64, 256], h_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    fence_async_shared()
    column_tiles = gl.cdiv(features, 256)
    tiles = gl.cdiv(classes, 128) * column_tiles
    # fmt: off
    gl.warp_specialize(
        [
            (_multiply, (0, out_ptr, e, h, full, empty, tiles, column_tiles, classes, features, blocks, STAGES)),
            (_multiply, (1, out_ptr, e, h, full, empty, tiles, column_tiles, classes, features, blocks, STAGES)),
            (_copy_operands, (e_desc, h_desc, e, h, full, empty, tiles, column_tiles, blocks, STAGES)),
        ],
        [4, 1], [232, 40],
    )
    # fmt: on
