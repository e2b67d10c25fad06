"""Loss and gradients over every option and under autocast, with the rule of cases.py: no worse than eager torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.closeness import assert_as_close
from tests.loss.cases import (
    DTYPES,
    Case,
    assert_no_worse,
    assert_no_worse_than_eager,
    compared,
    eager,
    error,
    every_engine,
    every_engine_in,
    make,
    ours,
    with_gradients,
)

SIZES = [(1, 8, 2), (1, 16, 211), (13, 8, 97), (64, 24, 64), (33, 40, 1009), (130, 8, 4099)]
WORKSPACES = [None, 100_000, 9_000, 1]
"""In turn: one tile, a few tiles, a split vocabulary, and the smallest tiles there are."""


@every_engine_in(*DTYPES)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_sizes(impl, device, dtype, reduction, size) -> None:
    assert_no_worse_than_eager(make(*size, device=device, dtype=dtype), impl, reduction=reduction)


@every_engine_in(*DTYPES, slow=(torch.float16,))
@pytest.mark.parametrize("workspace", WORKSPACES)
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_options(impl, device, dtype, workspace, smoothing, bias, weighted, reduction) -> None:
    case = make(37, 16, 211, device=device, dtype=dtype, bias=bias, weighted=weighted, ignored=0.3)
    assert_no_worse_than_eager(case, impl, workspace, label_smoothing=smoothing, reduction=reduction)


@every_engine
@pytest.mark.parametrize("ignore_index", [-1, 5, 10**6])
def test_ignore_index_may_be_any_number(impl, device, ignore_index) -> None:
    case = make(40, 16, 11, device=device, dtype=torch.bfloat16, bias=True)
    case.target[::3] = ignore_index
    for reduction in ("mean", "none"):
        assert_no_worse_than_eager(case, impl, ignore_index=ignore_index, reduction=reduction)


@every_engine_in(torch.float32, torch.bfloat16)
def test_one_row_without_a_batch(impl, device, dtype) -> None:
    case = make(1, 16, 211, device=device, dtype=dtype)
    row = Case(case.input.detach()[0].requires_grad_(), case.linear_weight, case.target[0])
    for reduction in ("mean", "sum", "none"):
        loss = ours(row, impl=impl, reduction=reduction)
        assert loss.shape == ()
        assert torch.autograd.grad(loss, row.input)[0].shape == (16,)
        assert_as_close(loss, ours(case, impl=impl, reduction="sum"), eager(case.to(torch.float64), reduction="sum"))


@every_engine
def test_targets_of_a_narrow_dtype(impl, device) -> None:
    case = make(9, 16, 50, device=device, dtype=torch.bfloat16)
    expected = ours(case, impl=impl)
    case.target = case.target.to(torch.uint8)
    assert torch.equal(ours(case, impl=impl), expected)


@every_engine_in(*DTYPES, slow=(torch.float16, torch.float64))
def test_the_sum_over_many_tiles_does_not_degrade(impl, device, dtype) -> None:
    """All targets are the last class. A bfloat16 sum over 256 tiles would stop growing after the first ones."""
    case = make(512, 16, 211, device=device, dtype=dtype)
    case.target.fill_(210)
    for workspace in (None, 9000, 512):
        assert_no_worse_than_eager(case, impl, workspace)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_reference_is_eager(reduction: str) -> None:
    case = make(13, 5, 29, bias=True, weighted=True, ignored=0.3)
    assert_no_worse_than_eager(case, "reference", reduction=reduction, label_smoothing=0.1)


@every_engine
def test_the_same_input_gives_the_same_bits(impl, device) -> None:
    case = make(70, 16, 999, device=device, dtype=torch.bfloat16, bias=True)
    runs = [torch.autograd.grad(ours(case, impl=impl), case.operands()) for _ in range(2)]
    assert all(torch.equal(*pair) for pair in zip(*runs, strict=True))


@every_engine_in(torch.bfloat16, torch.float16)
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("workspace", [None, 9000])
def test_float32_parameters_under_autocast(impl, device, dtype, reduction, workspace) -> None:
    """Products are in the dtype of autocast, the loss in float32, gradients in the dtype of the parameters."""
    case = make(40, 16, 211, device=device, dtype=torch.float32, bias=True, ignored=0.2)
    upstream = torch.rand(40 if reduction == "none" else (), device=device)
    with torch.autocast(device, dtype):
        results = list(compared(case, impl, workspace, upstream, reduction=reduction))
    for found, plain, exact in results:
        assert found.dtype == torch.float32
        assert_no_worse(found, plain, exact, dtype)


@every_engine
def test_backward_inside_of_autocast_is_backward_outside(impl, device) -> None:
    case = make(40, 16, 211, device=device, dtype=torch.float32)
    for reduction in ("mean", "none"):
        with torch.autocast(device, torch.bfloat16):
            inside = torch.autograd.grad(ours(case, impl=impl, reduction=reduction).sum(), case.operands())
            loss = ours(case, impl=impl, reduction=reduction).sum()
        outside = torch.autograd.grad(loss, case.operands())
        assert all(torch.equal(*pair) for pair in zip(inside, outside, strict=True))


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_class_weights_are_not_rounded_by_autocast(reduction: str) -> None:
    case = make(dtype=torch.float32, weighted=True)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(ours(case, impl="reference", reduction=reduction), eager(case, reduction=reduction))


def test_mixed_dtypes_meet_in_the_products_of_autocast() -> None:
    case = make(dtype=torch.float32)
    case.input = case.input.detach().bfloat16().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        loss = ours(case, impl="chunked")
    _, dh, dw = with_gradients(loss, case)
    assert (dh.dtype, dw.dtype) == (torch.bfloat16, torch.float32)


def test_float64_is_left_alone_by_autocast() -> None:
    case = make()
    expected = ours(case, impl="chunked")
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(ours(case, impl="chunked"), expected)


@pytest.mark.parametrize("impl", ["auto", "reference", "chunked"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_the_loss_is_never_narrower_than_float32(impl, dtype, reduction) -> None:
    for n, v in ((3, 7), (0, 7), (3, 0)):
        case = make(n, 8, max(v, 1), dtype=dtype, bias=True, ignored=float(v == 0))
        if v == 0:
            case.linear_weight, case.linear_bias = case.linear_weight[:0], case.linear_bias[:0]
        assert ours(case, impl=impl, reduction=reduction).dtype == torch.promote_types(dtype, torch.float32)


@every_engine_in(torch.bfloat16, torch.float16)
@pytest.mark.parametrize("workspace", [None, 60_000])
def test_the_logit_of_the_target_is_not_rounded(impl, device, dtype, workspace, monkeypatch) -> None:
    """Its rounding would go into the loss as it is, while those of the other logits mostly cancel."""
    multiply_on_every_cpu(monkeypatch)
    case = make(252, 128, 507, device=device, dtype=dtype, scale=0.5)
    with torch.no_grad():
        exact = eager(case.to(torch.float64), reduction="none")
        found, rounded = ours(case, impl=impl, workspace=workspace, reduction="none"), eager(case, reduction="none")
    assert error(found, exact) < 0.5 * error(rounded, exact)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("workspace", [None, 9_000])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_on_a_cpu_that_multiplies_in_half_precision(dtype, workspace, reduction, monkeypatch) -> None:
    multiply_on_every_cpu(monkeypatch)
    case = make(37, 16, 211, dtype=dtype, bias=True, weighted=True, ignored=0.3)
    assert_no_worse_than_eager(case, "chunked", workspace, label_smoothing=0.1, reduction=reduction)


class ReadsBeyondRows(TorchDispatchMode):
    """Looks at what follows each row of a left operand, up to a multiple of 32 elements, as oneDNN does with AMX."""

    looked, found_numbers = 0, True

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm):
            self.look(args[-2])
        return function(*args, **(kwargs or {}))

    def look(self, left: Tensor) -> None:
        rows, columns = left.shape
        beyond = min(left.stride(0), -(-columns // 32) * 32) - columns
        if left.stride(1) == 1 and left.element_size() == 2 and beyond > 0:
            tail = left.as_strided((rows, beyond), left.stride(), left.storage_offset() + columns)
            self.looked += 1
            self.found_numbers &= bool(tail.isfinite().all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("workspace", [None, 100_000, 9_000])
@pytest.mark.parametrize("size", [(37, 16, 211), (130, 8, 4099)], ids=str)
def test_beyond_a_row_of_logits_are_numbers(size, dtype, workspace, monkeypatch) -> None:
    """On CPUs with AMX a product reads what stands there, and although it counts 0 times, a NaN would stay one."""
    multiply_on_every_cpu(monkeypatch)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    case = make(*size, dtype=dtype)
    torch.use_deterministic_algorithms(True)  # Now torch.empty is full of NaN.
    try:
        with ReadsBeyondRows() as reads:
            gradients = with_gradients(ours(case, impl="chunked", workspace=workspace), case)
    finally:
        torch.use_deterministic_algorithms(False)
    assert reads.looked
    assert reads.found_numbers
    assert all(each.isfinite().all() for each in gradients)


def multiply_on_every_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let torch say that this CPU has instructions for products in half precision, which it emulates otherwise."""
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_fp16_supported", lambda: True)
