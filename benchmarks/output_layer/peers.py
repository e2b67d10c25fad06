"""Losses of other packages, with their defaults, tuned, and padded. Make the packages importable with PYTHONPATH.

Padding appends rows to W so that the vocabulary is a multiple of 256. Where the bias is part of the product (plain
torch), the padded rows get a bias of -inf, which is exact. Liger's Triton kernels add a bias in separate passes, and
its CuTe DSL kernels, QuACK and Cut Cross-Entropy 25.1.1 have none, so they get zero rows: with a logit of 0, these
change the softmax of 267,735 classes by less than bf16 resolves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.output_layer.contenders import (
    TORCH,
    Contender,
    Gradients,
    Loss,
    Run,
    UnavailableError,
    differentiate,
)
from benchmarks.output_layer.measuring import free_memory, reason_of, seconds_of
from benchmarks.output_layer.problems import Problem

Build = Callable[[Problem], tuple[Run, str]]
INDEX_LIMIT = 2**31
"""Kernels of Liger and QuACK have 32-bit offsets: a chunk of more logits would read elsewhere and lose the device."""


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


def needs_hopper(problem: Problem, classes: int, rows: int) -> None:
    """Raise if the problem is not in bf16 on a GPU of capability 9.0, or a size is not a multiple of these numbers."""
    needs_cuda(problem)
    if torch.cuda.get_device_capability(problem.h.device) != (9, 0):
        raise UnavailableError("its kernels need a GPU of capability 9.0")
    if problem.spec.dtype != torch.bfloat16:
        raise UnavailableError("its kernels need bfloat16")
    if len(problem.weight) % classes:
        raise UnavailableError(f"it needs V to be a multiple of {classes}, got {len(problem.weight):,}")
    if len(problem.h) % rows:
        raise UnavailableError(f"it needs N to be a multiple of {rows}, got {len(problem.h):,}")


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
        if 512 <= rows <= 8192 and rows * len(problem.weight) < INDEX_LIMIT:
            budgets.setdefault(rows, budget)
    runs = ((f"chunks of {rows:,} rows", differentiate(liger_loss(b), problem)) for rows, b in budgets.items())
    return fastest(runs, "cuda")


def liger_cute(problem: Problem) -> tuple[Run, str]:
    """Build Liger's Hopper kernels for the mean loss; they hold all logits in bf16."""
    needs_hopper(problem, classes=256, rows=128)
    from liger_kernel.ops.cutedsl.ops import (  # type: ignore[import-not-found, unused-ignore]
        fused_linear_cross_entropy_sm90 as kernels,
    )

    def loss(h: Tensor, weight: Tensor, targets: Tensor, _: Tensor | None) -> Tensor:
        value: Tensor = kernels.liger_fused_linear_cross_entropy_sm90(h, weight, targets)
        return value

    return differentiate(loss, problem), "holds all logits"


def liger_token(problem: Problem) -> tuple[Run, str]:
    """Build Liger's Hopper kernels for the loss of each token, whose mean torch takes."""
    needs_hopper(problem, classes=1, rows=1)
    from liger_kernel.ops.cutedsl.ops import (  # type: ignore[import-not-found, unused-ignore]
        fused_scaled_cross_entropy_sm90 as kernels,
    )

    def loss(h: Tensor, weight: Tensor, targets: Tensor, _: Tensor | None) -> Tensor:
        value: Tensor = kernels.LigerFusedScaledCrossEntropySM90Function.apply(h, weight, targets).mean()
        return value

    return differentiate(loss, problem), "dW summed in bf16"


QUACK_CHUNK = 4_096
"""The rows of a chunk by QuACK's default."""


def quack_chunks(problem: Problem) -> list[int]:
    """Return the chunks to try."""
    n, classes = len(problem.h), len(problem.weight)
    found = sorted({min(rows, -(-n // 128) * 128) for rows in (1_024, 2_048, QUACK_CHUNK, 8_192, 16_384)})
    return [rows for rows in found if rows * classes < INDEX_LIMIT]


def quack(problem: Problem) -> tuple[Run, str]:
    """Build QuACK's loss with its defaults: its fused pipeline where V is a multiple of 128."""
    needs_hopper(problem, classes=128, rows=8)
    if QUACK_CHUNK * len(problem.weight) >= INDEX_LIMIT:
        raise UnavailableError("its chunks of 4,096 rows have too many logits for its 32-bit offsets")
    return differentiate(quack_loss(QUACK_CHUNK), problem), f"chunks of {QUACK_CHUNK:,} rows"


def quack_loss(chunk: int) -> Loss:
    from quack.linear_cross_entropy import (  # type: ignore[import-not-found, unused-ignore]
        chunked_linear_cross_entropy,
    )

    def loss(h: Tensor, weight: Tensor, targets: Tensor, _: Tensor | None) -> Tensor:
        value: Tensor = chunked_linear_cross_entropy(h, weight, targets, chunk_size=chunk)
        return value

    return loss


def quack_tuned(problem: Problem) -> tuple[Run, str]:
    needs_hopper(problem, classes=128, rows=8)
    runs = ((f"chunks of {rows:,} rows", differentiate(quack_loss(rows), problem)) for rows in quack_chunks(problem))
    return fastest(runs, "cuda")


def quack_fp32(problem: Problem) -> tuple[Run, str]:
    """Build QuACK's inner function, which returns dW in fp32, in which it is summed; no weight is converted."""
    needs_hopper(problem, classes=128, rows=8)
    from quack.linear_cross_entropy import (  # type: ignore[import-not-found, unused-ignore]
        scaled_exp_linear_cross_entropy_fwd as forward,
    )

    h, weight, n = problem.h.detach(), problem.weight.detach(), problem.spec.n
    scale = torch.full((), 1 / n, device=h.device)

    def run_of(rows: int) -> Run:
        def run() -> Gradients:
            with torch.no_grad():
                losses, dh, dw = forward(h, weight, problem.targets, rows, grad_scale=scale)
                return losses[:n].mean(), dh[:n], dw

        return run

    run, note = fastest(((f"chunks of {rows:,} rows", run_of(rows)) for rows in quack_chunks(problem)), "cuda")
    return run, f"gradient of W in fp32, {note}, no backward pass"


def cut_cross_entropy(**options: Any) -> Build:
    """Return the build of Cut Cross-Entropy; by default it leaves out small gradients."""

    def build(problem: Problem) -> tuple[Run, str]:
        needs_cuda(problem)
        from cut_cross_entropy import linear_cross_entropy  # type: ignore[import-not-found, unused-ignore]

        def loss(h: Tensor, weight: Tensor, targets: Tensor, _: Tensor | None) -> Tensor:
            value: Tensor = linear_cross_entropy(h, weight, targets, **options)
            return value

        return differentiate(loss, problem), "all gradients" if options else "leaves out small gradients"

    return build


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
        wide = problem.padded
        run, note = contender.build(wide if how == "bias of -inf" else replace(wide, bias=None))
        return (
            run,
            f"{note}; W padded to {len(wide.weight):,} rows" if note else f"W padded to {len(wide.weight):,} rows",
        )

    kind = contender.kind if contender.kind in ("approximate", "baseline") else "padded"
    return replace(contender, name=f"{contender.name}, padded ({how})", kind=kind, build=build)


LIGER = Contender("Liger, Triton", "peer", liger)
LIGER_TUNED = Contender("Liger, Triton, best chunk", "tuned", liger_tuned)
LIGER_CUTE = Contender("Liger, CuTe DSL", "peer", liger_cute)
LIGER_TOKEN = Contender("Liger, CuTe DSL, by token", "peer", liger_token)
QUACK = Contender("QuACK", "peer", quack)
QUACK_TUNED = Contender("QuACK, best chunk", "tuned", quack_tuned)
QUACK_FP32 = Contender("QuACK, dW in fp32", "tuned", quack_fp32, fp32_gradient=True)
CUT = Contender("Cut Cross-Entropy", "approximate", cut_cross_entropy())
CUT_EXACT = Contender("Cut Cross-Entropy, filter off", "tuned", cut_cross_entropy(filter_eps=None))
TORCH_LCE = Contender("F.linear_cross_entropy", "peer", torch_default)
TORCH_LCE_TUNED = Contender("F.linear_cross_entropy, best chunk", "tuned", torch_tuned)

CUTE = [LIGER_CUTE, QUACK, QUACK_TUNED, QUACK_FP32, LIGER_TOKEN]
PEERS = [*CUTE, LIGER, LIGER_TUNED, CUT, CUT_EXACT, TORCH_LCE, TORCH_LCE_TUNED]
PADDED = [
    *(padded(contender, "zero rows") for contender in (*CUTE[:-1], LIGER, LIGER_TUNED, CUT)),
    *(padded(contender, "bias of -inf") for contender in (*TORCH, TORCH_LCE, TORCH_LCE_TUNED)),
]

_H200, _H100 = "on an H200", "on an H100"
PUBLISHED: dict[tuple[str, str], tuple[float, str]] = {
    ("D1", LIGER_CUTE.name): (4.78, _H200),
    ("D", LIGER_CUTE.name): (16.7, _H200),
    ("D16", LIGER_CUTE.name): (73.7, _H200),
    ("D1", LIGER.name): (138.0, _H200),
    ("D", LIGER.name): (143.0, _H200),
    ("D16", LIGER.name): (186.0, _H200),
    ("D1", QUACK.name): (4.11, _H200),
    ("D", QUACK.name): (16.8, _H200),
    ("D16", QUACK.name): (73.7, _H200),
    ("E", LIGER.name): (321.0, _H100),
    ("E", CUT.name): (92.6, _H100),
}
"""Milliseconds that others published, by shape and contender: shown, marked so, where a contender does not run."""
