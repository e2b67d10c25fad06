"""Comparing the activations of sampled classes with memories of them, to find out whether features have settled."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from hebbian_softmax.write.gpu import tile
from hebbian_softmax.write.gpu.means import mean_of_run
from hebbian_softmax.write.settling import LEAST_RATE

if TYPE_CHECKING:
    from hebbian_softmax.layer import HebbianSoftmax


_PROGRAMS = 2_048
"""Programs that share the positions: mostly there is nothing to do."""


def compare_with_memories(
    head: HebbianSoftmax,
    keys: Tensor,
    h: Tensor,
    order: Tensor,
    blocks: Tensor,
    before: Tensor,
    many: Tensor,
    measured: Tensor,
    begun: Tensor,
) -> Tensor:
    """Do what ``Settling.see`` does for each run that is measured; return its cosine, float32 (N,).

    Once writing has ``begun``, none is.

    This comes before the running mean advances, and ``statistics`` takes the cosines in.
    """
    settling = head.settling
    assert settling is not None
    cosines = torch.empty_like(many, dtype=torch.float32)
    settle_kernel[(min(many.numel(), _PROGRAMS),)](
        keys, h, order, blocks, before, many, measured, begun, settling.memory, settling.stride, head.running.mean,
        cosines, many.numel(), head.in_features, LEAST_RATE, **tile(head.in_features),
    )  # fmt: skip
    torch.autograd.graph.increment_version((settling.memory,))
    return cosines


@triton.jit
def settle_kernel(
    keys, h, order, blocks, before, many, measured, begun, memory, stride, mean, cosines, positions, features,
    least_rate, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Look at a few sorted positions in each program: at the start of a measured run, compare it with its memory."""
    if tl.load(begun) == 0:
        for position in range(tl.program_id(0), positions, tl.num_programs(0)):
            if tl.load(measured + position) > 0:
                column = tl.arange(0, BLOCK)
                inside = column < features
                slot = (tl.load(keys + position).to(tl.int64)) // tl.load(stride)
                at = memory + slot * features + column
                n = tl.load(many + position)
                found = mean_of_run(h, order, blocks, position, n, features, ROWS, BLOCK)
                known = tl.load(at, mask=inside, other=0.0)
                count = tl.load(before + position)
                away = tl.load(mean + column, mask=inside, other=0.0)
                a, b = tl.where(inside, found - away, 0.0), tl.where(inside, known - away, 0.0)
                norms = tl.sqrt_rn(tl.sum(a * a, 0)) * tl.sqrt_rn(tl.sum(b * b, 0))
                cosine = tl.sum(a * b, 0) / tl.where(norms > 0, norms, 1.0)
                tl.store(cosines + position, tl.where(norms > 0, cosine, 0.0))
                rate = tl.maximum(tl.div_rn(1.0, (count + 1).to(tl.float32)), least_rate)
                tl.store(at, known + rate * (found - known), mask=inside)
