"""Gradients of log-probabilities, log-normalisers and entropies, with the rule of cases.py."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import grad, vmap

from hebbian_softmax import linear_log_prob
from hebbian_softmax.loss import reference
from hebbian_softmax.loss.checks import Options
from hebbian_softmax.loss.log_prob import LinearLogProb, LogProbSettings
from tests.closeness import assert_exact
from tests.loss.cases import DTYPES, Case, assert_no_worse, every_engine, every_engine_in, make
from tests.operations import Watch

INF = math.inf
SHAPES: list[dict[str, Any]] = [{}, {"temperature": 0.7}, {"temperature": 1.3, "softcap": 3.0}]


def eager(case: Case, entropy: bool, temperature: float = 1.0, softcap: float | None = None) -> list[Tensor]:
    logits = F.linear(case.input, case.linear_weight, case.linear_bias)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    logits = (logits if softcap is None else softcap * (logits / softcap).tanh()) / temperature
    kept = torch.arange(len(case.linear_weight), device=logits.device)
    if case.prior is not None:
        logits, kept = logits + case.prior, torch.where(case.prior > -INF)[0]
    counted = case.target >= 0
    log_p = logits[:, kept].log_softmax(1)
    of_target = logits.log_softmax(1).gather(1, case.target.clamp(min=0)[:, None])[:, 0]
    found = [of_target, logits[:, kept].logsumexp(1)]
    if entropy:
        found.append(-(log_p.exp() * log_p).sum(1))
    return [each.where(counted, 0) for each in found]


def ours(case: Case, **options: Any) -> tuple[Tensor, ...]:
    more = {"linear_bias": case.linear_bias, "prior": case.prior}
    return linear_log_prob(case.input, case.linear_weight, case.target, **more, **options)


def check(case: Case, impl: str, entropy: bool, workspace: int | None = None, **shape: Any) -> None:
    """Check values, and gradients for upstream gradients of either sign."""
    upstreams = torch.randn(3, len(case.target), dtype=torch.float64).to(case.input.device)
    exact = case.to(torch.float64)
    everything = []
    for each, results in (
        (case, ours(case, impl=impl, workspace=workspace, entropy=entropy, **shape)),
        (case, eager(case, entropy, **shape)),
        (exact, eager(exact, entropy, **shape)),
    ):
        total = sum((value * upstream).sum() for value, upstream in zip(results, upstreams, strict=False))
        everything.append([*(value.detach() for value in results), *torch.autograd.grad(total, each.operands())])
    for mine, theirs, right in zip(*everything, strict=True):
        assert_no_worse(mine, theirs, right, case.input.dtype)


@every_engine_in(*DTYPES, slow=(torch.float64, torch.float16))
@pytest.mark.parametrize("size", [(1, 8, 2), (13, 8, 97), (33, 40, 1009)], ids=str)
@pytest.mark.parametrize("workspace", [None, 9_000])
@pytest.mark.parametrize("entropy", [False, True])
def test_sizes(impl, device, dtype, size, workspace, entropy) -> None:
    impl = "auto" if impl == "triton" and entropy else impl
    check(make(*size, device=device, dtype=dtype), impl, entropy, workspace)


@every_engine_in(*DTYPES, slow=(torch.float64, torch.float16))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("workspace", [None, 9_000])
def test_options(impl, device, dtype, shape, entropy, workspace) -> None:
    impl = "auto" if impl == "triton" and entropy else impl
    case = make(37, 16, 211, device=device, dtype=dtype, bias=True, ignored=0.3, masked=0.4)
    check(case, impl, entropy, workspace, **shape)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("entropy", [False, True])
def test_reference(shape, entropy) -> None:
    check(make(13, 5, 29, bias=True, ignored=0.3, masked=0.4), "reference", entropy, **shape)


@pytest.mark.parametrize("masked", [None, 0.3])
def test_gradcheck(masked: float | None) -> None:
    case = make(5, 3, 70, bias=True, masked=masked, ignored=0.2)

    def results(*operands: Tensor) -> tuple[Tensor, ...]:
        names = dict(zip(("input", "linear_weight", "linear_bias"), operands, strict=True))
        return ours(replace(case, **names), impl="chunked", workspace=2000, entropy=True, temperature=0.9, softcap=4.0)

    assert torch.autograd.gradcheck(results, case.operands(), fast_mode=True)


@every_engine
def test_gradients_that_cancel_in_the_softmax(impl, device) -> None:
    """log p + log Z is the logit of the target, whose gradient no other class has."""
    case = make(9, 16, 300, device=device, dtype=torch.bfloat16)
    log_prob, normaliser = ours(case, impl=impl)
    (found,) = torch.autograd.grad((log_prob + normaliser).sum(), case.linear_weight)
    exact = torch.zeros_like(found, dtype=torch.float64).index_add_(0, case.target, case.input.detach().double())
    assert_no_worse(found, exact.to(found.dtype), exact)


@pytest.mark.parametrize("impl", ["reference", "chunked"])
def test_the_entropy_of_few_and_of_sure_classes(impl: str) -> None:
    h, y = torch.ones(2, 1, dtype=torch.float64), torch.tensor([0, 1])
    for logits, value in (([3.0] * 90, math.log(90)), ([0.0] + [-1e4] * 89, 0.0), ([-1e4] * 89 + [0.0], 0.0)):
        w = torch.tensor(logits, dtype=torch.float64)[:, None]
        for workspace in (None, 1):
            entropy = linear_log_prob(h, w, y, entropy=True, impl=impl, workspace=workspace)[2]
            assert_exact(entropy, torch.full((2,), value, dtype=torch.float64), scale=20.0)
    alone = linear_log_prob(h, w[:1], torch.zeros(2, dtype=torch.int64), entropy=True, impl=impl)
    assert [each.tolist() for each in alone] == [[0.0, 0.0], [-1e4, -1e4], [0.0, 0.0]]


@pytest.mark.parametrize("impl", ["reference", "chunked"])
@pytest.mark.parametrize("everything", [False, True])
def test_a_masked_target_beyond_the_check(impl: str, everything: bool) -> None:
    """As on a GPU, where the values of targets are not read: -inf, and no NaN in gradients."""
    case = make(6, 8, 300, bias=True, masked=0.3)
    case.prior[slice(None) if everything else case.target[2]] = -INF
    masked = case.prior[case.target] == -INF
    options = Options(prior=case.prior)
    operands = case.input, case.linear_weight, case.linear_bias, case.target
    if impl == "reference":
        found = reference.log_prob(*operands, options, True)
    else:
        found = LinearLogProb.apply(*operands, LogProbSettings(impl, 9000, torch.float64, options, True, True))
    assert torch.equal(found[0] == -INF, masked)
    assert torch.isfinite(found[1]).all() != everything
    assert torch.isfinite(found[2]).all()
    gradients = torch.autograd.grad([each.sum() for each in found], case.operands())
    assert all(torch.isfinite(each).all() for each in gradients)
    assert not gradients[1][case.prior == -INF].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("entropy", [False, True])
def test_memory(dtype: torch.dtype, entropy: bool) -> None:
    case, workspace = make(700, 16, 901, dtype=dtype), 300_000
    with Watch() as watch:
        sum(each.sum() for each in ours(case, impl="chunked", workspace=workspace, entropy=entropy)).backward()
    assert watch.most <= workspace + sum(each.nbytes for each in case.operands()) + 8 * 20 * (700 + 901)


def test_one_row_and_no_classes() -> None:
    h, w = torch.randn(4, requires_grad=True), torch.randn(9, 4)
    for found in (
        linear_log_prob(h, w, torch.tensor(3), entropy=True, impl="chunked"),
        linear_log_prob(h, w[:0], torch.tensor(-100), entropy=True),
    ):
        assert [tuple(each.shape) for each in found] == [(), (), ()]
        assert torch.autograd.grad(sum(found), h)[0].shape == (4,)


def test_transforms_compile_and_second_derivatives() -> None:
    case = make(6, 4, 20)

    def surprise(h: Tensor, y: Tensor) -> Tensor:
        log_prob, _, entropy = linear_log_prob(h, case.linear_weight.detach(), y, entropy=True)
        return entropy - log_prob

    each = vmap(grad(surprise))(case.input.detach(), case.target)
    log_prob, _, entropy = ours(case, impl="chunked", entropy=True)
    (found,) = torch.autograd.grad((entropy - log_prob).sum(), case.input, create_graph=True)
    assert_exact(found.detach(), each)
    with pytest.raises(RuntimeError, match='impl="reference"'):
        torch.autograd.grad(found.sum(), case.input)


def test_triton_says_that_it_has_no_entropy() -> None:
    with pytest.raises(RuntimeError, match="no entropy"):
        ours(make(3, 8, 20, dtype=torch.bfloat16), impl="triton", entropy=True)


@pytest.mark.gpu
@pytest.mark.parametrize(("impl", "entropy"), [("chunked", True), ("triton", False)])
def test_in_a_cuda_graph(impl: str, entropy: bool) -> None:
    case = make(300, 64, 5003, device="cuda", dtype=torch.bfloat16, bias=True, masked=0.3)

    def gradients() -> tuple[Tensor, ...]:
        return torch.autograd.grad(sum(each.sum() for each in ours(case, impl=impl, entropy=entropy)), case.operands())

    with torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(2):
            expected = gradients()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = gradients()
    graph.replay()
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
