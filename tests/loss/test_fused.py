"""The fused engine against the chunked one in float64: every schedule, shapes that fit nothing, rows made again.

Without a GPU the kernels run in Triton's interpreter, in float32, which it knows; on a GPU in bfloat16, as in use.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from hebbian_softmax.loss import chunked
from hebbian_softmax.loss.problem import Gradients, Needs, Problem, RowTerms

pytest.importorskip("triton", reason="the fused engine needs Triton")
fused = pytest.importorskip("hebbian_softmax.loss.fused")
fused_rows = pytest.importorskip("hebbian_softmax.loss.fused_rows")

CUDA = torch.cuda.is_available()
DEVICE, DTYPE = ("cuda", torch.bfloat16) if CUDA else ("cpu", torch.float32)
TOLERANCE = 6e-3 if CUDA else 3e-6  # a rounding of E, of h times its factor, and of the result
LARGE = 10**9


def make(n: int, d: int, v: int, bias: bool = False, scale: float = 1.0) -> tuple[Problem, Tensor]:
    """A problem with an ignored row, and positive scales of its rows."""
    h, w = scale * torch.randn(n, d), torch.randn(v, d) / d**0.5
    target = torch.randint(v, (n,))
    if n > 2:
        target[1] = -1
    a = torch.where(target < 0, 0, torch.rand(n) + 0.1)
    b = torch.randn(v).to(DEVICE, DTYPE) if bias else None
    return Problem(h.to(DEVICE, DTYPE), w.to(DEVICE, DTYPE), b, target.to(DEVICE)), a.to(DEVICE)


def exact(problem: Problem, a: Tensor, b: Tensor) -> tuple[RowTerms, Gradients]:
    wide = None if problem.bias is None else problem.bias.double()
    double = Problem(problem.input.double(), problem.weight.double(), wide, problem.target)
    needs = Needs(torch.float64, torch.float64, None if wide is None else torch.float64)
    return chunked.row_terms_and_gradients(double, a.double(), b.double(), needs, LARGE)


def check(
    found: tuple[RowTerms, Gradients], expected: tuple[RowTerms, Gradients], tolerance: float = TOLERANCE
) -> None:
    (terms, gradients), (exact_terms, exact_gradients) = found, expected
    assert close(terms.nll, exact_terms.nll, 1e-6)
    assert close(terms.target_logit, exact_terms.target_logit, 1e-6)
    assert close(terms.normaliser, exact_terms.normaliser, 1e-6)
    for name in ("input", "weight", "bias"):
        value, right = getattr(gradients, name), getattr(exact_gradients, name)
        assert (value is None) == (right is None), name
        if value is not None:
            assert close(value, right, tolerance), name


def close(value: Tensor, right: Tensor, tolerance: float) -> bool:
    return bool((value.double() - right).norm() <= tolerance * right.norm())


def both_schedules(problem: Problem, a: Tensor, b: Tensor, workspace: int) -> list[tuple[RowTerms, Gradients]]:
    """In one pass, and in two with chunks of classes."""
    needs = Needs(DTYPE, torch.float32, None if problem.bias is None else torch.float32)
    terms = fused.row_terms(problem, workspace)
    return [
        fused.row_terms_and_gradients(problem, a, b, needs, workspace),
        (terms, fused.gradients(problem, terms, a, b, needs, workspace)),
    ]


@pytest.mark.parametrize("workspace", [LARGE, 800_000])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("n", "d", "v"), [(1, 16, 300), (5, 8, 37), (300, 72, 701), (130, 40, 1201)])
def test_gradients(n: int, d: int, v: int, bias: bool, workspace: int) -> None:
    problem, a = make(n, d, v, bias)
    for found in both_schedules(problem, a, a, workspace):
        check(found, exact(problem, a, a))


def test_many_chunks_of_rows() -> None:
    problem, a = make(1290, 8, 200)
    needs = Needs(DTYPE, torch.float32, None)
    one = fused.row_terms_and_gradients(problem, a, a, needs, LARGE)
    several = fused.row_terms_and_gradients(problem, a, a, needs, 900_000)
    check(one, exact(problem, a, a))
    check(several, exact(problem, a, a))
    assert torch.equal(one[0].nll, several[0].nll)


def test_every_class_of_every_chunk_is_in_the_gradient_of_the_input() -> None:
    """Two chunks of 12,800 classes, for which three products of multiples of 8 classes would leave some over."""
    problem, a = make(5, 8, 25_500)
    needs = Needs(DTYPE, torch.float32, None)
    workspace = 13_000 * 128 * problem.input.element_size()
    terms = fused.row_terms(problem, workspace)
    check((terms, fused.gradients(problem, terms, a, a, needs, workspace)), exact(problem, a, a))


@pytest.mark.parametrize("scale", [30.0, 3000.0])
def test_logits_too_large_for_the_first_shift_are_made_again(scale: float) -> None:
    problem, a = make(40, 16, 300, bias=True, scale=scale)
    one_pass, _ = both_schedules(problem, a, a, LARGE)
    assert one_pass[0].nll.max() > 88  # e⁸⁸ would overflow
    check(one_pass, exact(problem, a, a), max(TOLERANCE, 1e-6 * scale))


@pytest.mark.parametrize("nll", [57.0, 64.0, 85.0])  # Σ E about 2⁸², 2⁹², 2¹²³
def test_products_with_large_rows_stay_in_range(nll: float) -> None:
    """2⁸⁷, the limit of Σ E, times rows of 2³⁸ still fits into float32, and a higher limit would not."""
    problem, a = make(64, 16, 300)
    weight = problem.weight * 2.0**40
    weight[0] = 0  # the target of all
    h = torch.randn_like(problem.input)
    h *= nll / (h.float() @ weight.float().T).amax(dim=1, keepdim=True).to(DTYPE)
    problem = replace(problem, input=h, weight=weight, target=torch.zeros_like(problem.target))
    one_pass, _ = both_schedules(problem, a, a, LARGE)
    assert ((one_pass[0].nll - nll).abs() < 4).all()
    check(one_pass, exact(problem, a, a), max(TOLERANCE, 1e-4))


def test_one_row_made_again_among_others() -> None:
    problem, a = make(200, 16, 300)
    h = problem.input.clone()
    h[7] *= 200
    problem = replace(problem, input=h)
    for found in both_schedules(problem, a, a, LARGE):
        check(found, exact(problem, a, a), max(TOLERANCE, 1e-4))


def test_a_sure_target_keeps_its_gradient() -> None:
    """1 - p is 1e-6 to 1e-12, far below the rounding of p."""
    problem, a = make(20, 16, 50)
    pulled = 8 * problem.weight[problem.target.clamp(min=0)].float()
    problem = replace(problem, input=(pulled * (24 / pulled.norm(dim=1, keepdim=True))).to(DTYPE))
    expected = exact(problem, a, a)
    for found in both_schedules(problem, a, a, LARGE):
        assert ((found[0].nll - expected[0].nll).abs() <= 1e-4 * expected[0].nll).all()
        dh, right = found[1].input, expected[1].input
        assert dh is not None
        assert right is not None  # row by row, since the surest have the least gradient
        assert ((dh.double() - right).norm(dim=1) <= max(TOLERANCE, 1e-3) * right.norm(dim=1)).all()
        check(found, expected, max(TOLERANCE, 1e-4))


def test_scales_of_normaliser_and_target_may_differ() -> None:
    problem, a = make(50, 24, 130)
    for found in both_schedules(problem, a, 0.9 * a, LARGE):
        check(found, exact(problem, a, 0.9 * a))


def test_all_targets_equal_and_last() -> None:
    problem, a = make(70, 16, 300)
    problem = replace(problem, target=torch.where(problem.target < 0, -1, 299))
    for found in both_schedules(problem, a, a, LARGE):
        check(found, exact(problem, a, a))


@pytest.mark.parametrize("wanted", ["input", "weight", "bias"])
def test_only_what_is_needed(wanted: str) -> None:
    problem, a = make(30, 16, 90, bias=True)
    needs = replace(Needs(None, None, None), **{wanted: torch.float32})
    _, gradients = fused.row_terms_and_gradients(problem, a, a, needs, LARGE)
    _, expected = exact(problem, a, a)
    for name in ("input", "weight", "bias"):
        value = getattr(gradients, name)
        assert (value is not None) == (name == wanted)
        if value is not None:
            assert close(value, getattr(expected, name), TOLERANCE)


def test_an_impossible_target_has_infinite_loss_and_a_gradient() -> None:
    problem, a = make(6, 8, 20, bias=True)
    assert problem.bias is not None
    target = problem.target.clone()
    target[0] = 3
    bias = problem.bias.clone()
    bias[3] = -torch.inf
    problem = replace(problem, target=target.where(target == -1, torch.where(target == 3, 3, 4)), bias=bias)
    expected = exact(problem, a, a)[1]
    for terms, gradients in both_schedules(problem, a, a, LARGE):
        assert torch.isinf(terms.nll[0])
        assert torch.isfinite(terms.nll[2:]).all()
        assert torch.isfinite(terms.normaliser).all()
        for name in ("input", "weight", "bias"):
            assert close(getattr(gradients, name), getattr(expected, name), TOLERANCE), name


def test_an_empty_batch() -> None:
    problem, a = make(0, 8, 20)
    for terms, gradients in both_schedules(problem, a, a, LARGE):
        assert terms.nll.shape == (0,)
        assert gradients.input is not None
        assert gradients.input.shape == (0, 8)
        assert gradients.weight is not None
        assert not gradients.weight.any()


def test_the_same_input_gives_the_same_bits() -> None:
    problem, a = make(300, 24, 500)
    needs = Needs(DTYPE, torch.float32, None)
    first, second = (fused.row_terms_and_gradients(problem, a, a, needs, LARGE) for _ in range(2))
    assert torch.equal(first[0].nll, second[0].nll)
    for one, two in ((first[1].input, second[1].input), (first[1].weight, second[1].weight)):
        assert one is not None
        assert two is not None
        assert torch.equal(one, two)


def test_no_batch_size_compiles_the_large_kernel_again(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[tuple[int, dict[str, object]]] = []
    scores = fused_rows.kernels.scores

    class Spy:
        def __getitem__(self, grid):
            def launch(*args, **constants):
                used.append((*grid, constants))
                return scores[grid](*args, **constants)

            return launch

    monkeypatch.setattr(fused_rows.kernels, "scores", Spy())
    for n in (1, 129, 260):
        fused.row_terms(make(n, 8, 100)[0], LARGE)
    (one, constants), (two, again), (more, last) = used
    assert constants == again == last
    assert one < two <= more


def test_kernels_run_where_the_tensors_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not on the current device, which is another one in a model spread over GPUs."""
    entered: list[Tensor] = []

    @contextmanager
    def device_of(tensor: Tensor):
        entered.append(tensor)
        yield

    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    problem, a = make(3, 8, 20)
    both_schedules(problem, a, a, LARGE)
    assert len(entered) >= 3
    assert all(each is problem.input for each in entered)


@pytest.mark.gpu
def test_a_part_of_a_flat_buffer_is_left_to_the_other_engine() -> None:
    """TMA reads from multiples of 16 bytes only."""
    flat = torch.randn(1 + 300 * 8, device="cuda", dtype=torch.bfloat16)
    w, h, y = flat[1:].view(300, 8), flat[: 20 * 8].view(20, 8), torch.zeros(20, dtype=torch.int64, device="cuda")
    assert fused.available(Problem(h, w.clone(), None, y))
    assert not fused.available(Problem(h, w, None, y))


@pytest.mark.parametrize(
    ("card", "fits"),
    [((9, 227), True), ((10, 227), True), ((9, None), True), ((8, 227), False), ((12, 99), False)],
    ids=["H200", "B200", "a torch that does not tell", "Ampere", "a desktop card of a later capability"],
)
def test_cards_that_the_kernels_do_not_fit_on(
    card: tuple[int, int | None], fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    major, shared = card
    properties = {"major": major} | ({} if shared is None else {"shared_memory_per_block_optin": shared * 1024})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(**properties))
    assert fused._fits.__wrapped__(torch.device("cuda")) == fits
