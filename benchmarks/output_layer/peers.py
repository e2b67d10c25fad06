"""Losses of other packages, with their defaults, tuned, and padded. Make the packages importable with PYTHONPATH.

Padding appends rows to W so that the vocabulary is a multiple of 64. Where the bias is part of the product (plain
torch), the padded rows get a bias of -inf, which is exact. Liger adds a bias in separate passes and Cut Cross-Entropy
25.1.1 has none, so they get zero rows: with a logit of 0, these change the softmax of 267,735 classes by less than bf16
resolves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.output_layer.contenders import TORCH, Contender, Loss, Run, UnavailableError, differentiate
from benchmarks.output_layer.measuring import free_memory, reason_of, seconds_of
from benchmarks.output_layer.problems import Problem

Build = Callable[[Problem], tuple[Run, str]]


def fastest(candidates: Iterable[tuple[str, Run]], device: str) -> tuple[Run, str]:
    """Return the fastest of a few settings, each run twice; settings that fail (out of memory) are left out."""
    best: tuple[float, Run, str] | None = None
    reason = "no setting to try"
    for note, run in candidates:
        try:
            run()
            seconds = seconds_of(run, device)
            if best is None or seconds < best[0]:
                best = seconds, run, note
        except Exception as error:
            reason = reason_of(error)
        free_memory(device)
    if best is None:
        raise RuntimeError(f"every setting failed, the last: {reason}")
    return best[1], best[2]


def needs_cuda(problem: Problem) -> None:
    """Raise if the problem is not on a CUDA device."""
    if problem.h.device.type != "cuda":
        raise UnavailableError("its kernels need a CUDA device")


def liger_loss(budget: int) -> Loss:
    """Return Liger's loss; ``budget`` multiplies the N·d logits that it allows itself, and so the rows of a chunk."""
    from liger_kernel.ops.fused_linear_cross_entropy import (  # type: ignore[import-not-found, unused-ignore]
        LigerFusedLinearCrossEntropyFunction as Liger,
    )

    def loss(h: Tensor, weight: Tensor, targets: Tensor, _: Tensor | None) -> Tensor:
        # The public wrapper has these defaults, too, but does not pass the budget.
        settings = (None, None, -100, 0.0, 0.0, "mean", None, False, None, False, False, False, None, None)
        value: Tensor = Liger.apply(h, weight, targets, *settings, budget)[0]
        return value

    return loss


def liger_chunk(problem: Problem, budget: int) -> int:
    """Return the rows of a chunk by Liger's rule."""
    (n, features), classes = problem.h.shape, len(problem.weight)
    rows = -(-n // -(-classes // (budget * features)))
    return min(n, 1 << (rows - 1).bit_length())


def liger(problem: Problem) -> tuple[Run, str]:
    needs_cuda(problem)
    return differentiate(liger_loss(1), problem), f"chunks of {liger_chunk(problem, 1):,} rows"


def liger_tuned(problem: Problem) -> tuple[Run, str]:
    needs_cuda(problem)
    budgets: dict[int, int] = {}
    for budget in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512):
        rows = liger_chunk(problem, budget)
        # Its kernels have 32-bit offsets: a chunk of 2^31 logits would read elsewhere, and the device would be lost.
        if 512 <= rows <= 8192 and rows * len(problem.weight) < 2**31:
            budgets.setdefault(rows, budget)
    runs = ((f"chunks of {rows:,} rows", differentiate(liger_loss(b), problem)) for rows, b in budgets.items())
    return fastest(runs, "cuda")


def cut_cross_entropy(problem: Problem) -> tuple[Run, str]:
    needs_cuda(problem)
    from cut_cross_entropy import linear_cross_entropy  # type: ignore[import-not-found, unused-ignore]

    def loss(h: Tensor, weight: Tensor, targets: Tensor, _: Tensor | None) -> Tensor:
        value: Tensor = linear_cross_entropy(h, weight, targets)
        return value

    return differentiate(loss, problem), "leaves out small gradients"


def torch_loss(chunk: int | None) -> Loss:
    """Return ``F.linear_cross_entropy`` (torch 2.13), with the chunk that it chooses or with ``chunk`` rows."""
    if not hasattr(F, "linear_cross_entropy"):
        raise ImportError(f"torch {torch.__version__} has no F.linear_cross_entropy (2.13 has)")
    options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=chunk)

    def loss(h: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear_cross_entropy(h, weight, targets, linear_bias=bias, options=options)

    return loss


def torch_default(problem: Problem) -> tuple[Run, str]:
    if problem.h.device.type == "cpu" and problem.spec.classes**2 > 2e9:
        # There are at least V/d chunks, and each adds to all V·d elements of dW.
        raise UnavailableError("with the chunks that it chooses, a call takes minutes on a CPU with this many classes")
    return differentiate(torch_loss(None), problem), "chunks that it chooses"


def torch_tuned(problem: Problem) -> tuple[Run, str]:
    largest = min(8192, len(problem.h))
    chunks = sorted({min(largest, rows) for rows in (256, 1024, 2048, 4096, 8192)})
    runs = ((f"chunks of {rows:,} rows", differentiate(torch_loss(rows), problem)) for rows in chunks)
    return fastest(runs, problem.h.device.type)


def padded(contender: Contender, how: str) -> Contender:
    """Return the contender on a padded W: with rows of zeros, or with zeros that a bias of -inf takes out."""

    def build(problem: Problem) -> tuple[Run, str]:
        wide = problem.padded()
        run, note = contender.build(wide if how == "bias of -inf" else replace(wide, bias=None))
        return (
            run,
            f"{note}; W padded to {len(wide.weight):,} rows" if note else f"W padded to {len(wide.weight):,} rows",
        )

    kind = contender.kind if contender.kind in ("approximate", "baseline") else "padded"
    return replace(contender, name=f"{contender.name}, padded ({how})", kind=kind, build=build)


LIGER = Contender("Liger", "peer", liger)
LIGER_TUNED = Contender("Liger, best chunk", "tuned", liger_tuned)
CUT = Contender("Cut Cross-Entropy", "approximate", cut_cross_entropy)
TORCH_LCE = Contender("F.linear_cross_entropy", "peer", torch_default)
TORCH_LCE_TUNED = Contender("F.linear_cross_entropy, best chunk", "tuned", torch_tuned)

PEERS = [LIGER, TORCH_LCE, CUT, LIGER_TUNED, TORCH_LCE_TUNED]
PADDED = [
    *(padded(contender, "zero rows") for contender in (LIGER, LIGER_TUNED, CUT)),
    *(padded(contender, "bias of -inf") for contender in (*TORCH, TORCH_LCE, TORCH_LCE_TUNED)),
]
