"""Compile the cache's kernels for an H100 or H200, without one; run where Triton is not interpreted."""

from __future__ import annotations

import re

import torch

from hebbian_softmax.memory import gpu
from hebbian_softmax.memory.history import Timeline
from tests.compiling import compile_for_hopper


def check_products_are_waited_for(code: str) -> None:
    """Check that an unfinished product goes into the next one or is waited for; nothing else may read it."""
    under_way = re.findall(r"%(\w+):\d+ = ttng\.warp_group_dot_wait .*pendings = 1 ", code)
    assert under_way, "no product overlaps with the next load"
    for name in under_way:
        for line in code.splitlines():
            if f"%{name}#0" in line:
                assert "warp_group_dot_wait" in line or "arith.select" in line, line.strip()


def main() -> None:
    compiled = compile_for_hopper(gpu.SHARED_MEMORY)
    text = torch.randn(1, 300, 128).bfloat16(), torch.zeros(1, 300, dtype=torch.int64)
    gpu.log_prob(Timeline(text, text), theta=0.3, size=200, workspace=2**20)
    assert set(compiled) == {"band", "join"}, f"compiled {sorted(set(compiled))}"
    kernels, *_ = gpu.band.device_caches[0]
    for kernel in kernels.values():
        check_products_are_waited_for(kernel.asm["ttgir"])


if __name__ == "__main__":
    main()
