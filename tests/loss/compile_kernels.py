"""Compile the kernels of the loss for an H100 or H200, without one; run where Triton is not interpreted."""

from __future__ import annotations

from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from hebbian_softmax.loss.gpu import ends, rows, sums

POINTERS = {
    "target": "*i64",
    "masked": "*i64",
    "good": "*i32",
    "h": "*bf16",
    "w": "*bf16",
    "e": "*bf16",
    "out": "*bf16",
    "scaled": "*bf16",
    "x": "*bf16",
}
"""The types of arguments that end in ``_ptr``; those not listed are float32."""


def signature_of(name: str, tile: dict[str, tuple[int, int]]) -> str:
    if name.endswith("_ptr"):
        return POINTERS.get(name.removesuffix("_ptr"), "*fp32")
    if name.endswith("_desc"):
        height, width = tile[name]
        return f"tensordesc<bf16[{height}, {width}]>"
    return "i32"


def compile_for_hopper(kernel: Any, constants: dict[str, Any], tile: dict[str, tuple[int, int]], **options: int) -> int:
    """Compile a kernel and return the bytes of shared memory that it needs."""
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else signature_of(name, tile) for name in names}
    places = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel, signature, constexprs=places)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).metadata.shared


def main() -> None:
    no_bias = {"bias_ptr": None, "HAS_BIAS": False, "IEEE": False}
    small = {"h_desc": (64, 64), "w_desc": (128, 64)}
    large = {"h_desc": (128, 64), "w_desc": (256, 64), "e_desc": (128, 256)}
    tiles = {"ROWS": 128, "CLASSES": 256, "FEATURES": 64, "GROUP": 8}
    settled = {"ROWS": 64, "CLASSES": 128, "FEATURES": 64, "TILE": 256, "PART": 64, "COLUMNS": 128}
    needed = [
        compile_for_hopper(rows.scores, no_bias | tiles | {"STORE": True}, large, num_warps=8, num_stages=3),
        compile_for_hopper(rows.scores, tiles | {"STORE": False, "HAS_BIAS": True, "IEEE": False}, large, num_warps=8),
        compile_for_hopper(
            rows.settle, no_bias | settled | {"GRADIENT": True, "SCALE": True}, small, num_warps=8, num_stages=2
        ),
        compile_for_hopper(rows.target_logits, {"bias_ptr": None, "HAS_BIAS": False, "BLOCK": 512}, {}),
        compile_for_hopper(sums.set_targets, {"ROWS": 128}, {}),
        compile_for_hopper(sums.finish_input, {"PARTS": 2, "TAIL": 64, "ROWS": 32, "FEATURES": 128, "IEEE": False}, {}),
        compile_for_hopper(sums.column_sums, {"ROWS": 64, "CLASSES": 128}, {}),
        compile_for_hopper(ends.prepare_kernel, {"MEAN": True, "ZERO_IF_EMPTY": True, "BLOCK": 2048}, {}, num_warps=16),
        compile_for_hopper(ends.multiply_kernel, {"BLOCK": 4096}, {}),
    ]
    assert max(needed) <= 232_448, needed  # A program on a Hopper GPU can have this much.


if __name__ == "__main__":
    main()
