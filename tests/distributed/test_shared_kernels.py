"""The GPU's engine on ranks that share the rows of the matrix, against the chunked engine in one process.

Without a GPU the ranks interpret the kernels in float32. Ranks that share one GPU run them in bfloat16.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from hebbian_softmax.loss.checks import Options
from hebbian_softmax.loss.problem import Gradients, Needs, Problem, RowTerms, Scales
from hebbian_softmax.loss.ranks import join_gradients, local_needs
from hebbian_softmax.rows import RowPart
from tests.distributed.pool import Pool
from tests.interpreter import interpreted_or_on_gpu

pytest.importorskip("triton", reason="the engine needs Triton")
pytestmark = interpreted_or_on_gpu


@dataclass(frozen=True)
class Shared:
    """A problem of tests/loss/test_gpu_engine.py, and the rows of each rank."""

    problem: Problem
    a: Tensor
    b: Tensor
    sizes: tuple[int, ...]
    workspace: int = 10**9
    square: Tensor | None = None
    rows: int | None = None
    """The rows of the batch in a chunk, if not those of the workspace."""


def part_of(shared: Shared) -> Problem:
    """Return the problem of this rank."""
    whole = shared.problem
    start = sum(shared.sizes[: dist.get_rank()])
    some = slice(start, start + shared.sizes[dist.get_rank()])
    weight, bias = whole.weight[some], None if whole.bias is None else whole.bias[some]
    options = Options(prior=whole.prior, temperature=1 / whole.scale, softcap=whole.softcap)
    operands = whole.input, weight, bias, whole.target
    return Problem.of(*operands, whole.input.dtype, options, RowPart.of(weight.contiguous()))


def run(shared: Shared) -> list[tuple[RowTerms, Gradients]]:
    """Return the terms and gradients of this rank, in one pass and in two."""
    warnings.filterwarnings("ignore", category=DeprecationWarning)  # of numpy, in Triton's interpreter
    warnings.filterwarnings("ignore", category=RuntimeWarning)
    from hebbian_softmax.loss.gpu import engine
    from hebbian_softmax.loss.gpu.schedule import Schedule

    problem = part_of(shared)
    scales = Scales(shared.a, shared.b, square=shared.square)
    needs = Needs(problem.input.dtype, torch.float32, None if problem.bias is None else torch.float32)
    own = local_needs(problem, needs)
    schedule = None if shared.rows is None else Schedule(shared.rows, problem.weight.shape[0], 1)
    terms, gradients = engine.row_terms_and_gradients(problem, scales, own, shared.workspace, schedule)
    again = engine.row_terms(problem, shared.workspace)
    second = engine.gradients(problem, again, scales, own, shared.workspace)
    both = (terms, gradients), (again, second)
    return [(each, join_gradients(problem, needs, these)) for each, these in both]


def joined(ranks: list[tuple[RowTerms, Gradients]]) -> tuple[RowTerms, Gradients]:
    """Return the results of all ranks as one, after checking that they agree."""
    terms, first = ranks[0]
    for other, gradients in ranks[1:]:
        for name in ("nll", "target_logit", "normaliser"):
            assert torch.equal(getattr(other, name), getattr(terms, name))
        assert torch.equal(gradients.input, first.input)
    weight = torch.cat([each.weight for _, each in ranks])
    return terms, Gradients(first.input, weight, None if first.bias is None else torch.cat([g.bias for _, g in ranks]))


def both_ways(pool: Pool, shared: Shared) -> list[tuple[RowTerms, Gradients]]:
    found = pool.run(len(shared.sizes), run, shared)
    return [joined([rank[way] for rank in found]) for way in range(2)]


def check(pool: Pool, *all_shared: Shared) -> None:
    from tests.loss.test_gpu_engine import check as check_with_chunked

    for shared in all_shared:
        both = both_ways(pool, shared)
        check_with_chunked(shared.problem, shared.a, shared.b, *both, square=shared.square)


def shared(n: int, d: int, v: int, sizes: tuple[int, ...], z_loss: bool = False, **options: Any) -> Shared:
    from tests.loss.test_gpu_engine import make

    how = {name: options.pop(name) for name in ("workspace", "rows") if name in options}
    problem, a = make(n, d, v, **options)
    return Shared(problem, a, 0.9 * a, sizes, square=0.3 * a if z_loss else None, **how)


def test_kernels(pool: Pool) -> None:
    """Also with rows whose target is so unlikely that they are computed again, by another rank than the target's."""
    check(
        pool,
        shared(20, 16, 90, (40, 50), bias=True, scale=100.0),
        shared(20, 8, 37, (37, 0), prior=True, softcap=1.5, scale_of_logits=0.6, z_loss=True),
    )


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(150, 151), (300, 1), (100, 0, 201)], ids=str)
def test_every_kind_of_problem(pool: Pool, sizes: tuple[int, ...]) -> None:
    check(
        pool,
        shared(130, 24, 301, sizes, bias=True),
        shared(140, 24, 301, sizes, rows=128),
        shared(130, 24, 301, sizes, bias=True, workspace=150_000),
        shared(40, 24, 301, sizes, prior=True, z_loss=True),
        shared(40, 24, 301, sizes, softcap=2.0, bias=True),
        shared(40, 24, 301, sizes, softcap=1.5, scale_of_logits=0.6, bias=True, prior=True, z_loss=True),
        shared(40, 16, 301, sizes, bias=True, scale=30.0),
        shared(40, 16, 301, sizes, bias=True, prior=True, scale=3000.0),
        shared(40, 16, 301, sizes, scale_of_logits=40.0),
        shared(0, 16, 301, sizes),
    )


@pytest.mark.slow
@pytest.mark.parametrize("target", [3, 15])
def test_an_impossible_target_has_infinite_loss_and_a_gradient(pool: Pool, target: int) -> None:
    from tests.loss.test_gpu_engine import check as check_with_chunked

    impossible = shared(6, 8, 20, (10, 10), bias=True)
    problem = impossible.problem
    assert problem.bias is not None
    problem.bias[target] = -torch.inf
    problem.target[0] = target
    problem.target[2:] = 4
    for terms, gradients in both_ways(pool, impossible):
        assert torch.isinf(terms.nll[0])
        assert torch.isfinite(terms.nll[1:]).all()
        assert torch.isfinite(terms.normaliser).all()
        check_with_chunked(problem, impossible.a, impossible.b, (None, gradients))
