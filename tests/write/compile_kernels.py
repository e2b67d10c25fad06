"""Compile every kernel for an H100 or H200, without one: run as a program where Triton is not interpreted.

The host code is run on CPU tensors, and each launch compiles its kernel for the arguments it is given.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from hebbian_softmax import Euclidean, HebbianSoftmax, InnerProduct, OnePassAdam, OnePassRMSprop, optim
from hebbian_softmax.write.gpu import device as hardware

POINTERS = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.int16: "*i16",
    torch.uint8: "*u8",
}


SHARED_MEMORY = 99 * 1024
"""What a block may have on the GPUs of people at home (8.6 to 12.0); an H200 has more."""


def signature_of(value: Any) -> str:
    if isinstance(value, Tensor):
        return POINTERS[value.dtype]
    return "fp32" if isinstance(value, float) else "i32" if abs(value) < 2**31 else "i64"


def _is_one(value: Any) -> bool:
    """Triton makes it a constant."""
    return isinstance(value, int) and value == 1


class Compiled:
    """In place of a kernel: a launch compiles it and runs nothing."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return self.launch

    def launch(self, *args: Any, **options: Any) -> None:
        names = self.kernel.arg_names
        given = dict(zip(names, args, strict=False)) | {name: options[name] for name in names if name in options}
        assert given.keys() == set(names), f"{self.kernel.__name__} needs {names}, got {list(given)}"
        constants = {name: value for name, value in given.items() if name in options or _is_one(value)}
        signature = {name: "constexpr" if name in constants else signature_of(given[name]) for name in names}
        places = {(names.index(name),): value for name, value in constants.items()}
        compiled = triton.compile(
            ASTSource(self.kernel, signature, constexprs=places),
            target=GPUTarget("cuda", 90, 32),
            options={name: value for name, value in options.items() if name not in names},
        )
        shared = compiled.metadata.shared
        assert shared <= SHARED_MEMORY, f"{self.kernel.__name__} needs {shared} bytes of shared memory"


def main() -> None:
    kernels = hardware.kernels()
    for name in kernels.__all__:
        setattr(kernels, name, Compiled(getattr(kernels, name)))
    hardware.on_gpu = lambda tensor: True
    optim._LARGE = 1
    h, y = torch.randn(96, 200), torch.arange(96) % 50
    heads: list[dict[str, Any]] = [
        {},
        {
            "objective": InnerProduct(),
            "dtype": torch.bfloat16,
            "rate": lambda c, n: torch.full_like(c, 0.5, dtype=torch.float64),
        },
        {"objective": Euclidean(1.0), "scale": 1.0, "center": False, "dtype": torch.float16},
    ]
    for options in heads:
        head = HebbianSoftmax(200, 50, gamma=0.1, limit=9, **options)
        head.memorize(h.to(head.weight.dtype), y)
        head.memorize(h[:1].to(head.weight.dtype), y[:1])
        for kind, lr in ((OnePassRMSprop, 0.1), (OnePassAdam, torch.tensor(0.1))):
            bias = torch.zeros(5, requires_grad=True)
            optimizer = kind([head.weight, bias], lr=lr, head=head)
            (head.loss(h.to(head.weight.dtype), y) + bias.sum()).backward()
            optimizer.step()
            hardware.any_nonzero(head.weight.grad)
            head._attachment.remove()
    wide = HebbianSoftmax(16_384, 3, gamma=0.1, limit=1)
    wide.memorize(torch.randn(96, 16_384), y % 3)
    lone = HebbianSoftmax(1, 1, gamma=0.1, limit=1)
    lone.memorize(h[:, :1], torch.zeros_like(y))


if __name__ == "__main__":
    main()
