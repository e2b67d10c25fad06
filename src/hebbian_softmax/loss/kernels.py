r"""The Triton kernels of the fused loss.

The matrix product that makes the logits does not store them: while a tile is still in registers, in float32, it becomes

.. math::
    E_{iv} = e^{z_{iv} - m_i} \quad (v \ne y_i), \qquad s_i = \sum_{v \ne y_i} E_{iv}

and only E is stored, in the dtype of the inputs. A row's shift m is the logit of its target, which one dot product
gives beforehand, so no maximum is needed, and 1 - p_y = s / (s + 1) without cancellation. Floating point does not care
about a factor that is the same for a whole row, so long as nothing overflows: rows whose target is less likely than
e⁻⁶⁰ are found afterwards, and their chunk is made again with the largest logit as the shift (``RETRY``).

Shifts and logits are kept in units of log 2, because exp2 is what the hardware has. Sizes that change from batch to
batch are not specialised on, so that no batch waits for a compilation.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
LIMIT = tl.constexpr(2.0**87)
"""Of the sum of a row's E. Beyond it the row is made again."""


@triton.jit
def target_logits(
    h_ptr, w_ptr, bias_ptr, target_ptr, shift_ptr, logit_ptr, features,
    HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """z[y] of one row, in both units; a shift of +inf makes the E of an ignored row 0."""
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(target_ptr + row)
    counted = target >= 0
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, features, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = (at < features) & counted
        h = tl.load(h_ptr + row * features + at, inside, other=0.0).to(tl.float32)
        w = tl.load(w_ptr + target * features + at, inside, other=0.0).to(tl.float32)
        total += h * w
    logit = tl.sum(total, 0)
    if HAS_BIAS:
        logit += tl.load(bias_ptr + target, counted, other=0.0).to(tl.float32)
    tl.store(logit_ptr + row, logit)
    # A target that cannot be (-inf) has no shift of its own; a finite one leads to RETRY.
    tl.store(shift_ptr + row, tl.where(counted, tl.maximum(logit * LOG2E, -1e30), float("inf")))


@triton.jit(do_not_specialize=["rows", "classes", "first_class"])
def scores(
    h_desc, w_desc, e_desc, bias_ptr, target_ptr, shift_ptr, partial_ptr, retry_ptr,
    rows, classes, features, first_class,
    ROWS: tl.constexpr, CLASSES: tl.constexpr, FEATURES: tl.constexpr, GROUP: tl.constexpr, PROGRAMS: tl.constexpr,
    STORE: tl.constexpr, LARGEST: tl.constexpr, RETRY: tl.constexpr, HAS_BIAS: tl.constexpr, IEEE: tl.constexpr,
):  # fmt: skip
    """E of rows × classes, and of each tile and row the sum (``LARGEST``: the largest logit) without the target.

    Columns beyond ``classes`` and rows beyond ``rows`` are stored as 0. ``RETRY``: only if ``retry_ptr`` is not 0.
    """
    row_tiles = tl.cdiv(rows, ROWS)
    class_tiles = tl.cdiv(classes, CLASSES)
    tiles = row_tiles * class_tiles
    if RETRY:
        tiles = tl.where(tl.load(retry_ptr) > 0, tiles, 0)
    in_group = GROUP * class_tiles
    for tile in tl.range(tl.program_id(0), tiles, PROGRAMS, flatten=not RETRY):
        # Tiles of GROUP × anything follow each other, so that rows of the matrix are read from the cache.
        first = tile // in_group * GROUP
        height = min(row_tiles - first, GROUP)
        row = (first + tile % in_group % height) * ROWS
        column_tile = tile % in_group // height
        column = column_tile * CLASSES
        z = tl.zeros((ROWS, CLASSES), tl.float32)
        for k in range(0, tl.cdiv(features, FEATURES)):
            h = h_desc.load([row, k * FEATURES])
            w = w_desc.load([column, k * FEATURES])
            if IEEE:
                z = tl.dot(h, w.T, z, input_precision="ieee")
            else:
                z = tl.dot(h, w.T, z)
        at_row = row + tl.arange(0, ROWS)
        at_column = column + tl.arange(0, CLASSES)
        is_row = at_row < rows
        is_class = at_column < classes
        if HAS_BIAS:
            bias = tl.load(bias_ptr + at_column, is_class, other=float("-inf")).to(tl.float32) * LOG2E
        else:
            bias = tl.where(is_class, 0.0, float("-inf"))
        target = tl.load(target_ptr + at_row, is_row, other=-1).to(tl.int32) - first_class
        z = z * LOG2E + bias[None, :]
        is_here = (target >= column) & (target < column + CLASSES)
        if LARGEST:
            z = tl.where(at_column[None, :] == target[:, None], float("-inf"), z)
            result = tl.max(z, 1)
        else:
            shift = tl.load(shift_ptr + at_row, is_row, other=float("inf"))
            e = tl.exp2(z - shift[:, None])
            if tl.max(is_here.to(tl.int32), 0) > 0:  # few tiles hold a target: the others skip a comparison a class
                e = tl.where(at_column[None, :] == target[:, None], 0.0, e)
            result = tl.sum(e, 1)
            if STORE:
                e_desc.store([row, column], e.to(e_desc.dtype))
        tl.store(partial_ptr + column_tile.to(tl.int64) * rows + at_row, result, is_row)


@triton.jit(do_not_specialize=["rows", "tiles"])
def raise_shifts(partial_ptr, logit_ptr, shift_ptr, retry_ptr, rows, tiles, ROWS: tl.constexpr, TILES: tl.constexpr):
    """If any row is to be made again: the largest logit becomes the shift of every row."""
    if tl.load(retry_ptr) == 0:
        return
    at = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = at < rows
    largest = tl.full((ROWS,), float("-inf"), tl.float32)
    for start in range(0, tiles, TILES):
        tile = start + tl.arange(0, TILES)
        where = tile[:, None].to(tl.int64) * rows + at[None, :]
        part = tl.load(partial_ptr + where, (tile < tiles)[:, None] & inside[None, :], other=float("-inf"))
        largest = tl.maximum(largest, tl.max(part, 0))
    shift = tl.load(shift_ptr + at, inside, other=0.0)
    own = tl.load(logit_ptr + at, inside, other=0.0) * LOG2E
    largest = tl.maximum(tl.maximum(largest, own), -1e30)
    tl.store(shift_ptr + at, tl.where(shift == float("inf"), shift, largest), inside)


@triton.jit(do_not_specialize=["rows", "padded_rows", "tiles"])
def finish_rows(
    partial_ptr, logit_ptr, shift_ptr, target_ptr, a_ptr, b_ptr, h_ptr,
    nll_ptr, factor_ptr, scaled_ptr, e_ptr, retry_ptr, rows, padded_rows, tiles, features, e_stride,
    RETRY: tl.constexpr, GRADIENT: tl.constexpr, SCALE: tl.constexpr,
    ROWS: tl.constexpr, TILES: tl.constexpr, FEATURES: tl.constexpr,
):  # fmt: skip
    """From the sums of a row's tiles: nll, the factor a / Σ E, its product with h, and E at the target.

    dZ = factor · E: rows of dh are multiplied with the factor afterwards, and for dW the factor goes into h.
    """
    if RETRY:
        if tl.load(retry_ptr) == 0:
            return
    at = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = at < rows
    others = tl.zeros((ROWS,), tl.float32)
    for start in range(0, tiles, TILES):
        tile = start + tl.arange(0, TILES)
        where = tile[:, None].to(tl.int64) * rows + at[None, :]
        others += tl.sum(tl.load(partial_ptr + where, (tile < tiles)[:, None] & inside[None, :], other=0.0), 0)
    target = tl.load(target_ptr + at, inside, other=-1)
    counted = target >= 0
    logit = tl.load(logit_ptr + at, inside, other=0.0) * LOG2E
    shift = tl.load(shift_ptr + at, inside, other=0.0)
    shift = tl.where(counted, shift, 0.0)
    if not RETRY:
        again = tl.sum((counted & (others > LIMIT)).to(tl.int32), 0)
        if again > 0:
            tl.atomic_add(retry_ptr, again)
    own = tl.exp2(logit - shift)
    total = others + own
    # log(1 + x) to full precision for small x; u - 1 has exactly the error of u.
    x = others / own
    u = 1.0 + x
    near = tl.where(u == 1.0, x, tl.log(u) * (x / (u - 1.0)))
    far = tl.log(total) + (shift - logit) * LN2
    nll = tl.where(own > 0.5, near, far)
    tl.store(nll_ptr + at, tl.where(counted, nll, 0.0), inside)
    if GRADIENT:
        a = tl.load(a_ptr + at, inside, other=0.0)
        b = tl.load(b_ptr + at, inside, other=0.0)
        factor = tl.where(counted & (a != 0), a / total, 0.0)
        tl.store(factor_ptr + at, factor, inside)
        at_target = tl.where(a != 0, (1.0 - b / a) * total, 0.0) - others
        tl.store(e_ptr + at.to(tl.int64) * e_stride + target, at_target.to(e_ptr.dtype.element_ty), inside & counted)
        if SCALE:
            for start in range(0, features, FEATURES):
                feature = start + tl.arange(0, FEATURES)
                where = at[:, None].to(tl.int64) * features + feature[None, :]
                valid = (feature < features)[None, :]
                h = tl.load(h_ptr + where, inside[:, None] & valid, other=0.0).to(tl.float32)
                product = (h * factor[:, None]).to(scaled_ptr.dtype.element_ty)
                tl.store(scaled_ptr + where, product, (at < padded_rows)[:, None] & valid)


@triton.jit(do_not_specialize=["rows", "first_class", "classes"])
def set_targets(
    e_ptr, nll_ptr, target_ptr, a_ptr, b_ptr, rows, first_class, classes, e_stride, ROWS: tl.constexpr
):  # fmt: skip
    """E = p at the target, less b / a, where the target is among these classes and p is of known nll."""
    at = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = at < rows
    target = tl.load(target_ptr + at, inside, other=-1)
    column = target - first_class
    here = inside & (target >= 0) & (column >= 0) & (column < classes)
    nll = tl.load(nll_ptr + at, here, other=0.0)
    a = tl.load(a_ptr + at, here, other=0.0)
    b = tl.load(b_ptr + at, here, other=0.0)
    # 1 - exp(-nll) by its series where it would cancel.
    series = nll * (1.0 - nll * (0.5 - nll * (1.0 / 6.0 - nll * (1.0 / 24.0))))
    rest = tl.where(nll < 0.03, series, 1.0 - tl.exp(-nll))
    value = tl.where(a != 0, 1.0 - b / a, 0.0) - rest
    tl.store(e_ptr + at.to(tl.int64) * e_stride + column, value.to(e_ptr.dtype.element_ty), here)


@triton.jit(do_not_specialize=["rows", "done", "classes"])
def finish_input(
    parts_ptr, e_ptr, w_ptr, factor_ptr, out_ptr, rows, part_stride, features, done, classes, e_stride,
    PARTS: tl.constexpr, TAIL: tl.constexpr, ROWS: tl.constexpr, FEATURES: tl.constexpr, IEEE: tl.constexpr,
):  # fmt: skip
    """dh = factor · (the sum of the parts + the product over the classes not done, fewer than ``TAIL``)."""
    at = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    feature = tl.program_id(1) * FEATURES + tl.arange(0, FEATURES)
    valid = (at < rows)[:, None] & (feature < features)[None, :]
    where = at[:, None].to(tl.int64) * features + feature[None, :]
    total = tl.zeros((ROWS, FEATURES), tl.float32)
    for i in tl.static_range(PARTS):
        total += tl.load(parts_ptr + i * part_stride + where, valid, other=0.0)
    if TAIL > 0:
        k = done + tl.arange(0, TAIL)
        is_class = k < classes
        e_at = at[:, None].to(tl.int64) * e_stride + k[None, :]
        e = tl.load(e_ptr + e_at, (at < rows)[:, None] & is_class[None, :], other=0.0)
        w_at = k[:, None].to(tl.int64) * features + feature[None, :]
        w = tl.load(w_ptr + w_at, is_class[:, None] & (feature < features)[None, :], other=0.0)
        if IEEE:
            total = tl.dot(e, w, total, input_precision="ieee")
        else:
            total = tl.dot(e, w, total)
    factor = tl.load(factor_ptr + at, at < rows, other=0.0)
    tl.store(out_ptr + where, (total * factor[:, None]).to(out_ptr.dtype.element_ty), valid)


@triton.jit(do_not_specialize=["rows", "classes"])
def column_sums(
    e_ptr, factor_ptr, out_ptr, rows, classes, e_stride, ROWS: tl.constexpr, CLASSES: tl.constexpr
):  # fmt: skip
    """The gradient of the bias: out += Σ_i factor_i · E_iv."""
    column = tl.program_id(0) * CLASSES + tl.arange(0, CLASSES)
    is_class = column < classes
    total = tl.zeros((CLASSES,), tl.float32)
    for start in range(0, rows, ROWS):
        at = start + tl.arange(0, ROWS)
        where = at[:, None].to(tl.int64) * e_stride + column[None, :]
        e = tl.load(e_ptr + where, (at < rows)[:, None] & is_class[None, :], other=0.0).to(tl.float32)
        factor = tl.load(factor_ptr + at, at < rows, other=0.0)
        total += tl.sum(e * factor[:, None], 0)
    tl.store(out_ptr + column, tl.load(out_ptr + column, is_class, other=0.0) + total, is_class)


@triton.jit(do_not_specialize=["n"])
def multiply(x_ptr, factor_ptr, n, BLOCK: tl.constexpr):
    """x *= factor, and nothing at all where factor is 1."""
    factor = tl.load(factor_ptr).to(tl.float32)
    if factor == 1.0:
        return
    programs = tl.num_programs(0)
    for start in range(tl.program_id(0).to(tl.int64) * BLOCK, n, programs * BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + at, at < n)
        tl.store(x_ptr + at, (x.to(tl.float32) * factor).to(x_ptr.dtype.element_ty), at < n)
