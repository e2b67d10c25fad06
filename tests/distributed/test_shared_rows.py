"""A vocabulary over several ranks gives the losses and gradients of one process."""

from __future__ import annotations

from collections import Counter
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from hebbian_softmax import RowPart, linear_cross_entropy, linear_topk
from tests.distributed.pool import Pool
from tests.distributed.shared_rows import Share, check, counted_exchanges, part_of, results_of

ALL: dict[str, Any] = {"label_smoothing": 0.1, "temperature": 1.3, "softcap": 3.0, "z_loss": 0.01}
OPTIONS: list[dict[str, Any]] = [
    {},
    {"label_smoothing": 0.1},
    {"label_smoothing": 0.2, "temperature": 0.7},
    {"softcap": 3.0},
    {"z_loss": 0.01},
    {"label_smoothing": 0.1, "softcap": 3.0},
    ALL,
]
OPERANDS: list[dict[str, Any]] = [
    {},
    {"bias": True, "ignored": 0.3},
    {"masked": 0.3},
    {"bias": True, "weighted": True},
    {"bias": True, "weighted": True, "masked": 0.3},
    {"ignored": 1.0},
]
CHUNKS_OF_ROWS, TILES = {"n": 150, "workspace": 70_000}, {"n": 9, "workspace": 9_000}
"""With the first, ranks exchange several times in one pass; with the second, there are two passes."""


def test_losses(pool: Pool) -> None:
    many = OPERANDS[4]
    check(pool, [
        Share(),
        Share(**CHUNKS_OF_ROWS),
        Share(**TILES),
        Share((100, 0, 111), **CHUNKS_OF_ROWS, operands=many, tokens=True, options=ALL | {"reduction": "sum"}),
        Share((0, 211, 0), operands=many, options=ALL, **TILES),
        Share((1, 0, 1), operands={"bias": True}, options={"label_smoothing": 0.1, "reduction": "none"}),
        Share(operands={"bias": True, "weighted": True}, options={"label_smoothing": 0.1, "reduction": "none"}),
        Share(n=0, options={"reduction": "sum"}, operands={"bias": True}),
        Share(operands={"ignored": 1.0}),
        Share((9, 200, 1), dtype=torch.float32, operands=many, tokens=True, options=ALL, **CHUNKS_OF_ROWS),
        Share(dtype=torch.bfloat16, operands=many, options={"label_smoothing": 0.1}, **CHUNKS_OF_ROWS),
        Share(dtype=torch.bfloat16, operands={"bias": True}, options={"reduction": "none"}, **TILES),
        Share(function="log_prob", operands={"bias": True, "masked": 0.3}, options={"temperature": 0.7}),
        Share((100, 0, 111), function="log_prob", operands=many | {"weighted": False}, options={"entropy": True}),
        Share(function="log_prob", options={"entropy": True, "softcap": 3.0}, **TILES),
        Share(function="log_prob", dtype=torch.bfloat16, options={"entropy": True}),
        Share(dtype=torch.float32, autocast=True, operands={"bias": True}, options={"label_smoothing": 0.1}),
    ])  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "chunks"),
    [
        *product([(106, 105), (71, 70, 70), (53, 53, 53, 52), (0, 100, 111, 0)], [CHUNKS_OF_ROWS, TILES]),
        ((5, 0), {}),
        ((71, 70, 70), {"n": 0}),
    ],
    ids=str,
)
def test_every_loss(pool: Pool, sizes: tuple[int, ...], chunks: dict[str, Any]) -> None:
    shares = [
        Share(sizes, operands=operands, tokens=tokens, options=options | {"reduction": reduction}, **chunks)
        for operands, options, tokens, reduction in product(OPERANDS, OPTIONS, (False, True), ("mean", "sum", "none"))
    ]
    shares += [
        Share(sizes, operands=operands, function="log_prob", options=options | {"entropy": entropy}, **chunks)
        for operands, options, entropy in product(
            OPERANDS[:3], ({}, {"temperature": 0.7, "softcap": 3.0}), (False, True)
        )
    ]
    check(pool, shares)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("chunks", [{}, CHUNKS_OF_ROWS, TILES], ids=str)
def test_every_dtype(pool: Pool, dtype: torch.dtype, chunks: dict[str, Any]) -> None:
    check(pool, [
        Share((71, 0, 140), dtype=dtype, operands=operands, options=options | {"reduction": reduction}, **chunks)
        for operands, options, reduction in product(OPERANDS[:5], OPTIONS, ("mean", "none"))
    ])  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("impl", ["triton", "chunked", "auto"])
@pytest.mark.parametrize("chunks", [{"n": 150}, CHUNKS_OF_ROWS, TILES], ids=str)
def test_ranks_that_share_a_gpu(pool: Pool, impl: str, chunks: dict[str, Any]) -> None:
    how: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cuda", "impl": impl, **chunks}
    operands: list[dict[str, Any]] = [{}, {"bias": True}, {"bias": True, "weighted": True, "masked": 0.3}]
    options: list[dict[str, Any]] = [{}, {"label_smoothing": 0.1}, {"softcap": 3.0, "z_loss": 0.01}]
    shares = [
        Share((100, 0, 111), operands=some, options=each | {"reduction": reduction}, **how)
        for some, each, reduction in product(operands, options, ("mean", "none"))
    ]
    check(pool, [*shares, Share(function="log_prob", options={"temperature": 0.7}, **how)])


def without_distribution(sizes: tuple[int, ...]) -> list[list[Tensor]]:
    """Return losses and gradients where logits are infinite or NaN, or where the target is impossible."""
    generator = torch.Generator().manual_seed(6)
    h, whole = (torch.randn(each, 4, generator=generator, dtype=torch.float64) for each in (3, sum(sizes)))
    y = torch.tensor([1, 4, -100])
    start, stop, how = 0, sum(sizes), {"impl": "chunked"}
    if dist.is_initialized():
        start = sum(sizes[: dist.get_rank()])
        stop = start + sizes[dist.get_rank()]
        how = {"rows": RowPart.of(whole[start:stop])}
    found = []
    for value, classes in product((-torch.inf, torch.inf, torch.nan), ([1], [0], [5], [0, 1, 2, 3, 4, 5, 6])):
        bias = torch.zeros(sum(sizes), dtype=torch.float64)
        bias[classes] = value
        for reduction in ("sum", "none"):
            operands = [each.clone().requires_grad_() for each in (h, whole[start:stop], bias[start:stop])]
            loss = linear_cross_entropy(*operands[:2], y, linear_bias=operands[2], reduction=reduction, **how)
            loss.sum().backward()
            found.append([loss.detach(), *(each.grad for each in operands if each.grad is not None)])
    return found


def test_rows_without_a_distribution(pool: Pool) -> None:
    sizes = (3, 0, 4)
    expected = without_distribution(sizes)
    for found in zip(*pool.run(3, without_distribution, sizes), expected, strict=True):
        *ranks, alone = found
        for i, of_one in enumerate(alone):
            mine = [each[i] for each in ranks]
            for each in [torch.cat(mine)] if i >= 2 else mine:
                torch.testing.assert_close(each, of_one, equal_nan=True)


def likeliest(sizes: tuple[int, ...]) -> list[tuple[Tensor, ...]]:
    """Return the likeliest classes on this rank, of matrices of small integers, so that many logits are equal."""
    generator = torch.Generator().manual_seed(5)
    h, w = torch.randint(-2, 3, (6, 4), generator=generator), torch.randint(-2, 3, (sum(sizes), 4), generator=generator)
    prior = torch.zeros(sum(sizes), dtype=torch.float64)
    prior[::2] = -torch.inf
    how: list[dict[str, Any]] = [{}, {"temperature": 2.0, "softcap": 3.0}, {"prior": prior}, {"workspace": 2000}]
    start, rows = 0, None
    if dist.is_initialized():
        start = sum(sizes[: dist.get_rank()])
        w = w[start : start + sizes[dist.get_rank()]]
        rows = RowPart.of(w)
    found = [
        linear_topk(h.to(dtype), w.to(dtype), k, rows=rows, **options)
        for dtype, options, k in product((torch.float64, torch.bfloat16), how, (1, 3, sum(sizes)))
        if "prior" not in options or dtype == torch.float64
    ]
    return [*found, linear_topk(h[0].double(), w.double(), 2, rows=rows)]


@pytest.mark.parametrize("sizes", [(5, 0, 40), pytest.param((1, 2), marks=pytest.mark.slow)], ids=str)
def test_the_likeliest_classes(pool: Pool, sizes: tuple[int, ...]) -> None:
    """``k`` may be larger than a rank's part, and among equals the lowest class comes first."""
    expected = likeliest(sizes)
    for found in pool.run(len(sizes), likeliest, sizes):
        for mine, other in zip(found, expected, strict=True):
            for a, b in zip(mine, other, strict=True):
                assert a.dtype == b.dtype
                assert torch.equal(a, b)


def exchanges(share: Share) -> list[tuple[str, torch.dtype, int]]:
    case = part_of(share.case(), share, dist.get_rank())
    rows = RowPart.of(case.linear_weight)
    with counted_exchanges() as found:
        results_of(share, case, rows=rows, workspace=share.workspace, impl=share.impl)
    return found


@pytest.mark.parametrize("chunks", [{}, pytest.param(CHUNKS_OF_ROWS, marks=pytest.mark.slow), TILES], ids=str)
def test_what_crosses_the_wire(pool: Pool, chunks: dict[str, Any]) -> None:
    """The formula of docs/distributed.md."""
    n, d, numbers = chunks.get("n", 13), 16, torch.float64
    shares = [
        (Share(**chunks), 3 * n + n * d),
        (Share(**chunks, options={"label_smoothing": 0.1}), 4 * n + n * d),
        (Share(**chunks, options={"softcap": 3.0, "label_smoothing": 0.1}), 4 * n + n * d),
        (Share(**chunks, function="log_prob"), 3 * n + n * d),
        (Share(**chunks, function="log_prob", options={"entropy": True}), 4 * n + n * d),
    ]
    for share, expected in shares:
        for found in pool.run(3, exchanges, share):
            total = Counter[torch.dtype]()
            for _, dtype, count in found:
                total[dtype] += count
            assert total == {torch.int64: 2, numbers: expected}
            assert [each for each in found if each[2] == n * d] == [("all_reduce", numbers, n * d)]


def exchanges_of_topk(k: int) -> list[tuple[str, torch.dtype, int]]:
    w = torch.ones((4, 6)[dist.get_rank()], 8)
    rows = RowPart.of(w)
    with counted_exchanges() as found:
        linear_topk(torch.ones(13, 8), w, k, rows=rows)
    return found


@pytest.mark.parametrize(("k", "given"), [(3, 3), (5, 5), pytest.param(10, 6, marks=pytest.mark.slow)])
def test_what_crosses_the_wire_for_the_likeliest(pool: Pool, k: int, given: int) -> None:
    """The largest part has six rows, and no rank gives more."""
    for found in pool.run(2, exchanges_of_topk, k):
        gathered = [("all_gather", torch.float32, 13 * given), ("all_gather", torch.int64, 13 * given)]
        assert found == [("all_reduce", torch.int64, 2), *gathered]
