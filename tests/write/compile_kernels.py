"""Compile every kernel of the write for an H100 or H200: run as a program where Triton is not interpreted."""

from __future__ import annotations

from typing import Any

import torch

from hebbian_softmax import Euclidean, HebbianSoftmax, InnerProduct
from hebbian_softmax._triton import kernels_on_cpu
from hebbian_softmax.write import any_nonzero
from hebbian_softmax.write.gpu.sort import sort_in_chunks
from tests.compiling import compile_for_hopper
from tests.one_pass import SmallAdam, SmallRMSprop

SHARED_MEMORY = 99 * 1024
"""Bytes that a block may have on consumer GPUs (capability 8.6 to 12.0); an H200 has more."""
KERNELS = {
    "any_nonzero_kernel",
    "find_runs_kernel",
    "inspect_kernel",
    "merge_chunks_kernel",
    "settle_kernel",
    "sort_chunks_kernel",
    "statistics_kernel",
    "step_elements_kernel",
    "step_rows_kernel",
    "sum_blocks_kernel",
    "write_rows_kernel",
}


def launch_everything() -> None:
    h, y = torch.randn(96, 200), torch.arange(96) % 50
    heads: list[dict[str, Any]] = [
        {"start": 1, "fade": True},
        {"start": "auto", "write": "across"},
        {
            "objective": InnerProduct(),
            "dtype": torch.bfloat16,
            "rate": lambda c, n: torch.full_like(c, 0.5, dtype=torch.float64),
        },
        {"objective": Euclidean(1.0), "write": "literal", "dtype": torch.float16},
        {"limit": None},  # with a T that grows
    ]
    for options in heads:
        head = HebbianSoftmax(200, 50, **({"gamma": 0.1, "limit": 9} | options))
        head.memorize(h.to(head.weight.dtype), y)
        head.memorize(h[:1].to(head.weight.dtype), y[:1])
        for kind, lr in ((SmallRMSprop, 0.1), (SmallAdam, torch.tensor(0.1))):
            bias = torch.zeros(5, requires_grad=True)
            optimizer = kind([head.weight, bias], lr=lr, head=head)
            (head.loss(h.to(head.weight.dtype), y) + bias.sum()).backward()
            optimizer.step()
            any_nonzero(head.weight.grad)
            head.attachment.remove()
    wide = HebbianSoftmax(16_384, 3, gamma=0.1, limit=1, write="across")
    wide.memorize(torch.randn(96, 16_384), y % 3)
    lone = HebbianSoftmax(1, 1, gamma=0.1, limit=1)
    lone.memorize(h[:, :1], torch.zeros_like(y))
    for dtype, classes in ((torch.int16, 50), (torch.int32, 2**25)):
        sort_in_chunks(y.to(dtype), classes)


def main() -> None:
    compiled = compile_for_hopper(SHARED_MEMORY)
    with kernels_on_cpu():
        launch_everything()
    assert set(compiled) == KERNELS, f"compiled {sorted(set(compiled))}"


if __name__ == "__main__":
    main()
