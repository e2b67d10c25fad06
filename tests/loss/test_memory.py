"""The promise of ``workspace``: the memory held besides inputs and results does not grow with N or V."""

from __future__ import annotations

import pytest
import torch

from hebbian_softmax import linear_log_prob, linear_topk
from hebbian_softmax.loss.problem import Problem
from hebbian_softmax.loss.tiles import Plan
from tests.loss.cases import Case, make, ours
from tests.on_gpu import no_waiting
from tests.operations import Watch

WORKSPACE = 2_000_000
"""Several times the vectors of N and V numbers, so that these cannot hide an excess."""
D = 16


def held(case: Case, **options: object) -> int:
    """Return the most bytes held besides the gradients in the parameters' dtype and vectors of N and V numbers."""
    n, v = len(case.target), case.linear_weight.shape[0]
    with Watch() as watch:
        ours(case, impl="chunked", workspace=WORKSPACE, **options).sum().backward()
    results = sum(each.nbytes for each in case.operands())
    if case.input.dtype == torch.bfloat16:
        results += 4 * (n + v) * D  # The float32 sums of gradients in half precision are documented.
    return watch.most - results - 8 * 10 * (n + v)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize(("n", "v"), [(100, 200), (6000, 300), (100, 10_000), (1500, 3001)])
def test_the_loss_stays_in_its_workspace(dtype, reduction, n, v) -> None:
    case = make(n, D, v, dtype=dtype, bias=True)
    assert n * v * case.input.element_size() > WORKSPACE or n == 100
    assert held(case, reduction=reduction) <= WORKSPACE


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_no_tensor_is_larger_than_workspace_inputs_or_results(smoothing: float) -> None:
    case = make(700, D, 3001, dtype=torch.float32)
    with Watch() as watch:
        ours(case, impl="chunked", workspace=WORKSPACE, label_smoothing=smoothing).backward()
    assert watch.largest <= max(WORKSPACE, 3001 * D * 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_needs_no_gradient_stays_in_it_too(dtype: torch.dtype) -> None:
    case = make(700, D, 3001, dtype=dtype)
    vectors = 8 * 16 * (700 + 3001)
    with Watch() as terms:
        linear_log_prob(case.input, case.linear_weight, case.target, impl="chunked", workspace=WORKSPACE)
    with Watch() as topk:
        linear_topk(case.input, case.linear_weight, 5, workspace=WORKSPACE)
    assert terms.most <= WORKSPACE + vectors
    assert topk.most <= WORKSPACE + vectors + 700 * 5 * 12


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("n", "v"), [(256, 10_000), (700, 5003), (96, 20_000)])
def test_by_default_it_is_a_fraction_of_what_all_logits_need(dtype: torch.dtype, n: int, v: int) -> None:
    """Here everything counts, including the float32 sum of a gradient."""
    beside = []
    for impl in ("reference", "auto"):
        case = make(n, D, v, dtype=dtype)
        with Watch() as watch:
            ours(case, impl=impl).backward()
        beside.append(watch.most - sum(each.nbytes for each in case.operands()))
    assert beside[0] > n * v * case.input.element_size()  # Eager torch holds all logits, so the measurement works.
    assert beside[1] < 0.36 * beside[0]


@pytest.mark.parametrize("n", [128, 129, 200, 257])
def test_tiles_of_rows_are_cut_evenly(n: int) -> None:
    """The last tile has about as many rows as the others, because products of a few rows are slow."""
    case = make(n, D, 640, dtype=torch.float32)
    problem = Problem.of(case.input, case.linear_weight, None, case.target, torch.float32)
    plan = Plan.of(problem, 128 * 640 * 4)
    tiles = -(-n // 128)
    assert (plan.rows, plan.classes) == (-(-n // tiles), 640)


def test_all_logits_at_once_only_where_they_fit() -> None:
    case = make(64, D, 2003, dtype=torch.float32)
    for workspace, at_once in ((None, True), (3 * 4 * 64 * 2003, True), (200_000, False)):
        with Watch() as watch:
            ours(case, workspace=workspace).backward()
        assert (watch.largest >= 4 * 64 * 2003) == at_once


@pytest.mark.gpu
@pytest.mark.parametrize("impl", ["chunked", "triton"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_on_the_device(impl: str, smoothing: float) -> None:
    peaks = []
    how = {"impl": impl, "workspace": 2**25, "label_smoothing": smoothing}
    for n in (4096, 16384):
        case = make(n, 64, 30_011, device="cuda", dtype=torch.bfloat16)
        ours(case, **how).backward()  # The first call makes workspaces of kernels and cuBLAS.
        case.input.grad = case.linear_weight.grad = None
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        ours(case, **how).backward()
        peaks.append(torch.cuda.max_memory_allocated() - before - 4 * n * 64)
    assert peaks[1] <= peaks[0] * 1.1 + 2**20
    assert peaks[1] <= 2**25 + 30_011 * 64 * 6 + 2**22


@pytest.mark.gpu
@pytest.mark.parametrize("impl", ["chunked", "triton"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_the_device_is_never_waited_for(impl: str, reduction: str) -> None:
    case = make(512, 64, 5003, device="cuda", dtype=torch.bfloat16, bias=True)
    ours(case, impl=impl, reduction=reduction).sum().backward()
    with no_waiting():
        (ours(case, impl=impl, reduction=reduction, workspace=2**20).sum() * 3).backward()
