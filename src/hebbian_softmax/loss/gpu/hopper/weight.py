r"""The product of dW on H100 and H200 GPUs: dW = (dW +) Eᵀ h, while tiles before are still being stored.

With few rows the product of a tile is short, and reading and writing 128 × 256 numbers of dW in float32 takes nearly as
long. So two groups of four warps share a processor's matrix unit: while one loads or stores its 64 rows of a tile, the
other one multiplies. A further warp copies the operands into shared memory ahead of both.
"""

from __future__ import annotations

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

from hebbian_softmax._triton import processors
from hebbian_softmax.loss.gpu.hopper import descriptor
from hebbian_softmax.loss.gpu.schedule import padded

_MOST_ROWS = 3072
"""With more rows the product takes most of the time, and that of cuBLAS is faster."""


def suits(rows: int, features: int) -> bool:
    """Return whether the kernel is faster than cuBLAS: with few rows, and features that nearly fill its tiles."""
    return rows <= _MOST_ROWS and padded(features, 256) <= 1.06 * features


def launch_weight(out: Tensor, total: Tensor | None, e: Tensor, h: Tensor) -> None:
    """Store Eᵀ h, plus ``total`` where there is one, in ``out``, which may be ``total`` or another dtype.

    E has a multiple of 64 rows, and h as many; ``out`` has at most a row for each column of E.
    """
    (classes, features), rows = out.shape, e.shape[0]
    weight[(processors(e.device),)](
        descriptor(e, 64, 64), descriptor(h, 64, 256), out, total, classes, features, rows // 64,
        ADD=total is not None, STAGES=4, num_warps=4,
    )  # fmt: skip


@gluon.jit
def _copy(e_desc, h_desc, e, h, full, empty, tiles, column_tiles, blocks, STAGES: gl.constexpr):
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
def _compute(
    who: gl.constexpr, out_ptr, total_ptr, e, h, full, empty, tiles, column_tiles, classes, features, blocks,
    ADD: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Compute this group's 64 classes of every tile."""
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 256, 16])
    block = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        at_class = tile // column_tiles * 128 + who * 64 + gl.arange(0, 64, gl.SliceLayout(1, layout))
        feature = tile % column_tiles * 256 + gl.arange(0, 256, gl.SliceLayout(0, layout))
        where = at_class.to(gl.int64)[:, None] * features + feature[None, :]
        inside = (at_class < classes)[:, None] & (feature < features)[None, :]
        if ADD:
            acc = warpgroup_mma_init(gl.load(total_ptr + where, inside, other=0.0))
        else:
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
        gl.store(out_ptr + where, found.to(out_ptr.dtype.element_ty), inside)


@gluon.jit(do_not_specialize=["classes", "blocks"])
def weight(
    e_desc, h_desc, out_ptr, total_ptr, classes, features, blocks, ADD: gl.constexpr, STAGES: gl.constexpr
):  # fmt: skip
    """Store Eᵀ h, plus the total with ``ADD``: every program takes tiles of 128 classes by 256 features in turn."""
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
            (_compute, (0, out_ptr, total_ptr, e, h, full, empty, tiles, column_tiles, classes, features, blocks, ADD,
                STAGES)),
            (_compute, (1, out_ptr, total_ptr, e, h, full, empty, tiles, column_tiles, classes, features, blocks, ADD,
                STAGES)),
            (_copy, (e_desc, h_desc, e, h, full, empty, tiles, column_tiles, blocks, STAGES)),
        ],
        [4, 1], [232, 40],
    )
    # fmt: on
