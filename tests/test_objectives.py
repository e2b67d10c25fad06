"""The inner objectives of section 3.3 against autograd, literal loops and float64 optima."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hebbian_softmax import SVM, Euclidean, InnerProduct, SparseSoftmax
from hebbian_softmax.objectives import nearest_rows, resolve_objective
from tests.heads import early_head

RADIUS = 10.0
ALL = [Euclidean(RADIUS), InnerProduct(), SVM(neighbours=5), SparseSoftmax(neighbours=5)]


def problem(k: int = 4, classes: int = 20, features: int = 6, size: float = 1.0) -> tuple[Tensor, ...]:
    weight = torch.randn(classes, features, dtype=torch.float64)
    h = size * torch.randn(k, features, dtype=torch.float64)
    own = torch.randperm(classes)[:k]
    return h, weight[own], own, weight


def literal_nearest(h: Tensor, own: int, weight: Tensor, k: int) -> list[int]:
    distances = [(float((row - h).norm()), j) for j, row in enumerate(weight) if j != own]
    return [j for _, j in sorted(distances)[:k]]


def test_nearest_rows_are_those_of_a_loop_and_never_the_own() -> None:
    h, _, own, weight = problem(k=6)
    h[0] = weight[own[0]]  # the own row would be the nearest of all
    for i, found in enumerate(nearest_rows(h, own, weight, 7)):
        assert found.tolist() == literal_nearest(h[i], int(own[i]), weight, 7)


def test_closed_forms_are_exact() -> None:
    h, rows, own, weight = problem(size=1.0)
    h[0] *= RADIUS / h[0].norm() * 2  # outside the ball
    assert torch.equal(Euclidean()(h, rows, own, weight), h)
    projected = Euclidean(RADIUS)(h, rows, own, weight)
    assert torch.equal(projected[1:], h[1:])
    torch.testing.assert_close(projected[0], h[0] / 2, rtol=1e-12, atol=0)
    torch.testing.assert_close(InnerProduct()(h, rows, own, weight), RADIUS * h / h.norm(dim=1, keepdim=True))
    assert torch.equal(InnerProduct()(0 * h, rows, own, weight), 0 * h)


@pytest.mark.parametrize("objective", [SVM(xi=0.3, epsilon=0.1), SparseSoftmax()])
def test_gradients_are_those_of_autograd_in_float64(objective: SVM | SparseSoftmax) -> None:
    h, _, own, weight = problem()
    near = weight[nearest_rows(h, own, weight, 7)]
    w = torch.randn_like(h).requires_grad_()
    (expected,) = torch.autograd.grad(objective.value(w, h, near).sum(), w)
    torch.testing.assert_close(objective.gradient(w.detach(), h, near), expected, rtol=1e-12, atol=1e-12)


def test_values_are_the_papers() -> None:
    h, _, own, weight = problem(k=1)
    near = weight[nearest_rows(h, own, weight, 7)]
    w = torch.randn_like(h)
    inner = [float(w[0] @ row) for row in near[0]]
    penalty = sum(0.3 * value for value in inner if value > 0.1)
    assert SVM(xi=0.3, epsilon=0.1).value(w, h, near).item() == pytest.approx(float(w[0] @ h[0]) - penalty)
    g_smax = torch.exp(w[0] @ h[0]) / sum(math.exp(value) for value in inner)
    assert SparseSoftmax().value(w, h, near).exp().item() == pytest.approx(float(g_smax), rel=1e-9)


@given(seed=st.integers(0, 10_000), size=st.sampled_from([0.1, 1.0, 5.0, 40.0]), k=st.integers(1, 12))
def test_svm_is_the_literal_loop_and_never_ends_below_its_start(seed: int, size: float, k: int) -> None:
    torch.manual_seed(seed)
    h, rows, own, weight = problem(size=size, classes=9)
    svm = SVM(neighbours=k, xi=0.2, epsilon=0.05, step_size=0.3)
    found = svm(h, rows, own, weight)
    for i in range(len(h)):
        best, start, value = literal_svm(h[i], int(own[i]), weight, k)
        # Around the optimum g is flat to the last bit, and which of two equal points is "best" is rounding's choice.
        torch.testing.assert_close(found[i], best, rtol=1e-6, atol=1e-6)
        near = weight[literal_nearest(h[i], int(own[i]), weight, k)]
        assert svm.value(found[i : i + 1], h[i : i + 1], near[None]).item() == pytest.approx(value, rel=1e-9, abs=1e-9)
        assert value >= start


def literal_svm(h: Tensor, own: int, weight: Tensor, k: int) -> tuple[Tensor, float, float]:
    """One class at a time, one neighbour at a time: 20 steps, the best point kept."""
    near = [weight[j] for j in literal_nearest(h, own, weight, k)]

    def g(w: Tensor) -> float:
        value = float(w @ h)
        for row in near:
            if float(w @ row) > 0.05:
                value -= 0.2 * float(w @ row)
        return value

    def into_ball(w: Tensor) -> Tensor:
        return w if float(w.norm()) <= RADIUS else w * (RADIUS / w.norm())

    w = into_ball(h)
    start = g(w)
    best, highest = w, start
    for _ in range(20):
        direction = h.clone()
        for row in near:
            if float(w @ row) > 0.05:
                direction -= 0.2 * row
        w = into_ball(w + 0.3 * direction)
        if g(w) > highest:
            best, highest = w, g(w)
    return best, start, highest


@pytest.mark.parametrize("size", [0.3, pytest.param(1.0, marks=pytest.mark.slow), 5.0])
def test_smax_rises_and_converges_to_the_float64_optimum(size: float) -> None:
    h, rows, own, weight = problem(size=size, features=4)
    near = weight[nearest_rows(h, own, weight, 6)]
    points = [SparseSoftmax(neighbours=6, steps=steps)(h, rows, own, weight) for steps in (0, 1, 5, 20, 8_000)]
    values = [SparseSoftmax().value(point, h, near) for point in points]
    for lower, higher in itertools.pairwise(values):
        assert bool((higher >= lower - 1e-12).all())
    w = points[-1].requires_grad_()
    (gradient,) = torch.autograd.grad(SparseSoftmax().value(w, h, near).sum(), w)
    # log g is concave, so max_v ∇·(v − w) over the ball bounds how far below the optimum w is.
    gap = RADIUS * gradient.norm(dim=1) - (gradient * w).sum(1)
    assert float(gap.detach().max()) < 1e-5


@given(
    seed=st.integers(0, 10_000),
    size=st.sampled_from([0.0, 1e-6, 1.0, 9.9, 1e3, 1e15]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    objective=st.sampled_from(ALL),
)
def test_nothing_leaves_the_ball(seed, size, dtype, objective) -> None:
    torch.manual_seed(seed)
    h, rows, own, weight = (part.to(dtype) if part.is_floating_point() else part for part in problem(size=size))
    found = objective(h, rows, own, weight)
    assert bool(torch.isfinite(found).all())
    assert float(found.double().norm(dim=1).max()) <= RADIUS * (1 + 1e-6 if dtype == torch.float32 else 1 + 1e-14)


@pytest.mark.parametrize("objective", [SVM(neighbours=5), SparseSoftmax(neighbours=5)])
def test_chunks_change_nothing(objective) -> None:
    h, rows, own, weight = problem(k=9)
    in_chunks = replace(objective, workspace=2 * weight.numel())
    torch.testing.assert_close(in_chunks(h, rows, own, weight), objective(h, rows, own, weight), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("objective", ["svm", "smax"])
def test_fewer_rows_than_neighbours_and_a_lonely_class(objective: str) -> None:
    h, rows, own, weight = problem(k=2, classes=3)
    assert torch.isfinite(resolve_objective(objective)(h, rows, own, weight)).all()
    lonely = resolve_objective(objective)(h[:1], rows[:1], torch.tensor([0]), weight[:1])
    torch.testing.assert_close(lonely, RADIUS * h[:1] / h[:1].norm())


@pytest.mark.parametrize("objective", ["l2", "ip", "svm", "smax"])
def test_the_head_mixes_the_objectives_answer(objective: str) -> None:
    head = early_head(4, 6, gamma=0.5, limit=9, objective=objective, write="literal", dtype=torch.float64)
    head.counts.fill_(2)  # λ = 0.5
    old, h = head.weight.detach().clone(), torch.randn(2, 4, dtype=torch.float64)
    classes = torch.tensor([1, 4])
    target = resolve_objective(objective)(h, old[classes], classes, old)
    head.memorize(h, classes)
    torch.testing.assert_close(head.weight[classes].detach(), 0.5 * target + 0.5 * old[classes])


def test_a_callable_of_ones_own() -> None:
    calls = []

    def objective(h: Tensor, rows: Tensor, classes: Tensor, weight: Tensor) -> Tensor:
        calls.append((h.shape, rows.shape, classes.tolist(), weight.shape))
        return -h

    head = early_head(4, 6, gamma=0.5, limit=9, objective=objective, write="literal")
    h = torch.randn(3, 4)
    head.memorize(h, torch.tensor([5, 0, 5]))
    assert calls == [((2, 4), (2, 4), [0, 5], (6, 4))]
    torch.testing.assert_close(head.weight[0].detach(), -h[1])
    torch.testing.assert_close(head.weight[5].detach(), -(h[0] + h[2]) / 2)


def test_bad_objectives() -> None:
    with pytest.raises(ValueError, match="l2, ip, svm, smax"):
        resolve_objective("euclid")
    with pytest.raises(TypeError, match="callable"):
        resolve_objective(3)
    for options in ({"neighbours": 0}, {"steps": -1}, {"radius": 0.0}):
        with pytest.raises(ValueError, match=next(iter(options))):
            SVM(**options)
