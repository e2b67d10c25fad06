"""Temperature, softcap, z-loss and the weights of tokens, alone and together, with the rule of cases.py."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import grad, vmap

from hebbian_softmax import linear_cross_entropy, linear_log_prob, linear_topk
from tests.closeness import assert_as_close, assert_exact
from tests.heads import attached_head, early_head
from tests.loss.cases import (
    DTYPES,
    Case,
    assert_no_worse_than_eager,
    eager,
    every_engine_in,
    make,
    ours,
    with_gradients,
)
from tests.operations import Watch

ALONE: list[dict[str, Any]] = [
    {"temperature": 0.7},
    {"softcap": 3.0},
    {"z_loss": 0.01},
    {"tokens": True},
    {"label_smoothing": 0.1, "temperature": 1.7},
    {"label_smoothing": 0.1, "softcap": 3.0},
]
TOGETHER: dict[str, Any] = {
    "temperature": 1.3,
    "softcap": 3.0,
    "z_loss": 0.01,
    "tokens": True,
    "label_smoothing": 0.1,
}
WITHOUT_SMOOTHING = {name: value for name, value in TOGETHER.items() if name != "label_smoothing"}
MANY: dict[str, Any] = {"bias": True, "weighted": True, "masked": 0.3}


def case_of(options: dict[str, Any], *size: int, **more: Any) -> tuple[Case, dict[str, Any]]:
    """Return a case and the options that are not part of it; some of several tokens have the weight 0."""
    case = make(*size, **more)
    if options.get("tokens"):
        tokens = torch.rand(len(case.target)).to(
            case.input.device, torch.promote_types(case.input.dtype, torch.float32)
        )
        case.token_weight = tokens + 0.1
        case.token_weight[1::5] = 0
    return case, {name: value for name, value in options.items() if name != "tokens"}


def engine_of(impl: str, options: dict[str, Any]) -> str:
    """Return ``auto`` where the kernels have no such combination."""
    return "auto" if impl == "triton" and {"softcap", "label_smoothing"} <= options.keys() else impl


@every_engine_in(*DTYPES, slow=(torch.float64, torch.float16))
@pytest.mark.parametrize("options", ALONE, ids=str)
@pytest.mark.parametrize("workspace", [None, 9_000])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_each_alone(impl, device, dtype, options, workspace, reduction) -> None:
    case, options = case_of(options, 37, 16, 211, device=device, dtype=dtype, bias=True, ignored=0.3)
    assert_no_worse_than_eager(case, engine_of(impl, options), workspace, reduction=reduction, **options)


@every_engine_in(*DTYPES, slow=(torch.float64, torch.float16))
@pytest.mark.parametrize(
    "size", [(1, 8, 4), (13, 8, 97), pytest.param((33, 40, 1009), marks=pytest.mark.slow)], ids=str
)
@pytest.mark.parametrize("workspace", [None, 9_000, 1])
@pytest.mark.parametrize("reduction", ["sum", "none"])
@pytest.mark.parametrize("options", [TOGETHER, WITHOUT_SMOOTHING], ids=["smooth", "sharp"])
def test_all_together(impl, device, dtype, size, workspace, reduction, options) -> None:
    case, options = case_of(options, *size, device=device, dtype=dtype, **MANY)
    assert_no_worse_than_eager(case, engine_of(impl, options), workspace, reduction=reduction, **options)


@pytest.mark.parametrize("options", [*ALONE, TOGETHER], ids=str)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_reference(options, reduction) -> None:
    case, options = case_of(options, 13, 5, 29, **MANY, ignored=0.3)
    assert_no_worse_than_eager(case, "reference", reduction=reduction, **options)


@pytest.mark.parametrize("impl", ["reference", "chunked"])
@pytest.mark.parametrize("options", [{}, {"z_loss": 0.1}], ids=str)
def test_a_token_without_weight_takes_no_part(impl: str, options: dict[str, Any]) -> None:
    """Even if its target is impossible or masked, or its logits are huge."""
    case = make(6, 8, 300, bias=True, masked=0.2)
    case.token_weight = torch.tensor([1.0, 0.0, 2.0, 0.0, -0.5, 0.0], dtype=torch.float64)
    with torch.no_grad():
        case.linear_bias[case.target[1]] = -torch.inf
        case.input[5] *= 1e9
    case.prior[case.target[3]] = -torch.inf
    kept = case.token_weight != 0
    case.target[kept] = torch.where((case.prior > -torch.inf) & (case.linear_bias > -torch.inf))[0][:3]
    left = Case(
        case.input.detach()[kept].requires_grad_(),
        case.linear_weight,
        case.target[kept],
        case.linear_bias,
        prior=case.prior,
        token_weight=case.token_weight[kept],
    )
    loss, dh, dw, _ = with_gradients(ours(case, impl=impl, reduction="sum", **options), case)
    expected = with_gradients(eager(left, reduction="sum", **options), left)
    assert_exact(loss, expected[0], scale=50.0)
    assert_exact(dh[kept], expected[1], scale=50.0)
    assert_exact(dw, expected[2], scale=50.0)
    assert not dh[~kept].any()
    assert not ours(case, impl=impl, reduction="none", **options)[~kept].any()


@pytest.mark.parametrize("impl", ["reference", "chunked", "auto"])
def test_no_weight_at_all(impl: str) -> None:
    case = make(3, 8, 20)
    case.token_weight = torch.zeros(3, dtype=torch.float64)
    assert ours(case, impl=impl).isnan()
    assert ours(case, impl=impl, reduction="sum") == 0
    head = early_head(8, 20, gamma=0.1, limit=5, dtype=torch.float64)
    assert head.loss(case.input, case.target, token_weight=case.token_weight, remember=False) == 0


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_gradcheck(reduction: str) -> None:
    case, options = case_of(TOGETHER, 5, 3, 70, **MANY)

    def loss(*operands: Tensor) -> Tensor:
        names = dict(zip(("input", "linear_weight", "linear_bias"), operands, strict=True))
        return ours(replace(case, **names), impl="chunked", workspace=2000, reduction=reduction, **options)

    assert torch.autograd.gradcheck(loss, case.operands(), fast_mode=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_softcap_stays_in_the_workspace(dtype: torch.dtype, reduction: str) -> None:
    case, workspace = make(700, 16, 901, dtype=dtype), 300_000
    options = {"softcap": 5.0, "label_smoothing": 0.1, "reduction": reduction}
    with Watch() as watch:
        ours(case, impl="chunked", workspace=workspace, **options).sum().backward()
    assert watch.most <= workspace + sum(each.nbytes for each in case.operands()) + 8 * 12 * (700 + 901)


@every_engine_in(*DTYPES, slow=(torch.float64, torch.float16))
@pytest.mark.parametrize("shape", [{"temperature": 0.5}, {"temperature": 2.0, "softcap": 4.0}], ids=str)
def test_log_prob(impl, device, dtype, shape) -> None:
    case = make(37, 16, 211, device=device, dtype=dtype, bias=True, masked=0.3)
    results = []
    for each in (case, case.to(torch.float64)):
        log_prob = -eager(each, reduction="none", **shape)
        logits = F.linear(each.input, each.linear_weight, each.linear_bias).to(log_prob.dtype)
        cap = shape.get("softcap", 1e9)
        normaliser = (cap * (logits / cap).tanh() / shape["temperature"] + each.prior).logsumexp(1)
        results.append((log_prob.detach(), normaliser.detach()))
    more = {"linear_bias": case.linear_bias, "prior": case.prior} | shape
    for how in (impl, "reference"):
        found = linear_log_prob(case.input, case.linear_weight, case.target, impl=how, **more)
        for mine, theirs, exact in zip(found, *results, strict=True):
            assert_as_close(mine, theirs, exact)


@pytest.mark.parametrize("workspace", [None, 1])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_topk(workspace, dtype) -> None:
    case = make(9, 16, 70, dtype=dtype, masked=0.3)
    h, w = case.input.detach(), case.linear_weight.detach()
    logits = F.linear(h, w).to(torch.promote_types(dtype, torch.float32))
    expected = 3 * (logits / 3).tanh() / 0.8 + case.prior
    options = {"prior": case.prior, "temperature": 0.8, "softcap": 3.0}
    values, classes = linear_topk(h, w, 5, workspace=workspace, **options)
    torch.testing.assert_close(values, expected.topk(5, dim=1).values)
    torch.testing.assert_close(values, expected.gather(1, classes))
    together, _ = vmap(lambda each: linear_topk(each, w, 5, **options))(h)
    torch.testing.assert_close(together, values)


@pytest.mark.parametrize("classes", [20, 2**19], ids=["reference", "chunked"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_the_layer(classes: int, reduction: str) -> None:
    case, options = case_of(TOGETHER, 4, 6, classes, bias=True, masked=0.3)
    head = early_head(6, classes, gamma=0.1, limit=5, bias=True, dtype=torch.float64)
    head.load_state_dict({"weight": case.linear_weight, "bias": case.linear_bias}, strict=False)
    more = {"prior": case.prior, "token_weight": case.token_weight.view(2, 2), "reduction": reduction} | options
    loss = head.loss(case.input.view(2, 2, 6), case.target.view(2, 2), remember=False, **more)
    expected = ours(case, impl="chunked", reduction=reduction, **options)
    assert_exact(loss, expected.view_as(loss), scale=20.0)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_soft_targets_of_one_class_are_that_class(reduction: str) -> None:
    """Without class weights, by whose sum a mean is divided for classes and not for probabilities."""
    case, options = case_of(TOGETHER, 7, 6, 30, masked=0.3)
    head = early_head(6, 30, gamma=0.1, limit=5, dtype=torch.float64)
    more = {"prior": case.prior, "token_weight": case.token_weight, "reduction": reduction, "remember": False} | options
    hard = head.loss(case.input, case.target, **more)
    soft = head.loss(case.input, F.one_hot(case.target, 30).double(), **more)
    assert_exact(soft, hard)
    inputs = [case.input, head.weight]
    for mine, theirs in zip(*(torch.autograd.grad(each.sum(), inputs) for each in (soft, hard)), strict=True):
        assert_exact(mine, theirs)


@pytest.mark.parametrize("soft", [False, True])
def test_only_tokens_with_a_positive_weight_are_memorised(soft: bool) -> None:
    head, optimizer = attached_head(classes=6)
    y = torch.tensor([0, 1, 2])
    targets = F.one_hot(y, 6).float() if soft else y
    weight = torch.tensor([1.0, 0.0, -1.0])
    head.loss(torch.randn(3, head.in_features), targets, token_weight=weight, reduction="sum").backward()
    optimizer.step()
    assert head.counts.tolist() == [1, 0, 0, 0, 0, 0]


def test_per_sample_gradients() -> None:
    case, options = case_of(TOGETHER, 6, 4, 20, masked=0.3)

    def loss(weight: Tensor, h: Tensor, y: Tensor, token: Tensor) -> Tensor:
        more = {"prior": case.prior, "token_weight": token, "reduction": "sum"} | options
        return linear_cross_entropy(h, weight, y, **more)

    each = vmap(grad(loss), in_dims=(None, 0, 0, 0))
    found = each(case.linear_weight.detach(), case.input.detach(), case.target, case.token_weight)
    whole = ours(case, impl="chunked", workspace=1, reduction="sum", **options)
    assert_exact(found.sum(0), torch.autograd.grad(whole, case.linear_weight)[0])


def test_triton_says_that_it_has_no_smoothing_behind_a_softcap() -> None:
    case = make(3, 8, 20, dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match="no label smoothing behind a softcap"):
        ours(case, impl="triton", softcap=3.0, label_smoothing=0.1)


@pytest.mark.gpu
@pytest.mark.parametrize(("impl", "options"), [("chunked", TOGETHER), ("triton", WITHOUT_SMOOTHING)])
def test_everything_in_a_cuda_graph(impl: str, options: dict[str, Any]) -> None:
    case, options = case_of(options, 300, 64, 5003, device="cuda", dtype=torch.bfloat16, bias=True, masked=0.3)
    with torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(2):
            expected = with_gradients(ours(case, impl=impl, **options), case)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = with_gradients(ours(case, impl=impl, **options), case)
    graph.replay()
    for mine, theirs in zip(found, expected, strict=True):
        assert torch.equal(mine, theirs)
