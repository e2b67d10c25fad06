"""The GPU's engine against the chunked one: every schedule, shapes that fit no tile, rows that are computed again.

Without a GPU, Triton's interpreter runs the kernels in float32. On a GPU they run in bfloat16, as in use. Errors are
measured against float64 and compared with those of the chunked engine, which has the same operands in float32.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from hebbian_softmax._triton import is_hopper
from hebbian_softmax.loss import chunked
from hebbian_softmax.loss.gpu.schedule import Schedule
from hebbian_softmax.loss.problem import Gradients, Needs, Problem, RowTerms, Scales
from tests.interpreter import interpreted_or_on_gpu, recorded_launches
from tests.operations import Watch

pytest.importorskip("triton", reason="the engine needs Triton")
engine = pytest.importorskip("hebbian_softmax.loss.gpu.engine")
pytestmark = interpreted_or_on_gpu

CUDA = torch.cuda.is_available()
DEVICE, DTYPE = ("cuda", torch.bfloat16) if CUDA else ("cpu", torch.float32)
FACTOR, ROUNDINGS = 4, 2
"""How many times the chunked engine's error is allowed, and how many units in the last place of the kernels' dtype: E,
h times its factor and the result are rounded to it, by at most half a unit each."""
LARGE = 10**9
SCORES = {"scores", "resident", "streamed"}
"""The kernels that compute E: the one for every GPU, and those for H100 and H200."""
slow_if_interpreted = () if CUDA else pytest.mark.slow


def make(
    n: int, d: int, v: int, bias: bool = False, scale: float = 1.0, prior: bool = False, **shape: float
) -> tuple[Problem, Tensor]:
    """Return a problem with an ignored row, and positive scales of its rows; a prior masks every third class.

    ``shape`` is the scale or the softcap of the problem, as ``scale_of_logits`` and ``softcap``.
    """
    h, w = scale * torch.randn(n, d), torch.randn(v, d) / d**0.5
    target = torch.randint(v, (n,))
    additive = None
    if prior:
        additive = (3 * torch.randn(v)).to(DEVICE)
        additive[::3] = -torch.inf
        target = (target // 3 * 3 + 1).clamp(max=v - 1 - (v % 3 == 1))
    if n > 2:
        target[1] = -1
    a = torch.where(target < 0, 0, torch.rand(n) + 0.1)
    b = torch.randn(v).to(DEVICE, DTYPE) if bias else None
    final = shape.get("scale_of_logits", 1.0), shape.get("softcap")
    return Problem(h.to(DEVICE, DTYPE), w.to(DEVICE, DTYPE), b, target.to(DEVICE), additive, *final), a.to(DEVICE)


def chunked_in(
    dtype: torch.dtype, problem: Problem, a: Tensor, b: Tensor, square: Tensor | None = None
) -> tuple[RowTerms, Gradients]:
    """Return what the chunked engine finds in float32 or float64."""
    bias = None if problem.bias is None else problem.bias.to(dtype)
    prior = None if problem.prior is None else problem.prior.to(dtype)
    same = replace(problem, input=problem.input.to(dtype), weight=problem.weight.to(dtype), bias=bias, prior=prior)
    needs = Needs(dtype, dtype, None if bias is None else dtype)
    square = None if square is None else square.to(dtype)
    return chunked.row_terms_and_gradients(same, Scales(a.to(dtype), b.to(dtype), square=square), needs, LARGE)


def check(
    problem: Problem,
    a: Tensor,
    b: Tensor,
    *found: tuple[RowTerms | None, Gradients],
    square: Tensor | None = None,
) -> None:
    """Check all terms that were found, and all gradients; those of some operands may be missing."""
    trusted, exact = (chunked_in(dtype, problem, a, b, square) for dtype in (torch.float32, torch.float64))
    for terms, gradients in found:
        for name in () if terms is None else ("nll", "target_logit", "normaliser"):
            check_one(name, *(getattr(each, name) for each in (terms, trusted[0], exact[0])), torch.float32)
        for name in ("input", "weight", "bias"):
            values = [getattr(each, name) for each in (gradients, trusted[1], exact[1])]
            if values[0] is not None:
                check_one(name, *values, DTYPE, largest_logit(problem))


def largest_logit(problem: Problem) -> float:
    """Return the largest magnitude of a logit: that of the relative error of exp(z), in roundings of z."""
    z = problem.input.double() @ problem.weight.double().T
    z = problem.scale * (z if problem.bias is None else z + problem.bias.clamp(min=-9))
    z = z if problem.prior is None else z + problem.prior.clamp(min=-9)
    return float(z.abs().max()) if z.numel() else 0.0


def check_one(
    name: str, found: Tensor, trusted: Tensor, exact: Tensor, dtype: torch.dtype, logit: float = 0.0, dim: int = -1
) -> None:
    """Check the norm of the error; with ``dim=1`` row by row, relative to the row."""
    over = None if dim < 0 else dim
    error, usual, size = (torch.linalg.vector_norm(x, dim=over) for x in (found - exact, trusted - exact, exact))
    if size.numel():
        error, usual = ((each / size.clamp(min=1e-300)).max() for each in (error, usual))
        roundings = ROUNDINGS * torch.finfo(dtype).eps + logit * torch.finfo(torch.float32).eps
        assert error <= FACTOR * usual + roundings, name


def in_one_pass(
    problem: Problem, a: Tensor, b: Tensor, workspace: int, square: Tensor | None = None
) -> tuple[RowTerms, Gradients]:
    """Return what the engine finds in one pass, or in two where the workspace holds only few rows."""
    return engine.row_terms_and_gradients(problem, Scales(a, b, square=square), all_of(problem), workspace)


def both_schedules(
    problem: Problem, a: Tensor, b: Tensor, workspace: int, square: Tensor | None = None
) -> list[tuple[RowTerms, Gradients]]:
    """Return what the engine finds in one pass, and in two passes with chunks of classes."""
    terms = engine.row_terms(problem, workspace)
    scales = Scales(a, b, square=square)
    return [
        in_one_pass(problem, a, b, workspace, square),
        (terms, engine.gradients(problem, terms, scales, all_of(problem), workspace)),
    ]


def all_of(problem: Problem) -> Needs:
    return Needs(DTYPE, torch.float32, None if problem.bias is None else torch.float32)


@pytest.mark.parametrize(
    ("n", "d", "v", "bias", "workspace"),
    [
        (1, 16, 300, True, LARGE),
        (5, 8, 37, False, LARGE),
        (9, 72, 301, True, LARGE),
        pytest.param(130, 72, 301, True, LARGE, marks=slow_if_interpreted),
        pytest.param(130, 72, 301, False, 300_000, marks=slow_if_interpreted),
        pytest.param(130, 40, 1201, True, 800_000, marks=slow_if_interpreted),
    ],
)
def test_gradients(n: int, d: int, v: int, bias: bool, workspace: int) -> None:
    problem, a = make(n, d, v, bias)
    check(problem, a, a, *both_schedules(problem, a, a, workspace))


@pytest.mark.parametrize(
    ("n", "d", "v", "bias", "workspace", "scale"),
    [
        (5, 8, 37, False, LARGE, 1.0),
        (20, 16, 300, False, LARGE, 30.0),
        pytest.param(130, 72, 301, True, LARGE, 1.0, marks=slow_if_interpreted),
        pytest.param(130, 40, 1201, True, 800_000, 1.0, marks=slow_if_interpreted),
    ],
)
def test_a_prior(n: int, d: int, v: int, bias: bool, workspace: int, scale: float) -> None:
    problem, a = make(n, d, v, bias, scale, prior=True)
    found = both_schedules(problem, a, a, workspace)
    check(problem, a, a, *found)
    for _, gradients in found:
        assert not gradients.weight[::3].any()
        assert gradients.bias is None or not gradients.bias[::3].any()


SHAPES = [
    {"scale_of_logits": 1.7},
    {"softcap": 2.0},
    {"softcap": 1.5, "scale_of_logits": 0.6, "bias": True, "prior": True},
    {"scale_of_logits": 40.0, "bias": True, "prior": True},
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(
    ("n", "d", "v", "workspace"),
    [(7, 8, 301, LARGE), pytest.param(130, 40, 1201, 800_000, marks=slow_if_interpreted)],
)
def test_temperature_and_softcap(n: int, d: int, v: int, workspace: int, shape: dict[str, float]) -> None:
    problem, a = make(n, d, v, **shape)
    check(problem, a, a, *both_schedules(problem, a, a, workspace))


@pytest.mark.parametrize("shape", [{}, {"softcap": 2.0, "scale_of_logits": 0.5, "prior": True}], ids=str)
def test_a_z_loss(shape: dict[str, float]) -> None:
    problem, a = make(9, 24, 301, **shape)
    square = 0.3 * a
    check(problem, a, a, *both_schedules(problem, a, a, LARGE, square), square=square)


def test_a_z_loss_that_cancels_the_softmax() -> None:
    """The target has its gradient all the same."""
    problem, a = make(5, 8, 300)
    normaliser = engine.row_terms(problem, LARGE).normaliser
    square = torch.where(problem.target < 0, 0, -a / normaliser)
    both = both_schedules(problem, a, a, LARGE, square)
    for _, gradients in both:
        expected = torch.zeros_like(gradients.weight)
        counted = problem.target >= 0
        scaled = a[:, None] * problem.input.float()
        expected.index_add_(0, problem.target[counted], -scaled[counted])
        check_one("weight", gradients.weight, expected, expected.double(), DTYPE, largest_logit(problem))


def test_a_weight_may_be_negative() -> None:
    problem, a = make(9, 24, 301)
    sign = torch.where(torch.arange(len(a), device=DEVICE) % 2 == 0, 1.0, -1.0)
    check(problem, a * sign, a * sign, *both_schedules(problem, a * sign, a * sign, LARGE))


def test_logits_are_computed_twice_where_few_rows_fit() -> None:
    problem, a = make(130, 8, 601, bias=True)
    with recorded_launches() as launches:
        found = in_one_pass(problem, a, a, 100_000 * problem.input.element_size())
    assert sum(each.kernel in SCORES for each in launches) == 3  # once for the terms, and for two chunks of rows
    check(problem, a, a, found)


def test_many_chunks_of_rows() -> None:
    problem, a = make(130, 8, 100)
    needs = Needs(DTYPE, torch.float32, None)
    with recorded_launches() as launches:
        found = engine.row_terms_and_gradients(
            problem, Scales(a, a), needs, LARGE, Schedule(rows=128, classes=100, splits=1)
        )
    assert sum(each.kernel == "settle" for each in launches) == 2
    check(problem, a, a, found)


def test_every_class_of_every_chunk_is_in_the_gradient_of_the_input() -> None:
    """Two chunks of 12,800 classes, for which three products of multiples of 8 classes would leave some over."""
    problem, a = make(5, 8, 25_500, prior=True)
    needs = Needs(DTYPE, torch.float32, None)
    workspace = 13_000 * 128 * problem.input.element_size()
    terms = chunked_in(torch.float32, problem, a, a)[0]
    with recorded_launches() as launches:
        found = engine.gradients(problem, terms, Scales(a, a), needs, workspace)
    assert sum(each.kernel in SCORES for each in launches) == 2
    check(problem, a, a, (terms, found))


@pytest.mark.parametrize("scale", [30.0, 3000.0])
def test_logits_too_large_for_the_first_shift_are_made_again(scale: float) -> None:
    problem, a = make(9, 16, 300, bias=True, scale=scale)
    one_pass = in_one_pass(problem, a, a, LARGE)
    assert one_pass[0].nll.max() > 88  # e⁸⁸ overflows in float32.
    check(problem, a, a, one_pass)


@pytest.mark.parametrize("nll", [57.0, 64.0, 85.0])  # Σ E about 2⁸², 2⁹², 2¹²³
def test_products_with_large_rows_stay_in_range(nll: float) -> None:
    """2⁸⁷, the limit of Σ E, times rows of 2³⁸ still fits into float32, and a higher limit would not."""
    problem, a = make(9, 16, 300)
    weight = problem.weight * 2.0**40
    weight[0] = 0  # This class is the target of all rows.
    h = torch.randn_like(problem.input)
    h *= nll / (h.float() @ weight.float().T).amax(dim=1, keepdim=True).to(DTYPE)
    problem = replace(problem, input=h, weight=weight, target=torch.zeros_like(problem.target))
    one_pass = in_one_pass(problem, a, a, LARGE)
    assert ((one_pass[0].nll - nll).abs() < 4).all()
    check(problem, a, a, one_pass)


def test_one_row_made_again_among_others() -> None:
    problem, a = make(9, 16, 300)
    problem.input[7] *= 200
    check(problem, a, a, *both_schedules(problem, a, a, LARGE))


def test_a_sure_target_keeps_its_gradient() -> None:
    """1 - p is 1e-6 to 1e-12, far below the rounding of p."""
    problem, a = make(9, 16, 50)
    pulled = 8 * problem.weight[problem.target.clamp(min=0)].float()
    problem = replace(problem, input=(pulled * (24 / pulled.norm(dim=1, keepdim=True))).to(DTYPE))
    trusted, exact = (chunked_in(dtype, problem, a, a) for dtype in (torch.float32, torch.float64))
    for found in both_schedules(problem, a, a, LARGE):
        check(problem, a, a, found)
        # Row by row, because the surest rows have the least loss and gradient.
        losses = [terms.nll[:, None] for terms, _ in (found, trusted, exact)]
        check_one("nll", *losses, torch.float32, dim=1, logit=24.0)
        check_one("input", *(each.input for _, each in (found, trusted, exact)), DTYPE, dim=1, logit=24.0)


def test_scales_of_normaliser_and_target_may_differ() -> None:
    problem, a = make(9, 24, 130)
    check(problem, a, 0.9 * a, *both_schedules(problem, a, 0.9 * a, LARGE))


def test_all_targets_equal_and_last() -> None:
    problem, a = make(9, 16, 300)
    problem = replace(problem, target=torch.where(problem.target < 0, -1, 299))
    check(problem, a, a, *both_schedules(problem, a, a, LARGE))


@pytest.mark.parametrize("wanted", ["input", "weight", "bias"])
def test_only_what_is_needed(wanted: str) -> None:
    problem, a = make(9, 16, 90, bias=True)
    needs = replace(Needs(None, None, None), **{wanted: torch.float32})
    with Watch() as one_pass, recorded_launches() as launches:
        terms, gradients = engine.row_terms_and_gradients(problem, Scales(a, a), needs, LARGE)
    with Watch() as again:
        second = engine.gradients(problem, terms, Scales(a, a), needs, LARGE)
    for each, watch in ((gradients, one_pass), (second, again)):
        for name in ("input", "weight", "bias"):
            assert (getattr(each, name) is not None) == (name == wanted)
        assert len(watch.products) == (wanted != "bias")  # The kernels make the logits, and the bias's gradient.
    kernels = [each.kernel for each in launches]
    assert ("finish_input" in kernels) == (wanted == "input")
    assert ("column_sums" in kernels) == (wanted == "bias")
    assert all(each.options["SCALE"] == (wanted == "weight") for each in launches if each.kernel == "settle")
    check(problem, a, a, (None, gradients), (None, second))


def test_a_frozen_head_computes_its_logits_once_in_little_memory() -> None:
    """Small chunks of rows cost more only where each of them reads and writes dW."""
    problem, a = make(600, 8, 300)
    workspace = 200 * problem.input.element_size() * 320
    assert Schedule.of_rows(problem, Needs(DTYPE, torch.float32, None), workspace, processors=132) is None
    with recorded_launches(run=False) as launches:
        engine.row_terms_and_gradients(problem, Scales(a, a), Needs(DTYPE, None, None), workspace)
    scores, settle = (sum(each.kernel in names for each in launches) for names in (SCORES, {"settle"}))
    assert scores == settle >= 3


def test_an_impossible_target_has_infinite_loss_and_a_gradient() -> None:
    problem, a = make(6, 8, 20, bias=True)
    problem.bias[3] = -torch.inf
    problem = replace(problem, target=torch.tensor([3, -1, 4, 4, 4, 4], device=DEVICE))
    for terms, gradients in both_schedules(problem, a, a, LARGE):
        assert torch.isinf(terms.nll[0])
        assert torch.isfinite(terms.nll[2:]).all()
        assert torch.isfinite(terms.normaliser).all()
        check(problem, a, a, (None, gradients))


def test_an_empty_batch() -> None:
    problem, a = make(0, 8, 20)
    for terms, gradients in both_schedules(problem, a, a, LARGE):
        assert terms.nll.shape == (0,)
        assert gradients.input.shape == (0, 8)
        assert not gradients.weight.any()


def test_the_same_input_gives_the_same_bits() -> None:
    problem, a = make(130 if CUDA else 9, 24, 260)
    needs = Needs(DTYPE, torch.float32, None)
    runs = [engine.row_terms_and_gradients(problem, Scales(a, a), needs, LARGE) for _ in range(2)]
    first, second = ((terms.nll, gradients.input, gradients.weight) for terms, gradients in runs)
    assert all(torch.equal(*pair) for pair in zip(first, second, strict=True))


def test_no_batch_size_compiles_the_large_kernel_again() -> None:
    with recorded_launches(run=False) as launches:
        for n in (1, 129, 260):
            engine.row_terms(make(n, 8, 100)[0], LARGE)
    one, two, more = (each for each in launches if each.kernel in SCORES)
    assert one.options == two.options == more.options
    assert one.grid <= two.grid <= more.grid


def test_kernels_run_where_the_tensors_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """The current device may be another one, in a model that is spread over GPUs."""
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
    """TMA only reads from multiples of 16 bytes."""
    flat = torch.randn(1 + 300 * 8, device="cuda", dtype=torch.bfloat16)
    w, h, y = flat[1:].view(300, 8), flat[: 20 * 8].view(20, 8), torch.zeros(20, dtype=torch.int64, device="cuda")
    assert engine.available(Problem(h, w.clone(), None, y))
    assert not engine.available(Problem(h, w, None, y))


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
    assert is_hopper.__wrapped__(torch.device("cuda"), engine.SHARED_MEMORY) == fits
