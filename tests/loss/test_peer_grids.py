"""The cases on which the tests of Cut Cross-Entropy and of Liger-Kernel try their losses, by our rule for tolerances.

Shapes, dtypes and options are those of their grids. On a CPU every eleventh case is part of the default suite, and the
rest is marked ``slow``; long batches are cut there. On a GPU all of them run.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.closeness import assert_as_close
from tests.heads import early_head
from tests.loss.cases import ENGINES, Case, assert_no_worse_than_eager, eager, ours

EVERY = 11
"""A prime, so that a stride over a product of short lists meets all values of each."""
SLOW_ON_CPU = (8, 128, 1024, 4096)
REDUCTIONS = ("mean", "sum", "none")


def on_every_engine(grid: Iterable[tuple[Any, ...]]) -> list[Any]:
    """Return each case of a grid, whose last entry is a dtype, for every engine that takes the dtype."""
    found = []
    for number, case in enumerate(grid):
        for impl, device, marks in ENGINES:
            if impl != "triton" or case[-1] == torch.bfloat16:
                rest = pytest.mark.slow if device == "cpu" and (number % EVERY or case[0] == SLOW_ON_CPU) else ()
                found.append(pytest.param(impl, device, *case, marks=marks or rest))
    return found


CUT_SHAPES = [(256, 512, 128), (252, 507, 128), (252, 507, 123)]
CUT_TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 1e-2}
CUT = list(itertools.product(CUT_SHAPES, [False, True], [False, True], [None, 20.0], REDUCTIONS, CUT_TOLERANCE))


@pytest.mark.parametrize(
    ("impl", "device", "shape", "bias", "invalid", "softcap", "reduction", "dtype"), on_every_engine(CUT), ids=str
)
def test_cut_cross_entropy(impl, device, shape, bias, invalid, softcap, reduction, dtype) -> None:
    """Rows of W that equal activations, so that some classes stand out; a fifth of the targets is ignored."""
    case = cut_case(shape, bias, invalid, dtype, device)
    if impl == "triton" and shape[2] % 8:
        pytest.skip("The kernels need a number of features divisible by 8.")
    assert_no_worse_than_eager(case, impl, reduction=reduction, softcap=softcap)


def cut_case(shape: tuple[int, int, int], bias: bool, invalid: bool, dtype: torch.dtype, device: str) -> Case:
    n, v, d = shape
    h, w, y = torch.randn(n, d) / d**0.5, torch.randn(v, d), torch.randint(v, (n,))
    w[: min(n, v) // 2] = h[: min(n, v) // 2]
    if invalid:
        y[torch.randperm(n)[: n // 5]] = -100
    b = (0.02 * torch.randn(v)).to(device, dtype).requires_grad_() if bias else None
    return Case(*(each.to(device, dtype).requires_grad_() for each in (h, w)), y.to(device), b)


CUT_FORWARD = list(itertools.product(CUT_SHAPES, [False, True], [False, True], [None, 20.0], [0, 2], CUT_TOLERANCE))


@pytest.mark.parametrize(
    ("impl", "device", "shape", "bias", "invalid", "softcap", "shift", "dtype"), on_every_engine(CUT_FORWARD), ids=str
)
def test_cut_cross_entropy_forward(impl, device, shape, bias, invalid, softcap, shift, dtype) -> None:
    """The loss of every token by their own rule: its error exceeds that of eager torch by their tolerance at most."""
    case = cut_case(shape, bias, invalid, dtype, device)
    if impl == "triton" and shape[2] % 8:
        pytest.skip("The kernels need a number of features divisible by 8.")
    length = shape[0] // 4
    h = case.input.view(4, length, -1)[:, : length - shift].flatten(0, 1)
    case = replace(case, input=h, target=case.target.view(4, length)[:, shift:].flatten())
    exact, usual = (eager(each, reduction="none", softcap=softcap) for each in (case.to(torch.float64), case))
    for how in (impl, "reference"):
        found = ours(case, impl=how, reduction="none", softcap=softcap)
        assert found.dtype == torch.float32
        assert ((found - exact).abs() <= (usual - exact).abs() + CUT_TOLERANCE[dtype]).all()


@pytest.mark.parametrize("shift", [0, 1, 2])
@pytest.mark.parametrize("invalid", [False, True])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_shifted_sequences(device, invalid, shift) -> None:
    """In their four streams of a batch, a position predicts the one after it, so h and y are views with gaps."""
    case = cut_case((252, 507, 128), True, invalid, torch.float32, device)
    exact = case.to(torch.float64)
    results = []
    for each in (case, exact):
        h, y = each.input.view(4, 63, 128)[:, : 63 - shift], each.target.view(4, 63)[:, shift:]
        logits = F.linear(h, each.linear_weight, each.linear_bias)
        results.append(F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="none").view_as(y))
        if each is case:
            head = early_head(128, 507, gamma=0.1, limit=5, bias=True, device=device)
            with torch.no_grad():
                head.weight.copy_(case.linear_weight)
                head.bias.copy_(case.linear_bias)
            found = head.loss(h, y, reduction="none", remember=False)
    assert_as_close(found, *results)
    gradients = [
        torch.autograd.grad(loss.sum(), [each.input, weight])
        for loss, each, weight in (
            (found, case, head.weight),
            (results[0], case, case.linear_weight),
            (results[1], exact, exact.linear_weight),
        )
    ]
    for values in zip(*gradients, strict=True):
        assert_as_close(*values)


@pytest.mark.parametrize("wanted", [(True, False, True), (False, True, False), (False, False, True)], ids=str)
@pytest.mark.parametrize(
    ("impl", "device"), [pytest.param(impl, device, marks=marks) for impl, device, marks in ENGINES]
)
def test_gradients_of_some_operands(impl, device, wanted) -> None:
    """In three of their combinations, a gradient exists where it was asked for, and nowhere else."""
    case = cut_case((256, 512, 128), True, False, torch.bfloat16, device)
    for each, needed in zip(case.operands(), wanted, strict=True):
        each.requires_grad_(needed)
    ours(case, impl=impl).backward()
    assert tuple(each.grad is not None for each in case.operands()) == wanted


LIGER = [
    (shape, bias, scale, *options, dtype)
    for shape, bias, scale, options, dtype in itertools.product(
        [(2, 4, 512, 512), (8, 128, 1024, 4096), (4, 47, 31, 123), (3, 423, 64, 3200)],
        [False, True],
        [0.1, 1.0],
        # Of the ignored targets, label smoothing, z-loss, softcap, class weights, reduction.
        [
            (None, 0.0, 0.0, None, False, "mean"),
            (2, 0.0, 0.0, None, False, "sum"),
            (-123, 0.0, 1e-4, 30.0, True, "mean"),
            (1, 0.1, 1e-4, None, False, "mean"),
            (-300, 0.2, 0.0, 30.0, True, "sum"),
            (42, 0.1, 1e-4, 30.0, True, "none"),
        ],
        [torch.float32, torch.bfloat16],
    )
    if dtype == torch.float32 or scale == 0.1
]
"""In bfloat16 only the small activations: with W in [0, 1] the others have logits in the hundreds, and eager torch
rounds them to whole numbers, so there is nothing to compare with."""


@pytest.mark.parametrize(
    (
        "impl",
        "device",
        "shape",
        "bias",
        "scale",
        "ignored",
        "smoothing",
        "z_loss",
        "softcap",
        "weighted",
        "reduction",
        "dtype",
    ),
    on_every_engine(LIGER),
    ids=str,
)
def test_liger(
    impl, device, shape, bias, scale, ignored, smoothing, z_loss, softcap, weighted, reduction, dtype
) -> None:
    """All of W and of the bias is in [0, 1], and up to half of the targets is ignored."""
    b, t, d, v = shape
    if impl == "triton" and d % 8:
        pytest.skip("The kernels need a number of features divisible by 8.")
    if device == "cpu" and b * t * v >= 2**20:
        b = 1
    y = torch.randint(v, (b * t,))
    if ignored is not None:
        y[torch.randperm(b * t)[: int(torch.randint(1, b * t // 2, ()))]] = ignored
    case = Case(
        (scale * torch.randn(b * t, d)).to(device, dtype).requires_grad_(),
        torch.rand(v, d).to(device, dtype).requires_grad_(),
        y.to(device),
        torch.rand(v).to(device, dtype).requires_grad_() if bias else None,
        torch.rand(v).to(device, dtype) if weighted else None,
    )
    options = {"ignore_index": -100 if ignored is None else ignored, "label_smoothing": smoothing}
    options |= {"z_loss": z_loss, "softcap": softcap}
    impl = "auto" if impl == "triton" and smoothing and softcap is not None else impl
    assert_no_worse_than_eager(case, impl, reduction=reduction, **options)


@pytest.mark.parametrize("target", [-1, 123, 10**6])
@pytest.mark.parametrize("impl", ["auto", "reference", "chunked"])
def test_a_target_out_of_bounds(impl: str, target: int) -> None:
    """On a GPU such a target ends the process' use of the device, as in torch."""
    case = cut_case((8, 123, 31), False, False, torch.float32, "cpu")
    case.target[5] = target
    with pytest.raises(IndexError, match=str(target)):
        ours(case, impl=impl)


@pytest.mark.parametrize(
    ("impl", "device"), [pytest.param(impl, device, marks=marks) for impl, device, marks in ENGINES]
)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_every_target_ignored(impl, device, reduction) -> None:
    case = cut_case((8, 123, 32), True, False, torch.bfloat16, device)
    case.target.fill_(-100)
    loss = ours(case, impl=impl, reduction=reduction)
    assert loss.isnan() if reduction == "mean" else not loss.any()
    assert not any(each.any() for each in torch.autograd.grad(loss.sum(), case.operands()))


@pytest.mark.parametrize("factor", [3.0, 1e-3, 0.0, math.inf])
@pytest.mark.parametrize(
    ("impl", "device"), [pytest.param(impl, device, marks=marks) for impl, device, marks in ENGINES]
)
def test_the_loss_is_not_the_last_layer(impl, device, factor) -> None:
    case = cut_case((36, 123, 32), True, True, torch.bfloat16, device)
    case.input = case.input.detach().requires_grad_()
    (once,) = torch.autograd.grad(ours(case, impl=impl, reduction="sum"), case.input)
    (found,) = torch.autograd.grad(ours(case, impl=impl, reduction="sum") * factor, case.input)
    assert_as_close(found, (once.double() * factor).to(once.dtype), once.double() * factor)
