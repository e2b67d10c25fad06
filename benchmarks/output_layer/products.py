"""Plain matrix products, which take turns with the losses: rates are shown as shares of the best of them."""

from __future__ import annotations

import torch

from benchmarks.output_layer.contenders import Contender, Run
from benchmarks.output_layer.problems import Problem, Spec

CHUNK_BYTES = 2**31


def side_of(spec: Spec) -> int:
    """Return the side of the square product: 8,192, or less so that it takes no longer than the problem."""
    return min(8_192, max(64, int((spec.flops / 2) ** (1 / 3)) // 64 * 64))


def square_operations(spec: Spec) -> int:
    """Return the operations of one run: as many products as make it as long as the problem's three."""
    once = 2 * side_of(spec) ** 3
    return max(1, round(spec.flops / once)) * once


@torch.no_grad()
def square(problem: Problem) -> tuple[Run, str]:
    spec = problem.spec
    side = side_of(spec)
    a, b = (torch.randn(side, side, device=problem.h.device, dtype=spec.dtype) for _ in range(2))
    out = torch.empty_like(a)
    count = square_operations(spec) // (2 * side**3)

    def run() -> None:
        with torch.no_grad():
            for _ in range(count):
                torch.mm(a, b, out=out)

    return run, f"{count} of {side:,} x {side:,} x {side:,}"


@torch.no_grad()
def three(problem: Problem) -> tuple[Run, str]:
    """Build the three products of the problem itself, in chunks of rows, with the classes padded."""
    spec, h = problem.spec, problem.h.detach()
    wide = problem.padded if spec.classes % 64 else problem
    weight = wide.weight.detach()
    rows = max(1, min(spec.n, CHUNK_BYTES // (h.element_size() * len(weight))))
    e = torch.randn(rows, len(weight), device=h.device, dtype=spec.dtype)
    logits, dh, dw = torch.empty_like(e), torch.empty_like(h), torch.empty_like(weight)

    def run() -> None:
        with torch.no_grad():
            for start in range(0, spec.n, rows):
                part = h[start : start + rows]
                some = e[: len(part)]
                torch.mm(part, weight.T, out=logits[: len(part)])
                torch.mm(some, weight, out=dh[start : start + rows])
                torch.mm(some.T, part, out=dw)

    return run, f"chunks of {rows:,} rows"


PRODUCTS = [
    Contender("product, square", "product", square, operations=square_operations),
    Contender("product, the problem's three", "product", three),
]
