"""Compile the cache's kernels for an H100 or H200, without one; run where Triton is not interpreted."""

from __future__ import annotations

import re
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from hebbian_softmax.memory import gpu

TILES = dict(zip(("ROWS", "KEYS", "FEATURES"), gpu.Tile(), strict=True))


def signature_of(name: str) -> str:
    if name.endswith("_desc"):
        rows = TILES["ROWS" if name == "query_desc" else "KEYS"]
        return f"tensordesc<bf16[{rows}, {TILES['FEATURES']}]>"
    if name in ("target_ptr", "label_ptr"):
        return "*i64"
    return "*fp32" if name.endswith("_ptr") else "fp32" if name == "theta" else "i32"


def compile_for_hopper(kernel: Any, constants: dict[str, int], **options: int) -> Any:
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else signature_of(name) for name in names}
    places = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel, signature, constexprs=places)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def check_products_are_waited_for(code: str) -> None:
    """Check that an unfinished product goes into the next one or is waited for; nothing else may read it."""
    under_way = re.findall(r"%(\w+):\d+ = ttng\.warp_group_dot_wait .*pendings = 1 ", code)
    assert under_way, "no product overlaps with the next load"
    for name in under_way:
        for line in code.splitlines():
            if f"%{name}#0" in line:
                assert "warp_group_dot_wait" in line or "arith.select" in line, line.strip()


def main() -> None:
    compiled = compile_for_hopper(gpu.band, TILES, num_warps=8, num_stages=3)
    assert compiled.metadata.shared <= gpu.SHARED_MEMORY, compiled.metadata.shared
    check_products_are_waited_for(compiled.asm["ttgir"])
    compile_for_hopper(gpu.join, {"BLOCK": 256})


if __name__ == "__main__":
    main()
