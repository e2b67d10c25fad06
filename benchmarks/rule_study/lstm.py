r"""One LSTM layer for several models at once: the recurrent products of all models are one batched product.

A single LSTM leaves a GPU mostly idle, because its products wait for one another and each is small. Models that differ
in their weights only can share every launch:

.. math::
    a_t = U x_t + R h_{t-1} + b, \quad (i, f, g, o) = (\sigma, \sigma, \tanh, \sigma)(a_t), \quad
    c_t = f c_{t-1} + i g, \quad h_t = o \tanh c_t

Cells and sums are in float32; what is kept of the gates, and h, are in the dtype of the input.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hebbian_softmax._triton import runs_on

try:
    import triton
    import triton.language as tl
except ImportError:  # Without Triton there is no GPU either, and torch's operations take the cell.
    triton = None  # type: ignore[assignment]

BLOCK = 1024


class BatchedLSTM(torch.autograd.Function):
    """The layer of K models over a whole sequence, with gradients of everything but the first state."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, u: Tensor, r: Tensor, b: Tensor, h0: Tensor, c0: Tensor) -> tuple[Tensor, Tensor]:
        """Return h (K, time, batch, hidden) and the last cell (K, batch, hidden) in float32.

        ``x`` is (K, time, batch, inputs), ``u`` (K, 4 hidden, inputs), ``r`` (K, 4 hidden, hidden), ``b`` (K, 4
        hidden), ``h0`` and ``c0`` (K, batch, hidden); gates are in the order i, f, g, o.
        """
        models, time, batch, inputs = x.shape
        hidden = r.shape[2]
        flat = x.reshape(models, time * batch, inputs)
        gates = torch.baddbmm(b.unsqueeze(1).to(x.dtype), flat, u.mT).view(models, time, batch, 4 * hidden)
        h = x.new_empty(models, time, batch, hidden)
        cells = x.new_empty(models, time, batch, hidden, dtype=torch.promote_types(x.dtype, torch.float32))
        before_h, before_c = h0, c0
        for t in range(time):
            product = wide_bmm(before_h, r.mT)
            forward_cell(gates[:, t], product, before_c, cells[:, t], h[:, t])
            before_h, before_c = h[:, t], cells[:, t]
        ctx.save_for_backward(x, u, r, gates, h, cells, h0, c0)
        return h, cells[:, -1]

    @staticmethod
    def backward(ctx: Any, *upstreams: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of x, u, r and b; that of the last cell is not used, since a state is never learnt."""
        x, u, r, gates, h, cells, h0, c0 = ctx.saved_tensors
        models, time, batch, hidden = h.shape
        upstream = upstreams[0].contiguous()
        d_gates = torch.empty_like(gates)
        d_cell = torch.zeros_like(cells[:, 0]).contiguous()
        d_h = torch.zeros_like(d_cell)
        for t in reversed(range(time)):
            before_c = cells[:, t - 1] if t else c0
            backward_cell(gates[:, t], cells[:, t], before_c, upstream[:, t], d_h, d_cell, d_gates[:, t])
            if t:
                d_h = wide_bmm(d_gates[:, t], r)
        flat = d_gates.view(models, time * batch, 4 * hidden)
        earlier = torch.cat([h0.unsqueeze(1), h[:, :-1]], 1).view(models, time * batch, hidden)
        d_x = (flat @ u).view_as(x)
        d_u = flat.mT @ x.reshape(models, time * batch, -1)
        d_r, d_b = flat.mT @ earlier, flat.sum(1, dtype=cells.dtype).to(x.dtype)
        return d_x, d_u, d_r, d_b, None, None


def wide_bmm(left: Tensor, right: Tensor) -> Tensor:
    """Return left @ right with sums that are not rounded to half precision."""
    if left.is_cuda and left.dtype != torch.float32:
        return torch.bmm(left, right, out_dtype=torch.float32)
    return torch.bmm(left, right)


def forward_cell(gates: Tensor, product: Tensor, before: Tensor, cell: Tensor, h: Tensor) -> None:
    """Overwrite the sums in ``gates`` (K, batch, 4 hidden) by the gates; store the cell and h (K, batch, hidden)."""
    models, batch, hidden = before.shape
    if _fused(gates):
        forward_kernel[(models * batch, triton.cdiv(hidden, BLOCK))](
            gates, product, before, cell, h, batch, hidden, gates.stride(0), before.stride(0), cell.stride(0),
            h.stride(0), BLOCK=BLOCK,
        )  # fmt: skip
        return
    i, f, g, o = (gates.to(product.dtype) + product).chunk(4, -1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    cell.copy_(f * before + i * g)
    h.copy_(o * cell.tanh())
    gates.copy_(torch.cat([i, f, g, o], -1))


def backward_cell(
    gates: Tensor, cell: Tensor, before: Tensor, upstream: Tensor, d_h: Tensor, d_cell: Tensor, d_gates: Tensor
) -> None:
    """Store the gradient of the sums in ``d_gates``, and that of the cell before in ``d_cell``."""
    models, batch, hidden = before.shape
    if _fused(gates):
        backward_kernel[(models * batch, triton.cdiv(hidden, BLOCK))](
            gates, cell, before, upstream, d_h, d_cell, d_gates, batch, hidden, gates.stride(0), cell.stride(0),
            before.stride(0), upstream.stride(0), d_gates.stride(0), BLOCK=BLOCK,
        )  # fmt: skip
        return
    i, f, g, o = gates.to(cell.dtype).chunk(4, -1)
    d, squashed = upstream.to(cell.dtype) + d_h, cell.tanh()
    dc = d_cell + d * o * (1 - squashed**2)
    parts = dc * g * i * (1 - i), dc * before * f * (1 - f), dc * i * (1 - g**2), d * squashed * o * (1 - o)
    d_gates.copy_(torch.cat(parts, -1))
    d_cell.copy_(dc * f)


def _fused(tensor: Tensor) -> bool:
    return triton is not None and runs_on(tensor.device)


if triton is not None:

    @triton.jit
    def _sigmoid(x):
        return 1.0 / (1.0 + tl.exp(-x))

    @triton.jit
    def _tanh(x):
        return 1.0 - 2.0 / (1.0 + tl.exp(2.0 * x))

    @triton.jit
    def _place(batch, hidden, BLOCK: tl.constexpr):
        """Return this program's model and row, and the columns of a gate with which of them exist."""
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        row = tl.program_id(0)
        return (row // batch).to(tl.int64), row % batch, column, column < hidden

    @triton.jit
    def forward_kernel(
        gates, product, before, cell, h, batch, hidden, gates_stride, before_stride, cell_stride, h_stride,
        BLOCK: tl.constexpr,
    ):  # fmt: skip
        """Take one row of one model through the cell."""
        model, row, column, inside = _place(batch, hidden, BLOCK)
        at_gates = gates + model * gates_stride + row * 4 * hidden + column
        at_product = product + (model * batch + row) * 4 * hidden + column
        i = tl.load(at_gates, inside, other=0.0).to(tl.float32) + tl.load(at_product, inside, other=0.0)
        f = tl.load(at_gates + hidden, inside, other=0.0).to(tl.float32)
        f += tl.load(at_product + hidden, inside, other=0.0)
        g = tl.load(at_gates + 2 * hidden, inside, other=0.0).to(tl.float32)
        g += tl.load(at_product + 2 * hidden, inside, other=0.0)
        o = tl.load(at_gates + 3 * hidden, inside, other=0.0).to(tl.float32)
        o += tl.load(at_product + 3 * hidden, inside, other=0.0)
        i, f, g, o = _sigmoid(i), _sigmoid(f), _tanh(g), _sigmoid(o)
        c = f * tl.load(before + model * before_stride + row * hidden + column, inside, other=0.0) + i * g
        kind = gates.dtype.element_ty
        tl.store(at_gates, i.to(kind), inside)
        tl.store(at_gates + hidden, f.to(kind), inside)
        tl.store(at_gates + 2 * hidden, g.to(kind), inside)
        tl.store(at_gates + 3 * hidden, o.to(kind), inside)
        tl.store(cell + model * cell_stride + row * hidden + column, c, inside)
        tl.store(h + model * h_stride + row * hidden + column, (o * _tanh(c)).to(kind), inside)

    @triton.jit
    def backward_kernel(
        gates, cell, before, upstream, d_h, d_cell, d_gates, batch, hidden, gates_stride, cell_stride, before_stride,
        upstream_stride, d_gates_stride, BLOCK: tl.constexpr,
    ):  # fmt: skip
        """Take the gradient of one row of one model back through the cell."""
        model, row, column, inside = _place(batch, hidden, BLOCK)
        at_gates = gates + model * gates_stride + row * 4 * hidden + column
        i = tl.load(at_gates, inside, other=0.0).to(tl.float32)
        f = tl.load(at_gates + hidden, inside, other=0.0).to(tl.float32)
        g = tl.load(at_gates + 2 * hidden, inside, other=0.0).to(tl.float32)
        o = tl.load(at_gates + 3 * hidden, inside, other=0.0).to(tl.float32)
        squashed = _tanh(tl.load(cell + model * cell_stride + row * hidden + column, inside, other=0.0))
        earlier = tl.load(before + model * before_stride + row * hidden + column, inside, other=0.0)
        at = (model * batch + row) * hidden + column
        d = tl.load(upstream + model * upstream_stride + row * hidden + column, inside, other=0.0).to(tl.float32)
        d += tl.load(d_h + at, inside, other=0.0)
        dc = tl.load(d_cell + at, inside, other=0.0) + d * o * (1.0 - squashed * squashed)
        kind = d_gates.dtype.element_ty
        at_d = d_gates + model * d_gates_stride + row * 4 * hidden + column
        tl.store(at_d, (dc * g * i * (1.0 - i)).to(kind), inside)
        tl.store(at_d + hidden, (dc * earlier * f * (1.0 - f)).to(kind), inside)
        tl.store(at_d + 2 * hidden, (dc * i * (1.0 - g * g)).to(kind), inside)
        tl.store(at_d + 3 * hidden, (d * squashed * o * (1.0 - o)).to(kind), inside)
        tl.store(d_cell + at, dc * f, inside)
