"""The kernels of the chunked engine against its torch operations: the same terms and gradients of every problem.

Without a GPU, Triton's interpreter runs the kernels in float32. On a GPU they run in float32, bfloat16 and float16.
Errors are measured against float64, and compared with those of the torch operations.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from hebbian_softmax._triton import kernels_on_cpu
from hebbian_softmax.loss import chunked
from hebbian_softmax.loss.problem import Gradients, Needs, Problem, RowTerms, Scales
from tests.interpreter import interpreted_or_on_gpu, quiet, recorded_launches

pytest.importorskip("triton", reason="the kernels need Triton")
pytestmark = [interpreted_or_on_gpu, *quiet]

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
DTYPES = [torch.float32, torch.bfloat16, torch.float16] if CUDA else [torch.float32]
LARGE = 10**8
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bias": {"bias": True},
    "prior": {"prior": True},
    "temperature": {"scale": 0.5},
    "softcap": {"softcap": 3.0},
    "large softcap": {"softcap": 1e4},
    "z-loss": {"square": True},
    "all": {"bias": True, "prior": True, "scale": 2.0, "softcap": 5.0, "square": True},
}


def make(n: int, d: int, v: int, dtype: torch.dtype, **options: Any) -> tuple[Problem, Scales]:
    """Return a problem with an ignored row, and the scales of its rows; a prior masks every third class."""
    h, w = torch.randn(n, d), torch.randn(v, d) / d**0.5
    target = torch.randint(v, (n,))
    prior = None
    if options.get("prior"):
        prior = 3 * torch.randn(v)
        prior[::3] = -torch.inf
        target = (target // 3 * 3 + 1).clamp(max=v - 1 - (v % 3 == 1))
    if n > 2:
        target[1] = -1
    b = torch.where(target < 0, 0, torch.rand(n) + 0.1)
    square = torch.where(target < 0, 0, 0.01 * torch.rand(n)) if options.get("square") else None
    bias = torch.randn(v).to(DEVICE, dtype) if options.get("bias") else None
    problem = Problem(
        h.to(DEVICE, dtype),
        w.to(DEVICE, dtype),
        bias,
        target.to(DEVICE),
        None if prior is None else prior.to(DEVICE),
        options.get("scale", 1.0),
        options.get("softcap"),
    )
    a = b * (torch.rand(n) + 0.5)
    return problem, Scales(a.to(DEVICE), b.to(DEVICE), square=None if square is None else square.to(DEVICE))


def wider(problem: Problem, scales: Scales) -> tuple[Problem, Scales]:
    """Return the same in float64."""

    def wide(value: Any) -> Any:
        return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value

    return tuple(replace(each, **{k: wide(x) for k, x in vars(each).items()}) for each in (problem, scales))


def needs(problem: Problem, dtype: torch.dtype) -> Needs:
    return Needs(dtype, dtype, None if problem.bias is None else dtype)


def assert_as_exact(found: Any, by_torch: Any, truth: Any, dtype: torch.dtype) -> None:
    """Check that the kernels' error is at most a few times that of torch, or a few units in the last place."""
    for field, true in vars(truth).items():
        ours, theirs = getattr(found, field), getattr(by_torch, field)
        if true is None:
            assert ours is None
            continue
        ours, theirs, true = (each.double().cpu() for each in (ours, theirs, true))
        finite = true.isfinite()
        torch.testing.assert_close(ours[~finite], true[~finite], rtol=0, atol=0, equal_nan=True)
        errors = [torch.where(finite, each - true, 0).abs().max() for each in (ours, theirs)]
        unit = torch.finfo(dtype).eps * torch.where(finite, true, 0).abs().max()
        assert errors[0] <= 3 * errors[1] + 4 * unit, (field, errors, unit)


def on_cpu(*values: Any) -> tuple[Any, ...]:
    """Return problems and scales on the CPU, where the engine uses torch's operations unless kernels are allowed."""

    def move(value: Any) -> Any:
        return value.cpu() if isinstance(value, Tensor) else value

    fields = [{name: move(value) for name, value in vars(each).items() if name != "column"} for each in values]
    return tuple(type(each)(**own) for each, own in zip(values, fields, strict=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("n", "d", "v", "options"), [*((5, 8, 37, each) for each in OPTIONS), (3, 16, 5000, "all"), (1, 8, 1, "plain")]
)
def test_terms_and_gradients(n: int, d: int, v: int, options: str, dtype: torch.dtype) -> None:
    problem, scales = make(n, d, v, dtype, **OPTIONS[options])
    wide_problem, wide_scales = wider(problem, scales)

    def one_pass(problem: Problem, scales: Scales) -> tuple[RowTerms, Gradients]:
        return chunked.row_terms_and_gradients(problem, scales, needs(problem, torch.float32), LARGE)

    truth = one_pass(wide_problem, wide_scales)
    plain = one_pass(*on_cpu(problem, scales))
    with kernels_on_cpu(), recorded_launches() as launches:
        found = one_pass(problem, scales)
        terms = chunked.row_terms(problem, LARGE, entropy=True)
        again = chunked.gradients(problem, terms, scales, needs(problem, torch.float32), LARGE)
    assert {"row_sums", "finish_rows"} <= {launch.kernel for launch in launches}
    for ours, theirs, true in zip(found, plain, truth, strict=True):
        assert_as_exact(ours, theirs, true, dtype)
    assert_as_exact(again, plain[1], truth[1], dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", ["plain", "all"])
@pytest.mark.parametrize("workspace", [LARGE, 3000])
def test_entropy(workspace: int, options: str, dtype: torch.dtype) -> None:
    problem, scales = make(5, 8, 301, dtype, **OPTIONS[options])
    scales = replace(scales, entropy=scales.target * 0.5)
    wide_problem, wide_scales = wider(problem, scales)

    def both(problem: Problem, scales: Scales) -> tuple[RowTerms, Gradients]:
        terms = chunked.row_terms(problem, workspace, entropy=True)
        return terms, chunked.gradients(problem, terms, scales, needs(problem, torch.float32), workspace)

    truth, plain = both(wide_problem, wide_scales), both(*on_cpu(problem, scales))
    with kernels_on_cpu():
        found = both(problem, scales)
    for ours, theirs, true in zip(found, plain, truth, strict=True):
        assert_as_exact(ours, theirs, true, dtype)


def test_an_unlikely_target_does_not_blur_the_normaliser() -> None:
    h, w = torch.ones(1, 1, device=DEVICE), torch.tensor([[333.3337], [-777.7771]], device=DEVICE)
    problem = Problem(h, w, None, torch.ones(1, dtype=torch.int64, device=DEVICE))
    with kernels_on_cpu():
        terms = chunked.row_terms(problem, LARGE, entropy=True)
    assert terms.entropy is not None
    assert float(terms.entropy) == 0
    assert float(terms.normaliser) == float(w[0])


def test_tensors_without_memory_of_their_own_take_torch() -> None:
    class Wrapped(Tensor):
        pass

    problem, scales = make(3, 8, 37, torch.float32)
    problem = replace(problem, weight=problem.weight.as_subclass(Wrapped))
    with kernels_on_cpu(), recorded_launches() as launches:
        chunked.row_terms_and_gradients(problem, scales, needs(problem, torch.float32), LARGE)
    assert not launches


@pytest.mark.parametrize("bad", [-torch.inf, torch.inf, torch.nan])
@pytest.mark.parametrize("where", ["target", "another", "all"])
def test_rows_without_a_distribution(bad: float, where: str) -> None:
    problem, scales = make(4, 8, 50, torch.float32, bias=True)
    assert problem.bias is not None
    problem.target[:] = 7
    problem.bias[{"target": slice(7, 8), "another": slice(9, 10), "all": slice(None)}[where]] = bad
    want = needs(problem, torch.float32)
    plain = chunked.row_terms_and_gradients(*on_cpu(problem, scales), want, LARGE)
    with kernels_on_cpu():
        found = chunked.row_terms_and_gradients(problem, scales, want, LARGE)
    for ours, theirs in zip(found, plain, strict=True):
        for field, value in vars(theirs).items():
            if value is not None:
                torch.testing.assert_close(getattr(ours, field).cpu(), value, rtol=1e-5, atol=1e-5, equal_nan=True)
