"""Rows without a distribution (logits of -inf, +inf and NaN), and problems without rows, features or classes."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hebbian_softmax import linear_cross_entropy, linear_log_prob, linear_topk
from hebbian_softmax.loss import chunked
from hebbian_softmax.loss.problem import Needs, Problem, Scales
from tests.closeness import assert_exact
from tests.interpreter import interpreted_or_on_gpu

INF, NAN = math.inf, math.nan
HOW = [("reference", None), ("chunked", None), ("auto", 1)]
every_way = pytest.mark.parametrize(("impl", "workspace"), HOW, ids=[f"{impl}-{size}" for impl, size in HOW])
few_or_all = pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["few", "all"])
NOTHING, IGNORED = torch.empty(0, dtype=torch.int64), torch.tensor([-100, -100])
BIASES = [
    torch.tensor(values, dtype=torch.float64).repeat_interleave(torch.tensor([1, 1, classes - 2]))
    for classes in (3, 70)
    for values in itertools.product((-INF, INF, NAN, 0.5), repeat=3)
]
"""Of the target, of the next class, and of all others: few enough for one tile, and too many."""
FEW = [BIASES[i + size] for i in (0, 15, 48, 31, 55, 59) for size in (0, 64)]
"""All -inf, the target impossible, nothing but the target possible, +inf at the target, at another class, and NaN."""
SCALE = 20.0
"""The size of the largest logits, whose rounding decides the error of what is computed from them."""


def operands(bias: Tensor) -> list[Tensor]:
    h, w = torch.randn(1, 8, dtype=torch.float64), torch.randn(len(bias), 8, dtype=torch.float64)
    return [each.requires_grad_() for each in (h, w, bias.clone())]


@few_or_all
@every_way
@pytest.mark.parametrize("reduction", ["sum", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_logits_that_are_no_numbers_are_those_of_torch(impl, workspace, reduction, smoothing, every) -> None:
    """Loss and gradients are NaN where there is no distribution, and the loss is inf where the target is impossible."""
    options = {"reduction": reduction, "label_smoothing": smoothing}
    for bias in BIASES if every else FEW:
        h, w, b = case = operands(bias)
        found = linear_cross_entropy(h, w, torch.tensor([0]), linear_bias=b, impl=impl, workspace=workspace, **options)
        expected = F.cross_entropy(F.linear(h, w, b), torch.tensor([0]), **options)
        assert_exact(found, expected, str(bias[:3]), scale=SCALE)
        with torch.no_grad():
            alone = linear_cross_entropy(
                h, w, torch.tensor([0]), linear_bias=b, impl=impl, workspace=workspace, **options
            )
        assert_exact(alone, expected, str(bias[:3]), scale=SCALE)
        for mine, theirs in zip(*(torch.autograd.grad(each.sum(), case) for each in (found, expected)), strict=True):
            assert_exact(mine, theirs, str(bias[:3]), scale=SCALE)


@pytest.mark.parametrize("workspace", [None, 1])
@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_an_ignored_row_without_possible_classes(workspace, reduction) -> None:
    """It takes no part. Eager torch's gradients are NaN."""
    for classes in (3, 70):
        case = operands(torch.full((classes,), -INF, dtype=torch.float64))
        how = {"impl": "chunked", "workspace": workspace, "reduction": reduction}
        loss = linear_cross_entropy(*case[:2], torch.tensor([-100]), linear_bias=case[2], **how)
        assert not loss.any()
        assert not any(each.any() for each in torch.autograd.grad(loss.sum(), case))


@few_or_all
@every_way
def test_log_probabilities_of_such_logits(impl, workspace, every) -> None:
    for bias in BIASES if every else FEW:
        h, w, b = operands(bias)
        found, normaliser = linear_log_prob(h, w, torch.tensor([0]), linear_bias=b, impl=impl, workspace=workspace)
        logits = F.linear(h, w, b).detach()
        assert_exact(found, logits.log_softmax(1)[:, 0], scale=SCALE)
        expected = logits.logsumexp(1)
        assert_exact(normaliser, expected.masked_fill(expected == INF, NAN), scale=SCALE)


@pytest.mark.parametrize("workspace", [None, 1])
def test_likeliest_classes_of_such_logits(workspace: int | None) -> None:
    bias = torch.full((70,), -INF)
    values, classes = linear_topk(torch.zeros(8), torch.zeros(70, 8), 3, linear_bias=bias, workspace=workspace)
    assert (values.tolist(), classes.tolist()) == ([-INF] * 3, [0, 1, 2])
    bias[[5, 69]] = INF
    values, classes = linear_topk(torch.zeros(8), torch.zeros(70, 8), 3, linear_bias=bias, workspace=workspace)
    assert (values.tolist(), classes.tolist()) == ([INF, INF, -INF], [5, 69, 0])


@interpreted_or_on_gpu
@pytest.mark.parametrize("biases", [FEW[:1], pytest.param(BIASES, marks=pytest.mark.slow)], ids=["few", "all"])
def test_the_kernels_agree(biases: list[Tensor]) -> None:
    """What is NaN and what is infinite, in the terms and gradients of one pass and of two."""
    engine = pytest.importorskip("hebbian_softmax.loss.gpu.engine", reason="the engine needs Triton")
    device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
    for bias in biases:
        h, w, b = (each.detach().to(device, dtype) for each in operands(bias))
        problem = Problem(h, w, b, torch.tensor([0], device=device))
        scale, needs = torch.ones(1, device=device), Needs(torch.float32, torch.float32, torch.float32)
        for how in (one_pass, two_passes):
            found, expected = (how(each, problem, scale, needs) for each in (engine, chunked))
            for mine, theirs in zip(found, expected, strict=True):
                for kind in (torch.isnan, torch.isposinf, torch.isneginf):
                    assert torch.equal(kind(mine), kind(theirs)), str(bias[:3])


def one_pass(engine, problem: Problem, scale: Tensor, needs: Needs) -> list[Tensor]:
    terms, gradients = engine.row_terms_and_gradients(problem, Scales(scale, scale), needs, 2**30)
    return [each for each in (*vars(terms).values(), *vars(gradients).values()) if each is not None]


def two_passes(engine, problem: Problem, scale: Tensor, needs: Needs) -> list[Tensor]:
    terms = engine.row_terms(problem, 2**30)
    gradients = engine.gradients(problem, terms, Scales(scale, scale), needs, 2**30)
    return [each for each in (*vars(terms).values(), *vars(gradients).values()) if each is not None]


@every_way
@pytest.mark.parametrize(
    "target", [NOTHING, torch.tensor([-100, -100]), torch.tensor([0, 2]), torch.tensor(1)], ids=str
)
@pytest.mark.parametrize("with_bias", [False, True])
def test_no_features(impl, workspace, target, with_bias) -> None:
    """The logits are the bias, or 0."""
    h, w = torch.empty(*target.shape, 0, dtype=torch.float64), torch.empty(3, 0, dtype=torch.float64)
    b = torch.randn(3, dtype=torch.float64) if with_bias else None
    case = [each.requires_grad_() for each in (h, w, b) if each is not None]
    for reduction, smoothing in itertools.product(("mean", "sum", "none"), (0.0, 0.1)):
        options = {"reduction": reduction, "label_smoothing": smoothing}
        found = linear_cross_entropy(h, w, target, linear_bias=b, impl=impl, workspace=workspace, **options)
        expected = F.cross_entropy(F.linear(h, w, b), target, **options)
        assert_exact(found, expected)
        if not expected.isnan().any():
            for mine, theirs in zip(
                *(torch.autograd.grad(each.sum(), case) for each in (found, expected)), strict=True
            ):
                assert_exact(mine, theirs)
    log_prob, _ = linear_log_prob(h, w, target, linear_bias=b, impl=impl, workspace=workspace)
    assert_exact(-log_prob, F.cross_entropy(F.linear(h, w, b), target, reduction="none"))
    values, classes = linear_topk(h, w, 2, linear_bias=b, workspace=workspace)
    assert values.shape == classes.shape == (*target.shape, 2)


def test_no_features_are_not_taken_for_few_logits() -> None:
    """The rows and classes decide how many logits there are, whatever the features."""
    h, w = torch.empty(2**11, 0), torch.empty(2**11, 0)
    loss = linear_cross_entropy(h, w.requires_grad_(), torch.zeros(2**11, dtype=torch.int64))
    assert type(loss.grad_fn).__name__ == "LinearCrossEntropyBackward"


@every_way
@pytest.mark.parametrize("target", [NOTHING, IGNORED, torch.tensor(-100)], ids=str)
@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1}, {"weight": torch.empty(0)}], ids=str)
def test_no_classes(impl, workspace, target, options) -> None:
    """Every row is ignored, so the results are those of ignored rows."""
    h, w, b = torch.randn(*target.shape, 4), torch.empty(0, 4), torch.empty(0)
    for bias in (None, b):
        case = [each.requires_grad_() for each in (h, w, bias) if each is not None]
        for reduction, value in (("mean", NAN), ("sum", 0.0), ("none", torch.zeros(target.shape))):
            how = {"impl": impl, "workspace": workspace, "reduction": reduction} | options
            loss = linear_cross_entropy(h, w, target, linear_bias=bias, **how)
            assert_exact(loss, torch.as_tensor(value))
            assert not any(each.any() for each in torch.autograd.grad(loss.sum(), case))
        for found in linear_log_prob(h, w, target, linear_bias=bias, impl=impl, workspace=workspace):
            assert_exact(found, torch.zeros(target.shape))


@every_way
def test_without_classes_any_target_is_refused(impl, workspace) -> None:
    h, w = torch.randn(2, 4), torch.empty(0, 4)
    for function in (linear_cross_entropy, linear_log_prob):
        with pytest.raises(IndexError, match="target must be ignore_index=-100 while there are no classes, got 0"):
            function(h, w, torch.tensor([-100, 0]), impl=impl, workspace=workspace)
    with pytest.raises(ValueError, match="k must be at most the number of classes, 0, got 1"):
        linear_topk(h, w, 1)
