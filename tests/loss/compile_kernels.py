"""Compile every kernel of the loss for an H100 or H200, without one; run where Triton is not interpreted.

With ``--options``, the kernels have every option of the loss. With ``--shared``, ranks share the rows of the matrix.
"""

from __future__ import annotations

import sys
from dataclasses import replace

import torch
from torch import Tensor

from hebbian_softmax.loss.gpu import ends, engine, hopper, softmax, whole
from hebbian_softmax.loss.problem import Needs, Problem, Scales
from hebbian_softmax.rows import RowPart
from tests.compiling import compile_for_hopper

KERNELS = {
    "column_sums",
    "finish_input",
    "finish_rows",
    "mean_loss",
    "multiply_kernel",
    "prepare_kernel",
    "product",
    "resident",
    "row_gradient",
    "row_sums",
    "row_terms",
    "scores",
    "set_targets",
    "settle",
    "streamed",
    "target_logits",
}


class Unexchanged(RowPart):
    """A part of the rows without other ranks."""

    def sum_(self, tensor: Tensor) -> Tensor:
        return tensor

    def max_(self, tensor: Tensor) -> Tensor:
        return tensor


def main() -> None:
    compiled = compile_for_hopper(max(engine.SHARED_MEMORY, hopper.SHARED_MEMORY))
    with torch.device("meta"):  # A CPU has no products of bfloat16 matrices that are summed in float32.
        h, w, bias = (torch.empty(size, dtype=torch.bfloat16) for size in ((130, 72), (301, 72), 301))
        target, scale = torch.empty(130, dtype=torch.int64), torch.empty(130)
        problem, needs = Problem(h, w, bias, target), Needs(torch.bfloat16, torch.float32, torch.float32)
        square = None
        if "--options" in sys.argv:
            problem, square = Problem(h, w, bias, target, torch.empty(301), 0.5, 30.0), scale
        if "--shared" in sys.argv:
            problem = replace(problem, part=Unexchanged(None, start=301, rows=301, total=903, largest=301))
        terms, _ = engine.row_terms_and_gradients(problem, Scales(scale, scale, square=square), needs, 10**9)
        engine.gradients(problem, terms, Scales(scale, scale), needs, 10**9)
        entropy, rows, scales = replace(terms, entropy=scale), slice(0, 130), Scales(scale, scale, square=square)
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            z = torch.empty(130, 320, dtype=dtype)[:, :301]
            softmax.settle(problem, z, rows, entropy, dtype != torch.float32)
            softmax.settle(problem, z, rows, terms, dtype != torch.float32, scales)
            softmax.differentiate(problem, z, rows, slice(0, 301), terms, scales)
            softmax.differentiate(problem, z, rows, slice(0, 301), entropy, Scales(scale, scale, entropy=scale))
        for d in (72, 576, 640):  # 576 needs the most shared memory
            wide = replace(problem, input=torch.empty(130, d, dtype=h.dtype), weight=torch.empty(301, d, dtype=h.dtype))
            for e in (None, torch.empty(256, 320, dtype=h.dtype)):
                hopper.launch_scores(wide, rows, slice(0, 301), scale, torch.empty(30 * 130), e)
        hopper.launch_product(
            torch.empty(301, 4096), torch.empty(256, 320, dtype=h.dtype), torch.empty(256, 4096, dtype=h.dtype)
        )
        ends.prepare(target, 301, -100, mean=True, zero_if_empty=True)
        ends.multiply([h, w], scale[0])
        for dtype in (torch.bfloat16, torch.float16):
            operands = [torch.empty(size, dtype=dtype, requires_grad=True) for size in ((130, 72), (301, 72))]
            for _ in range(2):  # The second launch calls the compiled kernel directly.
                whole.WholeCrossEntropy.apply(*operands, target, -100).backward()
    assert set(compiled) == KERNELS, f"compiled {sorted(set(compiled))}"


if __name__ == "__main__":
    main()
