# mypy: ignore-errors
"""The gradient step of RMSprop and Adam in one pass, with the rule's write in it.

``UPDATE`` says which step is made: 0 for none, 1 for RMSprop, 2 for Adam. All of its arguments go together:
``grad, first, second, step, lr, decay, rest1, keep2, rest2, log1, log2, eps``, with m in ``first`` (Adam only), v in
``second``, 1 − β₁, β₂, 1 − β₂ and the logarithms of both; each is given, since float32 would lose digits of 1 − β.
"""

import triton
import triton.language as tl

from hebbian_softmax.write.gpu.kernels.rows import memory_of_run, mixed


@triton.jit
def stepped(
    weight, at, inside, grad, first, second, step, lr, decay, rest1, keep2, rest2, log1, log2, eps,
    UPDATE: tl.constexpr, LR_TENSOR: tl.constexpr,
):  # fmt: skip
    """θ̂ as the step leaves it, rounded to the weight's dtype, and the optimizer's new m and v; stores nothing."""
    w = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    m = w
    v = w
    if UPDATE != 0:
        rate = lr
        if LR_TENSOR:
            rate = tl.load(lr).to(tl.float32)
        g = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32) + decay * w
        v = keep2 * tl.load(second + at, mask=inside, other=0.0).to(tl.float32) + rest2 * g * g
        if UPDATE == 1:
            w -= rate * tl.div_rn(g, tl.sqrt_rn(v) + eps)
        if UPDATE == 2:
            m = tl.load(first + at, mask=inside, other=0.0).to(tl.float32)
            m = tl.where(rest1 < 0.5, m + rest1 * (g - m), g - (g - m) * (1 - rest1))  # torch's lerp
            t = tl.load(step).to(tl.float64)
            correction1 = (1.0 - tl.exp(t * log1)).to(tl.float32)
            correction2 = tl.sqrt_rn((1.0 - tl.exp(t * log2)).to(tl.float32))
            w -= tl.div_rn(rate, correction1) * tl.div_rn(m, tl.div_rn(tl.sqrt_rn(v), correction2) + eps)
    return w.to(weight.dtype.element_ty).to(tl.float32), m, v


@triton.jit
def step_elements(
    weight, n, grad, first, second, step, lr, decay, rest1, keep2, rest2, log1, log2, eps,
    UPDATE: tl.constexpr, LR_TENSOR: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The step of a parameter of any shape."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    w, m, v = stepped(
        weight, at, inside, grad, first, second, step, lr, decay, rest1, keep2, rest2, log1, log2, eps, UPDATE,
        LR_TENSOR,
    )  # fmt: skip
    tl.store(weight + at, w, mask=inside)
    tl.store(second + at, v, mask=inside)
    if UPDATE == 2:
        tl.store(first + at, m, mask=inside)


@triton.jit
def step_rows(
    weight, copy, grad, first, second, step, lr, decay, rest1, keep2, rest2, log1, log2, eps, slots, h, order, blocks,
    before, run_lengths, rates, center, scale, counts, features, radius,
    UPDATE: tl.constexpr, LR_TENSOR: tl.constexpr, COPY: tl.constexpr, WRITE: tl.constexpr, MEMORIZING: tl.constexpr,
    OBJECTIVE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program a row: the step and, where the class has a run with λ > 0, the mixture, read and written once."""
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < features
    at = row.to(tl.int64) * features + column
    w, m, v = stepped(
        weight, at, inside, grad, first, second, step, lr, decay, rest1, keep2, rest2, log1, log2, eps, UPDATE,
        LR_TENSOR,
    )  # fmt: skip
    if WRITE:
        position = tl.load(slots + row)
        if position >= 0:
            tl.debug_barrier()  # every warp has read it
            tl.store(slots + row, -1)  # empty again for the next step
            n = tl.load(run_lengths + position)
            tl.store(counts + row, tl.load(before + position) + n)
            if MEMORIZING:
                rate = tl.load(rates + position)
                if rate > 0:
                    memory = memory_of_run(
                        h, order, blocks, center, scale, position, n, features, radius, OBJECTIVE, ROWS, BLOCK
                    )
                    w = mixed(w, memory, rate, weight.dtype.element_ty).to(tl.float32)
    tl.store(weight + at, w, mask=inside)
    tl.store(second + at, v, mask=inside)
    if UPDATE == 2:
        tl.store(first + at, m, mask=inside)
    if COPY:
        tl.store(copy + at, w, mask=inside)
