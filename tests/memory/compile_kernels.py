"""Compile the memories' kernels for an H100 or H200, without one; run where Triton is not interpreted."""

from __future__ import annotations

import re
from typing import Any

import torch

from hebbian_softmax.memory.gpu import cache, passes
from hebbian_softmax.memory.history import Timeline
from hebbian_softmax.memory.passes import Moved
from tests.compiling import compile_for_hopper


def check_products_are_waited_for(code: str) -> None:
    """Check that an unfinished product goes into the next one or is waited for; nothing else may read it."""
    under_way = re.findall(r"%(\w+):\d+ = ttng\.warp_group_dot_wait .*pendings = 1 ", code)
    assert under_way, "no product overlaps with the next load"
    for name in under_way:
        for line in code.splitlines():
            if f"%{name}#0" in line:
                assert "warp_group_dot_wait" in line or "arith.select" in line, line.strip()


def check_loads_are_wide(code: str) -> None:
    """Check that logits are read 16 bytes at a time."""
    loads = re.findall(r"ld\.global\S*\.b32", code)
    narrow = [each for each in loads if ".v4." not in each]
    assert len(narrow) < len(loads), f"no load of four numbers among {len(loads)}"
    assert len(narrow) <= 40, f"{len(narrow)} of {len(loads)} loads are of one number"


def main() -> None:
    compiled = compile_for_hopper(cache.SHARED_MEMORY)
    text = torch.randn(1, 300, 128).bfloat16(), torch.zeros(1, 300, dtype=torch.int64)
    cache.log_prob(Timeline(text, text), theta=0.3, size=200, workspace=2**20)
    assert set(compiled) == {"band", "join"}, f"compiled {sorted(set(compiled))}"
    for kernel in kernels_of(cache.band):
        check_products_are_waited_for(kernel.asm["ttgir"])
    indices = torch.zeros(2, 64, dtype=torch.int64)
    for change in (None, torch.zeros(2, 64, 4096)):
        moved = Moved(torch.zeros(5, 4096), indices, indices, change)
        normalisers = passes.log_sum_exp(moved)
        passes.weighted_errors(moved, normalisers, normalisers)
        for dtype in (torch.float32, torch.bfloat16):
            passes.errors(moved, normalisers, dtype)
    for passing in (passes.row_log_sum_exp, passes.row_errors, passes.column_errors):
        for kernel in kernels_of(passing):
            check_loads_are_wide(kernel.asm["ptx"])


def kernels_of(function: Any) -> list[Any]:
    """Return what a function was compiled to."""
    kernels, *_ = function.device_caches[0]
    return list(kernels.values())


if __name__ == "__main__":
    main()
