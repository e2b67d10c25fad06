"""Finding the runs of a sorted batch: what the rule needs to know of each class."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hebbian_softmax.rule import (
    FALLEN,
    LARGEST_COUNT,
    LAST_BATCHES,
    LATER,
    RARE_AMONG,
    RARE_IN_TIME,
    ConstantRate,
    InclusiveRate,
    InverseCountRate,
    PaperRate,
    Rate,
    RecentRate,
)
from hebbian_softmax.write.gpu import tile
from hebbian_softmax.write.gpu.inspect import inspection_of
from hebbian_softmax.write.gpu.means import BLOCK_LENGTH
from hebbian_softmax.write.gpu.settle import compare_with_memories
from hebbian_softmax.write.gpu.sort import stable_sort
from hebbian_softmax.write.gpu.statistics import advance
from hebbian_softmax.write.gpu.update import Update, no_step, stepped
from hebbian_softmax.write.running import SMALL_MEAN
from hebbian_softmax.write.timing import shortens

if TYPE_CHECKING:
    from hebbian_softmax.layer import HebbianSoftmax
    from hebbian_softmax.write.activations import Activations
    from hebbian_softmax.write.timing import Timing

GIVEN, BEFORE, INCLUSIVE, CONSTANT, MEAN, RECENT = (tl.constexpr(each) for each in range(6))
"""RATE: λ is computed in torch, from the count before the batch, from the count with it, is always the same, is the
batch's share of that count, or is the share of it and of later occurrences, as in steps of ``RecentRate``."""
_LATER, _LAST_BATCHES, _FALLEN = tl.constexpr(LATER), tl.constexpr(LAST_BATCHES), tl.constexpr(FALLEN)
_LARGEST_COUNT = tl.constexpr(LARGEST_COUNT)
_RARE_AMONG, _RARE_IN_TIME = tl.constexpr(RARE_AMONG), tl.constexpr(RARE_IN_TIME)
_WINDOW = tl.constexpr(128)
"""Sorted keys that are looked at together for the end of a run."""
_ROW_PARTS = 512
"""Programs that share a pass over all rows."""


class Runs(NamedTuple):
    """A batch sorted by class. Positions where no run starts have n = 0, and their other entries have no meaning."""

    h: Tensor
    """(N, features), in the order of the batch."""
    keys: Tensor
    """int16 or int32 (N,): -1 for activations left out, then the classes, ascending."""
    order: Tensor
    """int64 (N,): the row of ``h`` at each sorted position."""
    blocks: Tensor
    """float32 (N / 16, features): sums of 16 activations; only those within a run with λ > 0, or one that is measured,
    have a meaning."""
    before: Tensor
    """int64 (N,): c[i] before the batch, 0 where no run starts."""
    n: Tensor
    """int32 (N,): n[i]."""
    rate: Tensor
    """float32 (N,): λ[i]."""
    length: Tensor
    """float32 (N,): the factor of ``RecentRate.length``; only where memories are shortened."""
    center: Tensor
    """float32 (features,): what is subtracted from the mean of a run."""
    scale: Tensor
    """float32 (1,): the factor that the centred mean is multiplied by."""
    begun: Tensor
    """int32 (1,): whether steps have begun to write."""
    direction: Tensor
    """float32 (1,): one over the norm of ``center``, 0 while that has no direction; only for writes across the mean."""
    along: Tensor
    """float32 (2,): the component along the mean that a first write sets, and whether it is known; likewise."""


class Moment(NamedTuple):
    """When the write is, as the kernel needs to know it."""

    since_start: Tensor
    """int64 (classes,): the occurrences of each class since steps began to write."""
    start: int
    """The batches after which steps begin to write; without a meaning where features are waited for."""
    began: Tensor
    """int64: not negative once features have settled; any tensor where they are not waited for."""
    stride: Tensor
    """int64: every so many classes one is sampled, to find out whether features have settled."""
    sampled: int
    lr: float | Tensor
    highest: float | Tensor
    fallen: float
    """That of ``Timing.fallen``; without a meaning where the learning rate is on the device."""


def find_runs(
    head: HebbianSoftmax,
    contents: Sequence[Activations],
    weight: Tensor,
    timing: Timing,
    update: Update | None = None,
    slots: Tensor | None = None,
) -> Runs | None:
    """Sort a batch by class and take it into the running values; counts and rows are left to the caller.

    With ``update`` the gradient step is still to be made, and the norms of rows are those that it will leave.
    ``slots``, int32 with one entry a class, receives the position where the run of each class starts. Returns None for
    a batch without activations, which changes nothing.
    """
    h, targets = _joined(contents, weight.device)
    n, features = h.shape
    if n == 0:
        return None
    seen = inspection_of(head, contents, h, targets)
    keys, order = stable_sort(seen.keys, head.num_classes)
    before, many = torch.empty_like(order), torch.empty_like(order, dtype=torch.int32)
    rate, norms, components, length = (h.new_empty(n, dtype=torch.float32) for _ in range(4))
    direction = rate.new_empty(1)
    begun = many.new_empty(1)
    kind, gamma, limit = _known_rate(head, in_step=timing.waits)
    shorter = shortens(head, timing)
    match = head.scale == "match"
    step, kind_of_step = no_step(weight) if update is None else update.arguments()
    moment, timed = _moment(head, timing)
    measured = many if head.settling is None else torch.empty_like(many)
    block = tile(features)["BLOCK"]
    row_parts = min(_ROW_PARTS, head.num_classes)
    all_norms, all_rows = h.new_empty(row_parts, dtype=torch.float32), many.new_empty(row_parts)
    find_runs_kernel[(n + row_parts if match else n,)](
        keys, head.counts, weight, before, many, rate, length, norms, begun, head.running.batches, all_norms, all_rows,
        n, features, head.num_classes, float(gamma), min(limit or 0, LARGEST_COUNT), many if slots is None else slots,
        step, moment, measured, head.running.mean, head.running.norms, components, direction, SMALL_MEAN,
        head.running.seen, SHORTENS=shorter, GROWS=head.limit_grows(), ACROSS=head.write == "across", **kind_of_step,
        **timed, RATE=kind, LIMITED=limit is not None, MATCH=match, SLOTS=slots is not None,
        BLOCK=block, num_warps=min(16, max(1, block // 512)),  # few: most programs have no row
    )  # fmt: skip
    if kind == GIVEN.value:
        n_or_one, fallen = many.clamp_min(1).long(), timing.fallen(many.device)
        given = head.mixing_rate(before, n_or_one, in_step=timing.waits, fallen=fallen).to(rate.dtype)
        if shorter:
            length = RecentRate.length(many, given)
        rate = given * torch.where(many > 0, rate, 0)  # where no run starts, the factor has no value
    blocks = _sums_of_blocks(head, h, keys, order, rate, measured)
    # Last of all, so that a rate that raises has changed nothing.
    fits = None
    if head.settling is not None:
        fits = compare_with_memories(head, keys, h, order, blocks, before, many, measured, begun), measured
    found = advance(head, seen.sums, keys, before, many, norms, all_norms, all_rows, fits, components, direction)
    center, scale, along = found
    return Runs(h, keys, order, blocks, before, many, rate, length, center, scale, begun, direction, along)


def _sums_of_blocks(
    head: HebbianSoftmax, h: Tensor, keys: Tensor, order: Tensor, rate: Tensor, measured: Tensor
) -> Tensor:
    n, features = h.shape
    blocks = h.new_empty(max(n // BLOCK_LENGTH.value, 1), features, dtype=torch.float32)
    measures = head.settling is not None
    if (head.memorizing or measures) and n >= BLOCK_LENGTH.value:
        grid = (blocks.shape[0], -(-features // 256))
        sum_blocks_kernel[grid](h, keys, order, rate, measured, blocks, features, MEASURE=measures, COLUMNS=256)
    return blocks


def _known_rate(head: HebbianSoftmax, in_step: bool) -> tuple[int, float, int | None]:
    """Return which of the kernel's rates it is, its γ and its T. A subclass may compute something else."""
    rate: Rate = head.rate
    match rate:
        case PaperRate(gamma, limit) if type(rate) is PaperRate:
            return BEFORE.value, gamma, limit
        case RecentRate(gamma) if type(rate) is RecentRate:
            kind = RECENT if in_step else MEAN
            return kind.value, gamma, rate.least_limit(head.num_classes if in_step else None)
        case InclusiveRate(gamma, limit) if type(rate) is InclusiveRate:
            return INCLUSIVE.value, gamma, limit
        case ConstantRate(value, limit) if type(rate) is ConstantRate:
            return CONSTANT.value, value, limit
        case InverseCountRate(limit) if type(rate) is InverseCountRate:
            return BEFORE.value, 0.0, limit
    return GIVEN.value, 0.0, None


def _moment(head: HebbianSoftmax, timing: Timing) -> tuple[Moment, dict[str, bool]]:
    """Return the moment of a write, and the constants of the kernel that belong to it."""
    since, settling, on_device = head.since_start, head.settling, timing.on_device()
    lr: float | Tensor
    highest: float | Tensor
    if on_device:
        lr, highest = (torch.as_tensor(each, device=since.device) for each in (timing.lr, timing.highest))
        fallen = 0.0
    else:
        lr, highest, fallen = float(timing.strength()), 1.0, float(timing.fallen(since.device))
    kind = {"WAITS": timing.waits, "AUTO": settling is not None, "FADE_TENSOR": on_device}
    if settling is None:
        assert isinstance(head.start, int)
        return Moment(since, head.start, since, since, 0, lr, highest, fallen), kind
    sampled = settling.memory.shape[0]
    return Moment(since, 0, settling.began, settling.stride, sampled, lr, highest, fallen), kind


def _joined(contents: Sequence[Activations], device: torch.device) -> tuple[Tensor, Tensor]:
    h = [each.h.to(device) for each in contents]
    targets = [each.targets.to(device) for each in contents]
    if len(h) == 1:
        return h[0].contiguous(), targets[0].contiguous()
    return torch.cat(h), torch.cat(targets)


@triton.jit
def find_runs_kernel(
    keys, counts, weight, before_out, n_out, rate_out, length_out, norm_out, begun_out, batches, all_norms, all_rows,
    n, features, classes, gamma, limit, slots, step, moment, measured_out, mean, norms, component_out, direction_out,
    small_mean, seen_in_all, SHORTENS: tl.constexpr, GROWS: tl.constexpr, ACROSS: tl.constexpr, KIND: tl.constexpr,
    LR_TENSOR: tl.constexpr, RATE: tl.constexpr, LIMITED: tl.constexpr, WAITS: tl.constexpr, AUTO: tl.constexpr,
    FADE_TENSOR: tl.constexpr, MATCH: tl.constexpr, SLOTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Look at one sorted position in each program: at the start of a run find n[i], c[i], λ[i], ‖θ̂[i]‖ and θ̂[i]·m.

    Where no run starts, n = 0.

    Given a step that is still to be made, θ̂ is what the step will leave. ``slots`` tells a row where its run starts.
    With ``MATCH`` the programs beyond n look at all rows.
    """
    position = tl.program_id(0)
    if MATCH:
        if position >= n:
            _see_all_rows(
                position - n, tl.num_programs(0) - n, counts, weight, batches, all_norms, all_rows, features, classes,
                step, KIND, LR_TENSOR, BLOCK,
            )  # fmt: skip
            return
    if AUTO:
        begun = tl.load(moment.began) >= 0
    else:
        begun = tl.load(batches + 1) >= moment.start
    if position == 0:
        tl.store(begun_out, begun.to(tl.int32))
        if ACROSS:
            m = tl.load(mean + tl.arange(0, BLOCK), mask=tl.arange(0, BLOCK) < features, other=0.0)
            norm = tl.sqrt_rn(tl.sum(m * m, 0))
            has_one = norm > small_mean * tl.load(norms + 1)
            tl.store(direction_out, tl.where(has_one, tl.div_rn(1.0, tl.where(has_one, norm, 1.0)), 0.0))
    key = tl.load(keys + position).to(tl.int32)
    previous = tl.load(keys + position - 1, mask=position > 0, other=-1)
    last = tl.cast(limit, tl.int64)
    if GROWS:
        among, in_time = tl.load(seen_in_all) // classes // _RARE_AMONG, tl.load(batches + 1) // _RARE_IN_TIME
        last = tl.maximum(last, tl.minimum(among, in_time))
    before = tl.zeros([], tl.int64)
    many = tl.zeros([], tl.int32)
    sampled = many
    if (key != previous) & (key >= 0):
        before = tl.load(counts + key)
        since = tl.load(moment.since_start + key)
        if MATCH or ACROSS:  # loaded now, because the loop below waits
            column = tl.arange(0, BLOCK)
            row, _m, _v = stepped(
                weight, key.to(tl.int64) * features + column, column < features, step, KIND, LR_TENSOR
            )
        found = many + _WINDOW
        while found == _WINDOW:  # most runs end within the first window
            at = position + many + tl.arange(0, _WINDOW)
            found = tl.sum((tl.load(keys + at, mask=at < n, other=-1) == key).to(tl.int32), 0)
            many += found
        if SLOTS:
            tl.store(slots + key, position)
        strength, fallen = _strength(moment, FADE_TENSOR)
        rate = tl.where(since > 0, strength, 1.0)
        if WAITS:
            rate = tl.where(begun, rate, 0.0)
        if AUTO:
            if begun == 0:
                stride = tl.load(moment.stride)
                sampled = ((key % stride == 0) & (key // stride < moment.sampled)).to(tl.int32)
        if RATE != GIVEN:
            own = _rate(before, many, batches, gamma, last, fallen, RATE, LIMITED)
            if SHORTENS:
                held = many.to(tl.float32) * (2.0 - own)
                tl.store(length_out + position, tl.div_rn(held, held + own))
            rate *= own
        tl.store(rate_out + position, rate)
        if MATCH or ACROSS:
            if before > 0:
                tl.store(norm_out + position, tl.sqrt_rn(tl.sum(row * row, 0)))
                if ACROSS:
                    along = tl.load(mean + column, mask=column < features, other=0.0)
                    tl.store(component_out + position, tl.sum(row * along, 0))
    tl.store(n_out + position, many)
    tl.store(before_out + position, before)
    if AUTO:
        tl.store(measured_out + position, sampled)


@triton.jit
def _strength(moment, FADE_TENSOR: tl.constexpr):
    """Return lr / highest of ``Timing.strength``, and ``Timing.fallen``."""
    if FADE_TENSOR:
        lr, highest = tl.load(moment.lr).to(tl.float64), tl.load(moment.highest).to(tl.float64)
        strength = tl.where(highest > 0, lr / tl.where(highest > 0, highest, 1.0), 1.0)
        fallen = tl.minimum(_FALLEN * (1.0 - strength), 1.0).to(tl.float32)
        strength = strength.to(tl.float32)
    else:
        strength, fallen = moment.lr / moment.highest, moment.fallen
    return strength, fallen


@triton.jit
def count_run(runs, position, n, count, since_start, MEMORIZING: tl.constexpr):
    """Advance both counts of the class whose run starts at ``position``."""
    tl.store(count, counted(tl.load(runs.before + position), n))
    if MEMORIZING:
        if tl.load(runs.begun) > 0:
            tl.store(since_start, counted(tl.load(since_start), n))


@triton.jit
def counted(before, n):
    """Return c[i] after the batch, as ``rule.add_counts`` does."""
    return before + tl.minimum(n.to(tl.int64), _LARGEST_COUNT - before)


@triton.jit
def _rate(before, n, batches, gamma, limit, fallen, RATE: tl.constexpr, LIMITED: tl.constexpr):
    """Return λ: 1/c of equation 4 or the share n/(c + n), at least γ, or γ itself, or ``RecentRate``'s; 0 from T on.

    Quotients are computed in float64 and rounded once, so λ has the bits of the float64 rate.
    """
    count, limited = before, before
    if (RATE == INCLUSIVE) | (RATE == MEAN):
        count = counted(before, n)
    if RATE == INCLUSIVE:
        limited = count
    rate = gamma
    if RATE == MEAN:
        rate = tl.maximum((n.to(tl.float64) / count.to(tl.float64)).to(tl.float32), gamma)
    elif RATE == RECENT:
        recent = n.to(tl.float64) * tl.load(batches + 1).to(tl.float64) * fallen / _LAST_BATCHES
        rate = tl.minimum(_share(recent, before), gamma)
        rate = tl.maximum(_share(n.to(tl.float64) * _LATER, before), rate)
    elif RATE != CONSTANT:
        rate = tl.maximum((1.0 / tl.maximum(count, 1).to(tl.float64)).to(tl.float32), gamma)
    if LIMITED:
        rate = tl.where(limited < limit, rate, 0.0)
    return rate


@triton.jit
def _share(weight, before):
    """Return ``rule._share``, rounded once; a class without a weight has been seen before."""
    return (weight / tl.maximum(before.to(tl.float64) + weight, 1e-300)).to(tl.float32)


@triton.jit
def _see_all_rows(
    program, programs, counts, weight, batches, norm_sums, rows_out, features, classes, step,
    KIND: tl.constexpr, LR_TENSOR: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sum the norms of all familiar rows while no norm of rows is known; afterwards do nothing."""
    if tl.load(batches) == 0:
        column = tl.arange(0, BLOCK)
        inside = column < features
        total = tl.zeros([], tl.float32)
        rows = tl.zeros([], tl.int32)
        for each in range(program, classes, programs):
            if tl.load(counts + each) > 0:
                at = tl.cast(each, tl.int64) * features + column
                row, _m, _v = stepped(weight, at, inside, step, KIND, LR_TENSOR)
                total += tl.sqrt_rn(tl.sum(row * row, 0))
                rows += 1
        tl.store(norm_sums + program, total)
        tl.store(rows_out + program, rows)


@triton.jit
def sum_blocks_kernel(
    h, keys, order, rates, measured, blocks, features, MEASURE: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """Sum one block if all of it belongs to one class with λ > 0, or measured, so that no program sums a long run."""
    first = tl.program_id(0) * BLOCK_LENGTH
    key = tl.load(keys + first)
    if (key >= 0) & (tl.load(keys + first + BLOCK_LENGTH - 1) == key):
        low, high = first * 0, first
        while low < high:  # search for the start of the run
            middle = (low + high) // 2
            earlier = tl.load(keys + middle) < key
            low = tl.where(earlier, middle + 1, low)
            high = tl.where(earlier, high, middle)
        needed = tl.load(rates + low) > 0
        if MEASURE:
            needed = needed | (tl.load(measured + low) > 0)
        if needed:
            column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
            inside = column < features
            row = tl.load(order + first + tl.arange(0, BLOCK_LENGTH))
            at = h + row.to(tl.int64)[:, None] * features + column[None, :]
            total = tl.sum(tl.load(at, mask=inside[None, :], other=0.0).to(tl.float32), 0)
            tl.store(blocks + tl.program_id(0).to(tl.int64) * features + column, total, mask=inside)
