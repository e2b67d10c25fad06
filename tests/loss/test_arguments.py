"""Refused arguments, empty batches, and the implementation that ``auto`` takes."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

from hebbian_softmax import linear_cross_entropy, linear_log_prob, linear_topk
from tests.closeness import assert_exact
from tests.heads import early_head
from tests.loss.cases import every_engine, make, ours, with_gradients
from tests.operations import Watch

H, W, Y = torch.randn(3, 4), torch.randn(6, 4), torch.tensor([0, 5, 2])
MANY = 2**20 // 3 + 1
"""With this many classes, three rows have too many logits for ``auto`` to compute all of them at once."""
BAD = [
    ({"input": [1.0]}, TypeError, "input must be a tensor, got list"),
    ({"input": torch.ones(3, 4, dtype=torch.int64)}, TypeError, "input must be floating point, got torch.int64"),
    ({"input": torch.randn(3, 5)}, ValueError, r"input must have shape \(4,\) or \(N, 4\).*got \(3, 5\)"),
    ({"input": torch.randn(1, 3, 4)}, ValueError, r"got \(1, 3, 4\)"),
    ({"linear_weight": torch.randn(6)}, ValueError, r"linear_weight must have shape \(classes, features\), got \(6,\)"),
    ({"linear_weight": W.double()}, TypeError, "linear_weight must have the dtype of input, torch.float32, got"),
    ({"linear_weight": torch.randn(6, 4, device="meta")}, ValueError, "device of input, cpu, got meta"),
    ({"linear_bias": torch.randn(5)}, ValueError, r"linear_bias must have shape \(6,\), got \(5,\)"),
    ({"target": torch.tensor([0, 1])}, ValueError, r"target must have shape \(3,\).*got \(2,\)"),
    ({"target": torch.rand(3)}, TypeError, "class indices of an integer dtype, got torch.float32"),
    ({"target": torch.tensor([0, 6, 1])}, IndexError, r"target must be in \[0, 5\] or ignore_index=-100, got 6"),
    ({"target": torch.tensor([0, -1, 1])}, IndexError, "got -1"),
    ({"weight": torch.rand(5)}, ValueError, r"weight must have shape \(6,\), .*got \(5,\)"),
    ({"weight": torch.rand(6).requires_grad_()}, ValueError, "weight must not require a gradient"),
    ({"weight": torch.ones(6, dtype=torch.int64)}, TypeError, "weight must be floating point"),
    ({"reduction": "avg"}, ValueError, "reduction must be .* got 'avg'"),
    ({"ignore_index": 0.5}, TypeError, "ignore_index must be an integer, got 0.5"),
    ({"label_smoothing": 1.5}, ValueError, r"label_smoothing must be in \[0, 1\], got 1.5"),
    ({"impl": "fast"}, ValueError, "impl must be one of auto, reference, chunked, triton, got 'fast'"),
    ({"workspace": 0}, ValueError, "workspace must be at least 1, got 0"),
    ({"workspace": 1e6}, TypeError, "workspace must be an integer"),
]


@pytest.mark.parametrize(("change", "error", "match"), BAD, ids=[str(i) for i in range(len(BAD))])
def test_refused(change, error, match) -> None:
    with pytest.raises(error, match=match):
        linear_cross_entropy(**({"input": H, "linear_weight": W, "target": Y, "impl": "chunked"} | change))


def test_triton_says_what_it_needs() -> None:
    with pytest.raises(RuntimeError, match=r"needs a CUDA device of capability 9\.0 or more with 210 KiB of shared"):
        linear_cross_entropy(H, W, Y, impl="triton")


def test_the_others_refuse_alike() -> None:
    for function, argument, error, match in (
        (linear_log_prob, torch.tensor(1), ValueError, "target must have shape"),
        (linear_log_prob, torch.tensor([6, 0, 0]), IndexError, "got 6"),
        (linear_topk, 7, ValueError, "k must be at most the number of classes, 6, got 7"),
        (linear_topk, 0, ValueError, "k must be at least 1, got 0"),
    ):
        with pytest.raises(error, match=match):
            function(H, W, argument)


@every_engine
@pytest.mark.parametrize("n", [0, 5])
def test_an_empty_or_ignored_batch_is_that_of_torch(impl, device, n) -> None:
    case = make(n, 16, 30, device=device, dtype=torch.bfloat16, bias=True)
    case.target.fill_(-100)
    for reduction, value in (("mean", math.nan), ("sum", 0.0), ("none", [0.0] * n)):
        loss, *gradients = with_gradients(ours(case, impl=impl, reduction=reduction), case)
        assert loss.tolist() == pytest.approx(value, nan_ok=True)
        assert not any(each.any() for each in gradients)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("classes", [6, MANY], ids=["reference", "chunked"])
def test_the_layer_has_no_nan_for_it(classes: int, weighted: bool) -> None:
    head = early_head(4, classes, gamma=0.1, limit=5, bias=True)
    weight = torch.zeros(classes) if weighted else None
    loss = head.loss(H, Y if weighted else torch.full((3,), -100), weight=weight, remember=False)
    loss.backward()
    assert loss.item() == 0
    assert not head.weight.grad.any()
    assert not head.bias.grad.any()


@pytest.mark.parametrize("classes", [6, MANY], ids=["reference", "chunked"])
def test_the_layer_refuses_alike(classes: int) -> None:
    """The implementation does not matter."""
    head = early_head(4, classes, gamma=0.1, limit=5)
    for options, error, match in (
        ({"label_smoothing": -0.1}, ValueError, r"label_smoothing must be in \[0, 1\], got -0.1"),
        ({"reduction": "avg"}, ValueError, "reduction must be .* got 'avg'"),
        ({"weight": torch.rand(7)}, ValueError, rf"weight must have shape \({classes},\), .*got \(7,\)"),
        ({"weight": torch.ones(classes, dtype=torch.int64)}, TypeError, "weight must be floating point"),
        ({"weight": torch.rand(classes).requires_grad_()}, ValueError, "weight must not require a gradient"),
    ):
        with pytest.raises(error, match=match):
            head.loss(H, Y, remember=False, **options)
    with pytest.raises(TypeError, match=r"must have the dtype of the head's weight, torch.float32, got torch.float64"):
        head.loss(H.double(), Y, remember=False)
    with torch.autocast("cpu", torch.bfloat16):
        head.loss(H.bfloat16(), Y, remember=False)


def test_the_layer_uses_tiles() -> None:
    rows, classes = 128, 2**13 + 1
    head = early_head(4, classes, gamma=0.1, limit=5, bias=True).double()
    h = torch.randn(2, rows // 2, 4, dtype=torch.float64, requires_grad=True)
    y = torch.randint(classes, (2, rows // 2))
    y[0, :9] = -100
    logits = head(h).reshape(rows, classes).detach()
    for reduction in ("mean", "sum", "none"):
        for smoothing in (0.0, 0.1):
            with Watch() as watch:
                found = head.loss(h, y, reduction=reduction, label_smoothing=smoothing, remember=False)
            assert watch.largest < logits.numel() * 8
            expected = F.cross_entropy(logits, y.flatten(), reduction=reduction, label_smoothing=smoothing)
            torch.testing.assert_close(found, expected.view_as(y) if reduction == "none" else expected)


def test_what_auto_takes() -> None:
    half, full = torch.bfloat16, torch.float32
    for rows, classes, dtype, at_once in (
        (3, 6, full, True),
        (128, 2**13, full, True),
        (128, 2**13 + 1, full, False),
        (128, 2**9, half, True),
        (128, 2**14, half, False),
        (16, 2**14, half, True),
    ):
        h, w, y = torch.randn(rows, 4), torch.randn(classes, 4), torch.zeros(rows, dtype=torch.int64)
        with Watch() as watch:
            linear_cross_entropy(h.to(dtype), w.to(dtype), y)
        # All logits at once are held twice, as they are and as log-probabilities.
        assert (watch.most >= 2 * 4 * rows * classes) == at_once, (rows, classes, dtype)
    linear_cross_entropy(H.to("meta"), W.to("meta"), Y.to("meta"))


def test_triton_is_not_imported_with_the_library() -> None:
    code = "import sys, hebbian_softmax; print('triton' in sys.modules, 'torch._dynamo' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["False", "False"]


@pytest.mark.parametrize("impl", ["chunked", "reference", "auto"])
def test_no_ignore_index_is_torchs_own(impl: str) -> None:
    """None is the default of torch 2.13's function, and means -100 there."""
    y = torch.tensor([1, -100, 4])
    expected = F.cross_entropy(H.double() @ W.double().T, y)
    assert_exact(linear_cross_entropy(H, W, y, ignore_index=None, impl=impl), expected)
    log_prob, _ = linear_log_prob(H, W, y, ignore_index=None, impl=impl)
    assert_exact(-log_prob.sum() / 2, expected)
