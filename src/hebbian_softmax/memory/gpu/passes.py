"""The passes over the logits of neighbours on a GPU, in float32; one launch each.

They do what :mod:`hebbian_softmax.memory.passes` does, and are bound by memory alone: the model's logits and the change
are read once, and only the result is written. Their width must be a multiple of 16, so that a thread can load 16 bytes
at a time. Sums are always taken in the same order, so the same input gives the same bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hebbian_softmax._triton import power_of_two
from hebbian_softmax.memory.passes import Moved

LOWEST = tl.constexpr(-3.4028234663852886e38)

COPIES = 0
"""How many R × K × V matrices a pass makes besides its result."""


def log_sum_exp(moved: Moved) -> Tensor:
    """Return the log-sum-exp of the logits over the tile, (R, K)."""
    model, indices, change = _operands(moved)
    result = model.new_empty(indices.shape)
    width = model.shape[1]
    block = min(2048, power_of_two(width))
    with torch.cuda.device_of(model):
        row_log_sum_exp[(indices.numel(),)](
            model, indices, change, result, width, CHANGED=moved.change is not None, BLOCK=block, num_warps=4
        )
    return result


def errors(moved: Moved, normalisers: Tensor, dtype: torch.dtype) -> Tensor:
    """Return 1{y = v} − p(v) of the neighbours, (R, K, tile), where log p is the logits less ``normalisers``."""
    model, indices, change = _operands(moved)
    width = model.shape[1]
    result = torch.empty(*indices.shape, width, dtype=dtype, device=model.device)
    block = min(2048, power_of_two(width))
    with torch.cuda.device_of(model):
        row_errors[(indices.numel() * triton.cdiv(width, block),)](
            model, indices, change, normalisers.contiguous(), moved.columns.contiguous(), result, width,
            CHANGED=moved.change is not None, BLOCK=block, num_warps=4,
        )  # fmt: skip
    return result


def weighted_errors(moved: Moved, normalisers: Tensor, weights: Tensor) -> Tensor:
    """Return Σ_k weights_k (1{y_k = v} − p_k(v)) of each query, (R, tile), for weights (R, K)."""
    model, indices, change = _operands(moved)
    (queries, neighbours), width = indices.shape, model.shape[1]
    result = model.new_empty(queries, width)
    block = min(128, power_of_two(width))
    with torch.cuda.device_of(model):
        column_errors[(queries * triton.cdiv(width, block),)](
            model, indices, change, normalisers.contiguous(), moved.columns.contiguous(), weights.contiguous(), result,
            width, neighbours, CHANGED=moved.change is not None, ROWS=32, BLOCK=block, num_warps=4,
        )  # fmt: skip
    return result


def _operands(moved: Moved) -> tuple[Tensor, Tensor, Tensor]:
    """Return the model's logits, the indices and the change, each in one piece; any pointer will do for no change."""
    model = moved.model
    return model, moved.indices.contiguous(), model if moved.change is None else moved.change.contiguous()


@triton.jit
def _logits(model_ptr, change_ptr, inside, CHANGED: tl.constexpr):
    """Return the logits at pointers into both terms, -inf outside."""
    z = tl.load(model_ptr, inside, other=float("-inf"))
    if CHANGED:
        z += tl.load(change_ptr, inside, other=0.0)
    return z


@triton.jit
def row_log_sum_exp(
    model_ptr, index_ptr, change_ptr, result_ptr, width, CHANGED: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Store the log-sum-exp of one neighbour's logits.

    Each column of a block carries its own largest logit and sum along, so that columns are joined only once.
    """
    row = tl.program_id(0).to(tl.int64)
    model_ptr += tl.load(index_ptr + row) * width
    change_ptr += row * width
    largest = tl.full((BLOCK,), LOWEST, tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, width, BLOCK):
        column = first + tl.arange(0, BLOCK)
        z = _logits(model_ptr + column, change_ptr + column, column < width, CHANGED)
        higher = tl.maximum(largest, z)
        total = total * tl.exp(largest - higher) + tl.exp(z - higher)
        largest = higher
    highest = tl.max(largest, 0)
    total = tl.sum(total * tl.exp(largest - highest), 0)
    tl.store(result_ptr + row, highest + tl.log(total))


@triton.jit
def row_errors(
    model_ptr, index_ptr, change_ptr, normaliser_ptr, column_ptr, result_ptr, width,
    CHANGED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Store 1{y = v} − p(v) of one neighbour in a block of columns."""
    blocks = tl.cdiv(width, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    column = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    model_ptr += tl.load(index_ptr + row) * width
    z = _logits(model_ptr + column, change_ptr + row * width + column, inside, CHANGED)
    own = tl.load(column_ptr + row).to(tl.int32)
    error = (column == own).to(tl.float32) - tl.exp(z - tl.load(normaliser_ptr + row))
    tl.store(result_ptr + row * width + column, error.to(result_ptr.dtype.element_ty), inside)


@triton.jit
def column_errors(
    model_ptr, index_ptr, change_ptr, normaliser_ptr, column_ptr, weight_ptr, result_ptr, width, neighbours,
    CHANGED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Store the weighted sum of 1{y = v} − p(v) over all neighbours of one query, in a block of columns."""
    blocks = tl.cdiv(width, BLOCK)
    query = (tl.program_id(0) // blocks).to(tl.int64)
    column = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for first in range(0, neighbours, ROWS):
        k = first + tl.arange(0, ROWS)
        is_row = k < neighbours
        row = query * neighbours + k
        at = tl.load(index_ptr + row, is_row, other=0) * width
        weight = tl.load(weight_ptr + row, is_row, other=0.0)
        normaliser = tl.load(normaliser_ptr + row, is_row, other=0.0)
        own = tl.load(column_ptr + row, is_row, other=-1).to(tl.int32)
        inside = is_row[:, None] & (column < width)[None, :]
        z = _logits(
            model_ptr + at[:, None] + column[None, :],
            change_ptr + (row * width)[:, None] + column[None, :],
            inside,
            CHANGED,
        )
        error = (column[None, :] == own[:, None]).to(tl.float32) - tl.exp(z - normaliser[:, None])
        total += weight[:, None] * error
    tl.store(result_ptr + query * width + column, tl.sum(total, 0), column < width)
