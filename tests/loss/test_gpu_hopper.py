"""The kernels for H100 and H200 GPUs against float64, for sizes that fit no tile."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from hebbian_softmax.loss.gpu.schedule import PADDING, TILE_ROWS, padded
from hebbian_softmax.loss.problem import Problem

pytest.importorskip("triton", reason="the kernels need Triton")
hopper = pytest.importorskip("hebbian_softmax.loss.gpu.hopper", exc_type=ImportError)
scores = pytest.importorskip("hebbian_softmax.loss.gpu.scores", exc_type=ImportError)
on_hopper = pytest.mark.skipif(
    not (torch.cuda.is_available() and hopper.runs_on(torch.device("cuda", 0))),
    reason="needs an H100 or H200, and a version of Triton in which the kernels were tried",
)
WIDTHS = 8, 64, 72, 512, 576, 584, 1024, 2056
"""Numbers of features: up to 576 one kernel is used, beyond that the other one."""
SIZES = (1, 1), (2, 300), (127, 128), (128, 129), (129, 255), (300, 5000), (1500, 700), (4000, 3333), (40_000, 100)
"""In the last one each 128 rows have one tile, and a program has several of them."""
PRODUCTS = (128, 64, 256), (128, 320, 256), (256, 1024, 512), (640, 5056, 4096), (1408, 704, 1280)
"""Rows, columns of E and features."""
OPTIONS = (), ("bias",), ("prior",), ("scale",), ("bias", "prior", "scale")


def make(n: int, d: int, v: int, options: tuple[str, ...]) -> Problem:
    h, w = torch.randn(n, d), torch.randn(v, d) / d**0.5
    target = torch.randint(v, (n,))
    target[::5] = -1
    prior = None
    if "prior" in options:
        prior = torch.randn(v, device="cuda")
        prior[v // 2 : v // 2 + v // 4] = -torch.inf
    bias = torch.randn(v, device="cuda").bfloat16() if "bias" in options else None
    scale = 0.7 if "scale" in options else 1.0
    return Problem(h.cuda().bfloat16(), w.cuda().bfloat16(), bias, target.cuda(), prior, scale)


def exact(problem: Problem, shift: Tensor, rows: slice, classes: slice) -> Tensor:
    """Return E in float64: 0 at the targets and in ignored rows."""
    z = problem.input[rows].double() @ problem.weight[classes].double().T
    if problem.bias is not None:
        z += problem.bias[classes].double()
    z *= problem.scale
    if problem.prior is not None:
        z += problem.prior[classes].double()
    e = torch.exp(z - shift[rows].double()[:, None] * torch.log(torch.tensor(2.0, dtype=torch.float64)).item())
    column = torch.arange(classes.start, classes.stop, device=z.device)
    return e.masked_fill(problem.target[rows][:, None] == column, 0)


def compute(
    problem: Problem, shift: Tensor, rows: slice, classes: slice, store: bool = True
) -> tuple[Tensor | None, Tensor]:
    """Return E, padded as the engine has it, and the sum of each row."""
    n, v = rows.stop - rows.start, classes.stop - classes.start
    e = torch.full((padded(n, TILE_ROWS), padded(v, PADDING)), torch.nan, device="cuda", dtype=torch.bfloat16)
    partial = scores.room_for_sums(problem, n, v).fill_(torch.nan)
    parts = hopper.launch_scores(problem, rows, classes, shift, partial, e if store else None)
    return (e if store else None), partial[: parts * n].view(parts, n).sum(0)


def shift_of(problem: Problem) -> Tensor:
    return torch.where(problem.target < 0, torch.inf, torch.randn(len(problem.target), device="cuda"))


def check(problem: Problem, rows: slice, classes: slice) -> None:
    shift = shift_of(problem)
    true = exact(problem, shift, rows, classes)
    for store in (True, False):
        e, sums = compute(problem, shift, rows, classes, store)
        torch.testing.assert_close(sums.double(), true.sum(1), rtol=1e-5, atol=1e-30)
        if e is not None:
            n, v = true.shape
            torch.testing.assert_close(e[:n, :v].double(), true, rtol=2**-8, atol=1e-37)
            assert (e[n:] == 0).all()
            assert (e[:, v:] == 0).all()


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("d", WIDTHS)
def test_plain(d: int, size: tuple[int, int]) -> None:
    problem = make(size[0], d, size[1], ())
    check(problem, slice(0, size[0]), slice(0, size[1]))


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("options", OPTIONS[1:], ids="-".join)
@pytest.mark.parametrize("d", [72, 576, 1024])
def test_options(d: int, options: tuple[str, ...]) -> None:
    check(make(300, d, 3001, options), slice(0, 300), slice(0, 3001))


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("options", [OPTIONS[0], OPTIONS[-1]], ids=["plain", "options"])
@pytest.mark.parametrize("d", [512, 1024])
def test_parts(d: int, options: tuple[str, ...]) -> None:
    problem = make(700, d, 3001, options)
    check(problem, slice(256, 512), slice(512, 1536))
    check(problem, slice(640, 700), slice(1536, 3001))


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("d", [64, 512, 1024, 4096])
def test_always_the_same(d: int) -> None:
    """A missing barrier would show as a different result in some of many runs, with many tiles for each processor."""
    n, v = 1408, 20_011
    problem = make(n, d, v, ())
    shift = shift_of(problem)
    e, sums = compute(problem, shift, slice(0, n), slice(0, v))
    assert e is not None
    for _ in range(40):
        again, same = compute(problem, shift, slice(0, n), slice(0, v))
        assert again is not None
        assert torch.equal(e, again)
        assert torch.equal(sums, same)


@pytest.mark.parametrize("classes", [1, 127, 129, 5000, 267_735])
@pytest.mark.parametrize("rows", [1, 128, 300, 1408, 4096, 5120, 20_000])
def test_division_among_programs(rows: int, classes: int) -> None:
    """Every program has a tile, the programs with tiles of 128 rows are as many as said, and the sums have room."""
    processors = 132
    programs, runs = hopper.divided(rows, classes, processors)
    blocks, columns = -(-rows // 128), -(-classes // 128)
    tiles = blocks * columns
    begins = [program * tiles // programs for program in range(programs + 1)]
    assert all(begin < end for begin, end in pairwise(begins))
    assert programs == tiles or 0.94 * processors <= programs <= processors
    for row in range(blocks):
        some = [p for p in range(programs) if begins[p] < (row + 1) * columns and begins[p + 1] > row * columns]
        assert some == list(range(some[0], some[-1] + 1))
        assert some[0] == ((row * columns + 1) * programs - 1) // tiles  # as the kernel computes it
        assert len(some) <= runs
    assert 2 * runs * rows <= 2 * TILE_ROWS * (processors + 2 * blocks)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("size", PRODUCTS, ids=str)
def test_the_product_of_the_weight(size: tuple[int, int, int]) -> None:
    rows, width, d = size
    e, h = torch.rand(rows, width, device="cuda").bfloat16(), torch.randn(rows, d, device="cuda").bfloat16()
    classes = width - 5
    exact = e[:, :classes].double().T @ h.double()
    found = []
    for _ in range(5):
        out = torch.full((classes + 1, d), torch.nan, device="cuda")
        hopper.launch_product(out[:classes], e, h)
        assert out[classes].isnan().all()  # what follows is left alone
        found.append(out[:classes])
    bound = (e[:, :classes].double().T @ h.double().abs()) * 2**-20 + 1e-6  # sums are in float32
    assert ((found[0].double() - exact).abs() <= bound).all()
    assert all(torch.equal(each, found[0]) for each in found)


def test_which_products_are_ours() -> None:
    for shape, dtype, first in (
        ((10, 4096), torch.float32, False),
        ((10, 4096), torch.bfloat16, True),
        ((10, 2048), torch.float32, True),
        ((10, 4104), torch.float32, True),
        ((10, 4096), torch.float32, True),  # not on a CPU
    ):
        assert not hopper.stores_faster(torch.empty(shape, dtype=dtype), first)
