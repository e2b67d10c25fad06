"""A constant for each class, added to its logits: log-priors, and -inf, which masks a class."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call, grad, vmap

from hebbian_softmax import linear_cross_entropy, linear_log_prob, linear_topk
from hebbian_softmax.loss import reference
from hebbian_softmax.loss.checks import Options
from hebbian_softmax.loss.function import LinearCrossEntropy, Settings
from hebbian_softmax.loss.weighting import Weighting
from tests.closeness import assert_as_close, assert_exact
from tests.heads import early_head
from tests.loss.cases import DTYPES, Case, assert_no_worse_than_eager, every_engine, every_engine_in, make, ours

INF = math.inf
WEIGHTED = [(0.0, False), (0.1, False), (0.1, True), (1.0, True)]


@every_engine_in(*DTYPES, slow=(torch.float64, torch.float16))
@pytest.mark.parametrize("size", [(1, 8, 2), (13, 8, 97), (33, 40, 1009)], ids=str)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("masked", [0.0, 0.5])
def test_sizes(impl, device, dtype, size, reduction, masked) -> None:
    assert_no_worse_than_eager(make(*size, device=device, dtype=dtype, masked=masked), impl, reduction=reduction)


@every_engine_in(*DTYPES, slow=(torch.float64, torch.float16))
@pytest.mark.parametrize("workspace", [None, 9_000, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("smoothing", "weighted"), WEIGHTED)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_options(impl, device, dtype, workspace, smoothing, weighted, reduction) -> None:
    case = make(37, 16, 211, device=device, dtype=dtype, bias=True, weighted=weighted, ignored=0.3, masked=0.4)
    assert_no_worse_than_eager(case, impl, workspace, label_smoothing=smoothing, reduction=reduction)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize(("smoothing", "weighted"), WEIGHTED)
def test_reference(reduction, smoothing, weighted) -> None:
    case = make(13, 5, 29, bias=True, weighted=weighted, ignored=0.3, masked=0.4)
    assert_no_worse_than_eager(case, "reference", reduction=reduction, label_smoothing=smoothing)


@every_engine
@pytest.mark.parametrize("workspace", [None, 9_000])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_masked_classes_have_no_gradient_at_all(impl, device, workspace, smoothing) -> None:
    case = make(37, 16, 211, device=device, dtype=torch.bfloat16, bias=True, masked=0.4)
    for how in (impl, "reference"):
        loss = ours(case, impl=how, workspace=workspace, label_smoothing=smoothing)
        _, weight, bias = torch.autograd.grad(loss, case.operands())
        assert not weight[case.prior == -INF].any()
        assert not bias[case.prior == -INF].any()


@pytest.mark.parametrize("impl", ["reference", "chunked"])
def test_the_prior_is_not_rounded_to_half_precision(impl: str) -> None:
    case = make(40, 16, 300, dtype=torch.bfloat16, scale=0.0)
    case.prior = torch.randn(300) - 20
    expected = F.cross_entropy(case.prior.double().expand(40, -1), case.target)
    assert_exact(ours(case, impl=impl).detach(), expected)


@pytest.mark.parametrize("impl", ["auto", "reference", "chunked"])
def test_a_masked_target_is_refused_on_a_cpu(impl: str) -> None:
    case = make(5, 8, 30, dtype=torch.float32)
    case.prior = torch.zeros(30).index_fill(0, case.target[2:3], -INF)
    for function in (linear_cross_entropy, linear_log_prob):
        with pytest.raises(ValueError, match=f"class that prior masks with -inf, got {int(case.target[2])}"):
            function(case.input, case.linear_weight, case.target, prior=case.prior, impl=impl)
        function(case.input[:0], case.linear_weight, case.target[:0], prior=case.prior, impl=impl)
    case.target[case.target == case.target[2]] = -100
    assert torch.isfinite(ours(case, impl=impl))


def beyond_the_check(case: Case, impl: str, reduction: str, smoothing: float) -> Tensor:
    """Return the loss as on a GPU, where the values of targets are not read."""
    options = Options(case.weight, reduction, -100, smoothing, case.prior)
    operands = case.input, case.linear_weight
    if impl == "reference":
        return reference.cross_entropy(*operands, case.target, case.linear_bias, options, zero_if_empty=False)
    settings = Settings(impl, 9000, case.input.dtype, options, differentiable=True, zero_if_empty=False)
    weighting = Weighting(case.weight, smoothing, prior=case.prior)
    return LinearCrossEntropy.apply(*operands, case.linear_bias, case.target, None, weighting, settings)


@pytest.mark.parametrize("impl", ["reference", "chunked"])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("everything", [False, True])
def test_elsewhere_its_loss_is_infinite_and_never_nan(impl, reduction, smoothing, everything) -> None:
    """Even where no class is left, for which plain logits of -inf give NaN."""
    case = make(6, 8, 300, bias=True, weighted=True, masked=0.3)
    case.target[4] = -100
    case.prior[slice(None) if everything else case.target[2]] = -INF
    loss = beyond_the_check(case, impl, reduction, smoothing)
    impossible = (case.target >= 0) & (case.prior[case.target.clamp(min=0)] == -INF)
    assert impossible.any()
    if reduction == "none":
        assert (loss == INF).tolist() == impossible.tolist()
        assert torch.isfinite(loss[~impossible]).all()
    else:
        assert loss == INF
    gradients = torch.autograd.grad(loss.sum(), case.operands())
    assert all(torch.isfinite(each).all() for each in gradients)
    assert not gradients[0][impossible].any()


@pytest.mark.gpu
@pytest.mark.parametrize("impl", ["reference", "chunked", "triton"])
def test_a_masked_target_on_a_gpu(impl: str) -> None:
    case = make(6, 8, 300, device="cuda", dtype=torch.bfloat16, masked=0.3)
    case.prior[case.target[2]] = -INF
    masked = case.prior[case.target] == -INF
    loss = ours(case, impl=impl, reduction="none")
    assert torch.equal(loss == INF, masked)
    found, normaliser = linear_log_prob(
        case.input.detach(), case.linear_weight.detach(), case.target, prior=case.prior, impl=impl
    )
    assert torch.equal(found == -INF, masked)
    assert torch.isfinite(normaliser).all()
    everything = torch.full_like(case.prior, -INF)
    for each in linear_log_prob(case.input, case.linear_weight, case.target, prior=everything, impl=impl):
        assert (each == -INF).all()


@every_engine_in(*DTYPES, slow=(torch.float64, torch.float16))
@pytest.mark.parametrize("workspace", [None, 9000])
def test_log_prob(impl, device, dtype, workspace) -> None:
    case = make(37, 16, 211, device=device, dtype=dtype, bias=True, ignored=0.3, masked=0.4)
    counted = case.target >= 0

    def expected(each: Case) -> list[Tensor]:
        logits = F.linear(each.input, each.linear_weight, each.linear_bias).detach() + each.prior
        found = logits.log_softmax(1).gather(1, each.target.clamp(min=0)[:, None])[:, 0]
        return [found.where(counted, 0), logits.logsumexp(1).where(counted, 0)]

    for how in (impl, "reference"):
        found = linear_log_prob(
            case.input,
            case.linear_weight,
            case.target,
            linear_bias=case.linear_bias,
            prior=case.prior,
            impl=how,
            workspace=workspace,
        )
        for mine, theirs, exact in zip(found, expected(case), expected(case.to(torch.float64)), strict=True):
            assert_as_close(mine, theirs, exact)


@pytest.mark.parametrize("workspace", [None, 1])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_topk(workspace, dtype) -> None:
    case = make(9, 16, 70, dtype=dtype, bias=True, masked=0.4)
    operands = case.input.detach(), case.linear_weight.detach()
    logits = F.linear(*operands, case.linear_bias.detach())
    logits = logits.to(torch.promote_types(dtype, torch.float32)) + case.prior
    for k in (1, 5, 60):
        values, classes = linear_topk(*operands, k, linear_bias=case.linear_bias, prior=case.prior, workspace=workspace)
        torch.testing.assert_close(values, logits.topk(k, dim=1).values)
        assert (case.prior[classes[values > -INF]] > -INF).all()
    together = vmap(lambda h: linear_topk(h, operands[1], 5, prior=case.prior)[1])(operands[0])
    assert torch.equal(together, linear_topk(*operands, 5, prior=case.prior)[1])


@pytest.mark.parametrize("classes", [20, 2**19], ids=["reference", "chunked"])
def test_the_layer(classes: int) -> None:
    case = make(3, 4, classes, masked=0.5, ignored=0.3, bias=True)
    head = early_head(4, classes, gamma=0.1, limit=5, bias=True, dtype=torch.float64)
    head.load_state_dict({"weight": case.linear_weight, "bias": case.linear_bias}, strict=False)
    for reduction in ("mean", "none"):
        loss = head.loss(case.input, case.target, prior=case.prior, reduction=reduction, remember=False)
        assert_exact(loss, ours(case, impl="chunked", reduction=reduction), scale=20.0)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize(("smoothing", "weighted"), WEIGHTED)
def test_soft_targets(reduction, smoothing, weighted) -> None:
    """Without the masked classes, the loss is that of torch."""
    case = make(6, 5, 9, masked=0.4, weighted=weighted)
    kept = case.prior > -INF
    soft = torch.rand(6, 9, dtype=torch.float64) * kept
    soft /= soft.sum(1, keepdim=True)
    head = early_head(5, 9, gamma=0.1, limit=5, dtype=torch.float64)
    options = {"reduction": reduction, "label_smoothing": smoothing}
    loss = head.loss(case.input, soft, prior=case.prior, weight=case.weight, remember=False, **options)
    logits = (F.linear(case.input, head.weight) + case.prior)[:, kept]
    weight = None if case.weight is None else case.weight[kept]
    expected = F.cross_entropy(logits, soft[:, kept], weight, **options)
    assert_exact(loss, expected)
    inputs = [case.input, head.weight]
    for mine, theirs in zip(*(torch.autograd.grad(each.sum(), inputs) for each in (loss, expected)), strict=True):
        assert_exact(mine, theirs)


def test_soft_targets_for_a_masked_class_are_refused_on_a_cpu() -> None:
    head = early_head(5, 3, gamma=0.1, limit=5)
    prior = torch.tensor([0.0, -INF, 0.0])
    with pytest.raises(ValueError, match="no probability for a class that prior masks with -inf, got some for 1"):
        head.loss(torch.randn(2, 5), torch.tensor([[0.5, 0.5, 0.0], [1.0, 0.0, 0.0]]), prior=prior, remember=False)


def test_transforms() -> None:
    case = make(6, 4, 20, masked=0.3)
    head = early_head(4, 20, gamma=0.1, limit=5, dtype=torch.float64)

    class Loss(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = head

        def forward(self, h: Tensor, y: Tensor) -> Tensor:
            return self.head.loss(h, y, prior=case.prior, label_smoothing=0.1, remember=False)

    model, parameters = Loss(), {"head.weight": head.weight.detach()}
    each = vmap(grad(lambda p, h, y: functional_call(model, p, (h, y))), in_dims=(None, 0, 0))
    found = each(parameters, case.input.detach(), case.target)["head.weight"]
    whole = replace(case, linear_weight=head.weight)
    loss = ours(whole, impl="chunked", workspace=1, label_smoothing=0.1)
    assert_exact(found.mean(0), torch.autograd.grad(loss, head.weight)[0])
