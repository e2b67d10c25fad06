"""The values of log-probabilities, and the likeliest classes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from hebbian_softmax import linear_log_prob, linear_topk
from tests.closeness import assert_as_close
from tests.loss.cases import DTYPES, Case, assert_no_worse, every_engine, every_engine_in, make


@every_engine_in(*DTYPES)
@pytest.mark.parametrize("workspace", [None, 9000])
def test_log_prob(impl, device, dtype, workspace) -> None:
    case = make(37, 16, 211, device=device, dtype=dtype, bias=True, ignored=0.3)
    found = log_prob(case, impl=impl, workspace=workspace)
    for mine, theirs, each in zip(found, expected(case), expected(case.to(torch.float64)), strict=True):
        assert mine.dtype == torch.promote_types(dtype, torch.float32)
        assert mine.requires_grad
        assert_no_worse(mine.detach(), theirs, each, dtype)


def log_prob(case: Case, **options: object) -> tuple[torch.Tensor, ...]:
    return linear_log_prob(case.input, case.linear_weight, case.target, linear_bias=case.linear_bias, **options)


def logits_of(case: Case) -> torch.Tensor:
    return F.linear(case.input, case.linear_weight, case.linear_bias).detach()


def expected(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    logits = logits_of(case).to(torch.promote_types(case.input.dtype, torch.float32))
    counted = case.target >= 0
    log_prob = logits.log_softmax(1).gather(1, case.target.clamp(min=0)[:, None])[:, 0]
    return log_prob.where(counted, 0), logits.logsumexp(1).where(counted, 0)


@pytest.mark.parametrize("impl", ["auto", "reference", "chunked"])
def test_log_prob_of_one_row_and_of_none(impl: str) -> None:
    w = torch.randn(9, 4)
    for shape in ((), (0,)):
        found = linear_log_prob(torch.randn(*shape, 4), w, torch.zeros(shape, dtype=torch.int64), impl=impl)
        assert [tuple(each.shape) for each in found] == [shape, shape]


@every_engine
def test_the_normaliser_of_an_impossible_target(impl, device) -> None:
    case = make(5, 8, 90, device=device, dtype=torch.bfloat16, bias=True)
    with torch.no_grad():
        case.linear_bias[case.target[1]] = -torch.inf
    of_targets, normaliser = log_prob(case, impl=impl)
    assert of_targets[1] == -torch.inf
    assert_no_worse(normaliser.detach(), expected(case)[1], expected(case.to(torch.float64))[1], torch.bfloat16)


def test_log_prob_of_targets_of_a_narrow_dtype() -> None:
    """As uint8, 156 equals -100."""
    h, w, y = torch.randn(3, 4), torch.randn(200, 4), torch.tensor([156, 0, 199])
    for mine, right in zip(linear_log_prob(h, w, y.to(torch.uint8)), linear_log_prob(h, w, y), strict=True):
        assert torch.equal(mine, right)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("workspace", [None, 20_000, 1])
@pytest.mark.parametrize("k", [1, 3, 64, 211])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_topk(device, workspace, k, dtype) -> None:
    case = make(9, 16, 211, device=device, dtype=dtype, bias=True)
    logits, exact = logits_of(case), logits_of(case.to(torch.float64))
    values, classes = linear_topk(case.input, case.linear_weight, k, linear_bias=case.linear_bias, workspace=workspace)
    assert_as_close(values, logits.topk(k, dim=1).values, exact.topk(k, dim=1).values)
    assert_as_close(values, logits.gather(1, classes), exact.gather(1, classes))
    assert all(len(set(row)) == k for row in classes.tolist())


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("workspace", [None, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_of_equal_logits_the_lowest_class_comes_first(device, workspace, dtype) -> None:
    logits = torch.randint(-3, 4, (20, 300), device=device).to(dtype)
    h, w = torch.eye(20, device=device, dtype=dtype), logits.t().contiguous()
    order = torch.sort(logits, dim=1, descending=True, stable=True)
    for k in (1, 50, 130, 300):
        values, classes = linear_topk(h, w, k, workspace=workspace)
        assert values.dtype == dtype
        assert torch.equal(values, order.values[:, :k])
        assert torch.equal(classes, order.indices[:, :k])


def test_topk_of_one_row_and_of_none() -> None:
    w = torch.randn(9, 4)
    assert [tuple(each.shape) for each in linear_topk(torch.randn(4), w, 2)] == [(2,), (2,)]
    assert [tuple(each.shape) for each in linear_topk(torch.randn(0, 4), w, 2)] == [(0, 2), (0, 2)]
