r"""The Triton kernels of the fused loss.

The matrix product that makes the logits does not store them: while a tile is still in registers, in float32, it becomes

.. math::
    E_{iv} = e^{z_{iv} - m_i} \quad (v \ne y_i), \qquad s_i = \sum_{v \ne y_i} E_{iv}

and only E is stored, in the dtype of the inputs. A row's shift m is the logit of its target, which one dot product
gives beforehand, so no maximum is needed, and 1 - p_y = s / (s + 1) without cancellation. Floating point does not care
about a factor that is the same for a whole row, so long as nothing overflows: rows whose target is less likely than
e⁻⁶⁰ are found afterwards, and made again with the largest logit as the shift.

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


@triton.jit(do_not_specialize=["n", "classes", "ignore_index"])
def prepare(
    target_ptr, masked_ptr, scale_ptr, good_ptr, n, classes, ignore_index,
    MEAN: tl.constexpr, ZERO_IF_EMPTY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: targets with -1 for the ignored ones; the share of the others in the result, and after it of a row;
    whether all of them are classes."""
    many = tl.zeros((BLOCK,), tl.int32)
    bad = tl.zeros((BLOCK,), tl.int32)
    for start in tl.range(0, n, BLOCK, num_stages=3):
        at = start + tl.arange(0, BLOCK)
        target = tl.load(target_ptr + at, at < n, other=ignore_index)
        counted = target != ignore_index
        many += counted.to(tl.int32)
        bad += (counted & ((target < 0) | (target >= classes))).to(tl.int32)
    total = tl.sum(many, 0).to(tl.float32)
    tl.store(good_ptr, (tl.sum(bad, 0) == 0).to(tl.int32))
    share = total * 0 + 1.0
    if MEAN:
        share = tl.div_rn(share, tl.maximum(total, 1.0) if ZERO_IF_EMPTY else total)
    for start in tl.range(0, n, BLOCK, num_stages=3):
        at = start + tl.arange(0, BLOCK)
        target = tl.load(target_ptr + at, at < n, other=ignore_index)
        good = (target != ignore_index) & (target >= 0) & (target < classes)  # no other is ever used as an address
        tl.store(masked_ptr + at, tl.where(good, target, -1), at < n)
        tl.store(scale_ptr + at, tl.where(good, share, 0.0), at < n)
    tl.store(scale_ptr + n, share)


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
    # A target that cannot be (-inf) has no shift of its own; with any other its row is made again.
    tl.store(shift_ptr + row, tl.where(counted, tl.maximum(logit * LOG2E, -1e30), float("inf")))


@triton.jit
def _product(h_desc, w_desc, row, column, features, ROWS: tl.constexpr, CLASSES: tl.constexpr, FEATURES: tl.constexpr,
             IEEE: tl.constexpr):  # fmt: skip
    """A tile of h Wᵀ, in float32."""
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
def _bias(bias_ptr, at, classes, HAS_BIAS: tl.constexpr):
    """The bias in units of log 2; -inf for columns that are no class."""
    is_class = at < classes
    if HAS_BIAS:
        bias = tl.load(bias_ptr + at, is_class, other=float("-inf")).to(tl.float32) * LOG2E
    else:
        bias = tl.where(is_class, 0.0, float("-inf"))
    return bias


@triton.jit(do_not_specialize=["start", "rows", "classes", "first_class"])
def scores(
    h_desc, w_desc, e_desc, bias_ptr, target_ptr, shift_ptr, partial_ptr, start, rows, classes, features, first_class,
    ROWS: tl.constexpr, CLASSES: tl.constexpr, FEATURES: tl.constexpr, GROUP: tl.constexpr, PROGRAMS: tl.constexpr,
    STORE: tl.constexpr, HAS_BIAS: tl.constexpr, IEEE: tl.constexpr,
):  # fmt: skip
    """E of rows start … start + rows by classes, and of each tile of classes and each row the sum without the target.

    Columns beyond ``classes`` and rows beyond ``rows`` are stored as 0.
    """
    row_tiles = tl.cdiv(rows, ROWS)
    class_tiles = tl.cdiv(classes, CLASSES)
    in_group = GROUP * class_tiles
    for tile in tl.range(tl.program_id(0), row_tiles * class_tiles, PROGRAMS, flatten=True):
        # Tiles of GROUP × anything follow each other, so that rows of the matrix are read from the cache.
        first = tile // in_group * GROUP
        height = min(row_tiles - first, GROUP)
        row = (first + tile % in_group % height) * ROWS
        column_tile = tile % in_group // height
        column = column_tile * CLASSES
        z = _product(h_desc, w_desc, start + row, column, features, ROWS, CLASSES, FEATURES, IEEE)
        at_row = row + tl.arange(0, ROWS)
        at_column = column + tl.arange(0, CLASSES)
        is_row = at_row < rows
        target = tl.load(target_ptr + start + at_row, is_row, other=-1).to(tl.int32) - first_class
        shift = tl.load(shift_ptr + start + at_row, is_row, other=float("inf"))
        e = tl.exp2((z * LOG2E + _bias(bias_ptr, at_column, classes, HAS_BIAS)[None, :]) - shift[:, None])
        is_here = (target >= column) & (target < column + CLASSES)
        if tl.max(is_here.to(tl.int32), 0) > 0:  # few tiles hold a target: the others skip a comparison a class
            e = tl.where(at_column[None, :] == target[:, None], 0.0, e)
        tl.store(partial_ptr + column_tile.to(tl.int64) * rows + at_row, tl.sum(e, 1), is_row)
        if STORE:
            e_desc.store([row, column], e.to(e_desc.dtype))


@triton.jit(do_not_specialize=["start", "rows", "classes"])
def settle(
    h_desc, w_desc, bias_ptr, target_ptr, shift_ptr, partial_ptr, logit_ptr, a_ptr, b_ptr, h_ptr,
    nll_ptr, normaliser_ptr, factor_ptr, scaled_ptr, e_ptr, start, rows, classes, features, e_stride,
    GRADIENT: tl.constexpr, SCALE: tl.constexpr, ROWS: tl.constexpr, CLASSES: tl.constexpr, FEATURES: tl.constexpr,
    TILE: tl.constexpr, PART: tl.constexpr, COLUMNS: tl.constexpr, HAS_BIAS: tl.constexpr, IEEE: tl.constexpr,
):  # fmt: skip
    """From the sums of a row's tiles: nll, the normaliser's logarithm, the factor a / Σ E, its product with h, and E at
    the target.

    dZ = factor · E: rows of dh are multiplied with the factor afterwards, and for dW the factor goes into h.
    """
    first = tl.program_id(0) * ROWS
    at = first + tl.arange(0, ROWS)
    inside = at < rows
    at_row = start + at
    others = tl.zeros((ROWS,), tl.float32)
    tiles = tl.cdiv(classes, TILE)
    for some in range(0, tiles, PART):
        tile = some + tl.arange(0, PART)
        where = tile[:, None].to(tl.int64) * rows + at[None, :]
        others += tl.sum(tl.load(partial_ptr + where, (tile < tiles)[:, None] & inside[None, :], other=0.0), 0)
    target = tl.load(target_ptr + at_row, inside, other=-1)
    counted = target >= 0
    z_target = tl.load(logit_ptr + at_row, inside, other=0.0)
    logit = z_target * LOG2E
    shift = tl.load(shift_ptr + at_row, inside, other=float("inf"))
    if tl.max((counted & (others > LIMIT)).to(tl.int32), 0) > 0:  # these rows again, with the largest logit as shift
        largest = tl.where(counted, tl.maximum(logit, -1e30), float("inf"))
        for column in range(0, classes, CLASSES):
            at_column = column + tl.arange(0, CLASSES)
            z = _product(h_desc, w_desc, start + first, column, features, ROWS, CLASSES, FEATURES, IEEE)
            z = z * LOG2E + _bias(bias_ptr, at_column, classes, HAS_BIAS)[None, :]
            z = tl.where(at_column[None, :] == target[:, None], float("-inf"), z)
            largest = tl.maximum(largest, tl.max(z, 1))
        shift = largest
        others = tl.zeros((ROWS,), tl.float32)
        for column in range(0, classes, CLASSES):
            at_column = column + tl.arange(0, CLASSES)
            z = _product(h_desc, w_desc, start + first, column, features, ROWS, CLASSES, FEATURES, IEEE)
            z = z * LOG2E + _bias(bias_ptr, at_column, classes, HAS_BIAS)[None, :]
            e = tl.where(at_column[None, :] == target[:, None], 0.0, tl.exp2(z - shift[:, None]))
            others += tl.sum(e, 1)
            if GRADIENT:
                # Not through the descriptor: the copy engine and the store at the target below have no common order.
                where = at[:, None].to(tl.int64) * e_stride + at_column[None, :]
                tl.store(e_ptr + where, e.to(e_ptr.dtype.element_ty), (at_column < e_stride)[None, :])
    shift = tl.where(counted, shift, 0.0)
    own = tl.exp2(logit - shift)
    total = others + own
    # log(1 + x) to full precision for small x; u - 1 has exactly the error of u.
    x = others / own
    u = 1.0 + x
    near = tl.where(u == 1.0, x, tl.log(u) * (x / (u - 1.0)))
    far = tl.log(total) + (shift - logit) * LN2
    nll = tl.where(own > 0.5, near, far)
    tl.store(nll_ptr + at_row, tl.where(counted, nll, 0.0), inside)
    normaliser = tl.where(z_target == float("-inf"), tl.log(total) + shift * LN2, z_target + nll)
    tl.store(normaliser_ptr + at_row, tl.where(counted, normaliser, 0.0), inside)
    if GRADIENT:
        a = tl.load(a_ptr + at_row, inside, other=0.0)
        b = tl.load(b_ptr + at_row, inside, other=0.0)
        factor = tl.where(counted & (a != 0), a / total, 0.0)
        tl.store(factor_ptr + at_row, factor, inside)
        at_target = tl.where(a != 0, (a - b) / a * total, 0.0) - others
        tl.debug_barrier()  # E of these rows may just have been stored
        tl.store(e_ptr + at.to(tl.int64) * e_stride + target, at_target.to(e_ptr.dtype.element_ty), inside & counted)
        if SCALE:  # in the rows of the last tile that are none, 0
            for some in range(0, features, COLUMNS):
                feature = some + tl.arange(0, COLUMNS)
                valid = (feature < features)[None, :]
                where = at_row[:, None].to(tl.int64) * features + feature[None, :]
                h = tl.load(h_ptr + where, inside[:, None] & valid, other=0.0).to(tl.float32)
                product = (h * factor[:, None]).to(scaled_ptr.dtype.element_ty)
                tl.store(scaled_ptr + at[:, None].to(tl.int64) * features + feature[None, :], product, valid)


@triton.jit(do_not_specialize=["start", "rows", "first_class", "classes"])
def set_targets(
    e_ptr, nll_ptr, target_ptr, a_ptr, b_ptr, start, rows, first_class, classes, e_stride, ROWS: tl.constexpr
):  # fmt: skip
    """E = p at the target, less b / a, where the target is among these classes and p is of known nll."""
    at = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = at < rows
    target = tl.load(target_ptr + start + at, inside, other=-1)
    column = target - first_class
    here = inside & (target >= 0) & (column >= 0) & (column < classes)
    nll = tl.load(nll_ptr + start + at, here, other=0.0)
    a = tl.load(a_ptr + start + at, here, other=0.0)
    b = tl.load(b_ptr + start + at, here, other=0.0)
    # 1 - exp(-nll) by its series where it would cancel.
    series = nll * (1.0 - nll * (0.5 - nll * (1.0 / 6.0 - nll * (1.0 / 24.0))))
    rest = tl.where(nll < 0.03, series, 1.0 - tl.exp(-nll))
    value = tl.where(a != 0, (a - b) / a, 0.0) - rest
    tl.store(e_ptr + at.to(tl.int64) * e_stride + column, value.to(e_ptr.dtype.element_ty), here)


@triton.jit(do_not_specialize=["start", "rows", "done", "classes"])
def finish_input(
    parts_ptr, e_ptr, w_ptr, factor_ptr, out_ptr, start, rows, part_stride, features, done, classes, e_stride,
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
    factor = tl.load(factor_ptr + start + at, at < rows, other=0.0)
    where += start.to(tl.int64) * features
    tl.store(out_ptr + where, (total * factor[:, None]).to(out_ptr.dtype.element_ty), valid)


@triton.jit(do_not_specialize=["start", "rows", "classes"])
def column_sums(
    e_ptr, factor_ptr, out_ptr, start, rows, classes, e_stride, ROWS: tl.constexpr, CLASSES: tl.constexpr
):  # fmt: skip
    """The gradient of the bias: out += Σ_i factor_i · E_iv."""
    column = tl.program_id(0) * CLASSES + tl.arange(0, CLASSES)
    is_class = column < classes
    total = tl.zeros((CLASSES,), tl.float32)
    for some in range(0, rows, ROWS):
        at = some + tl.arange(0, ROWS)
        where = at[:, None].to(tl.int64) * e_stride + column[None, :]
        e = tl.load(e_ptr + where, (at < rows)[:, None] & is_class[None, :], other=0.0).to(tl.float32)
        factor = tl.load(factor_ptr + start + at, at < rows, other=0.0)
        total += tl.sum(e * factor[:, None], 0)
    tl.store(out_ptr + column, tl.load(out_ptr + column, is_class, other=0.0) + total, is_class)


@triton.jit(do_not_specialize=["n", "m"])
def multiply(x_ptr, y_ptr, factor_ptr, n, m, BLOCK: tl.constexpr):
    """x *= factor and y *= factor, in at least float32, and nothing at all where factor is 1."""
    factor = tl.load(factor_ptr)
    if factor == 1.0:
        return
    _multiply(x_ptr, factor, n, BLOCK)
    _multiply(y_ptr, factor, m, BLOCK)


@triton.jit
def _multiply(x_ptr, factor, n, BLOCK: tl.constexpr):
    for start in range(tl.program_id(0).to(tl.int64) * BLOCK, n, tl.num_programs(0).to(tl.int64) * BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + at, at < n)
        wide: tl.constexpr = tl.float64 if x_ptr.dtype.element_ty == tl.float64 else tl.float32
        tl.store(x_ptr + at, (x.to(wide) * factor.to(wide)).to(x_ptr.dtype.element_ty), at < n)
