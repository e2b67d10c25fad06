"""Losses over a matrix whose rows ranks share, beside the same losses over the whole matrix in one process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from hebbian_softmax import RowPart, linear_log_prob
from tests.distributed.pool import Pool
from tests.loss.cases import Case, assert_no_worse, eager, make, ours

EXACT = 1e-10
"""What ranks may be off in float64, in units of the largest entry: far above rounding, far below any mistake."""

_AT_ONCE = 40
"""More losses in one run could take longer than the pool waits."""


@dataclass(frozen=True)
class Share:
    """A loss, and how many rows of its matrix each rank has."""

    sizes: tuple[int, ...] = (71, 70, 70)
    n: int = 13
    d: int = 16
    dtype: torch.dtype = torch.float64
    operands: dict[str, Any] = field(default_factory=dict)
    """Those of :func:`tests.loss.cases.make`."""
    tokens: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    """Those of the loss."""
    workspace: int | None = None
    function: str = "loss"
    device: str = "cpu"
    impl: str = "auto"
    autocast: bool = False
    """Whether the products are in bfloat16, although the operands are not."""

    def case(self) -> Case:
        torch.manual_seed(self.n + sum(self.sizes))
        case = make(self.n, self.d, sum(self.sizes), dtype=self.dtype, **({"ignored": 0.2} | self.operands))
        if self.tokens:
            case.token_weight = torch.rand(self.n).to(torch.promote_types(self.dtype, torch.float32)) + 0.1
            case.token_weight[1::5] = 0
        return case

    def upstream(self, results: list[Tensor]) -> list[Tensor]:
        generator = torch.Generator().manual_seed(3)
        return [torch.rand(each.shape, generator=generator).to(each) + 0.5 for each in results]


def part_of(case: Case, share: Share, rank: int) -> Case:
    """Return the rows that a rank has, on its device."""
    start = sum(share.sizes[:rank])
    some = slice(start, start + share.sizes[rank])
    bias = None if case.linear_bias is None else case.linear_bias.detach()[some].clone().requires_grad_()
    part = replace(case, linear_weight=case.linear_weight.detach()[some].clone().requires_grad_(), linear_bias=bias)
    for name, each in vars(part).items():
        if each is not None:
            setattr(part, name, each.detach().to(share.device).requires_grad_(each.requires_grad))
    return part


def results_of(share: Share, case: Case, **how: Any) -> list[Tensor]:
    """Return the results and the gradients of input, matrix and bias, for some upstream gradients."""
    options = share.options | how
    with torch.autocast(share.device, torch.bfloat16, enabled=share.autocast and case.input.dtype != torch.float64):
        if share.function == "loss":
            found = [ours(case, **options) if how else eager(case, **options)]
        else:
            options |= {} if how else {"impl": "reference"}
            constants = {"linear_bias": case.linear_bias, "prior": case.prior}
            found = list(linear_log_prob(case.input, case.linear_weight, case.target, **constants, **options))
    upstream = share.upstream(found)
    gradients = torch.autograd.grad(found, case.operands(), upstream)
    return [each.detach().cpu() for each in (*found, *gradients)]


def run(shares: list[Share]) -> list[list[Tensor]]:
    """Compute this rank's part of each loss."""
    found = []
    for share in shares:
        case = part_of(share.case(), share, dist.get_rank())
        rows = RowPart.of(case.linear_weight)
        found.append(results_of(share, case, rows=rows, workspace=share.workspace, impl=share.impl))
    return found


def check(pool: Pool, shares: list[Share]) -> None:
    """Check the losses on ranks against one process; all have as many ranks."""
    (ranks,) = {len(share.sizes) for share in shares}
    for first in range(0, len(shares), _AT_ONCE):
        some = shares[first : first + _AT_ONCE]
        found = pool.run(ranks, run, some)
        for i, share in enumerate(some):
            check_one(share, [each[i] for each in found])


def check_one(share: Share, ranks: list[list[Tensor]]) -> None:
    case = share.case()
    expected, exact = (results_of(share, each) for each in (case, case.to(torch.float64)))
    of_rows = 1 + (case.linear_bias is not None)
    for rank in ranks:
        for mine, other in zip(rank[:-of_rows], ranks[0][:-of_rows], strict=True):
            assert torch.equal(mine, other) or mine.isnan().all(), share
    joined = ranks[0][:-of_rows] + [torch.cat(each) for each in list(zip(*ranks, strict=True))[-of_rows:]]
    for mine, plain, truth in zip(joined, expected, exact, strict=True):
        assert mine.shape == truth.shape, share
        assert mine.dtype == plain.dtype, share
        if truth.isnan().all():
            assert mine.isnan().all() or not truth.numel(), share
        elif share.dtype == torch.float64:
            assert torch.allclose(mine, truth, rtol=0, atol=EXACT * float(truth.abs().max())), share
        else:
            assert_no_worse(mine, plain, truth, torch.bfloat16 if share.autocast else share.dtype)


@contextmanager
def counted_exchanges() -> Iterator[list[tuple[str, torch.dtype, int]]]:
    """List the exchanges of this rank: the kind, the dtype, and the numbers that it gives."""
    found: list[tuple[str, torch.dtype, int]] = []
    all_reduce, all_gather = dist.all_reduce, dist.all_gather

    def reduced(tensor: Tensor, *args: Any, **how: Any) -> Any:
        found.append(("all_reduce", tensor.dtype, tensor.numel()))
        return all_reduce(tensor, *args, **how)

    def gathered(parts: list[Tensor], tensor: Tensor, *args: Any, **how: Any) -> Any:
        found.append(("all_gather", tensor.dtype, tensor.numel()))
        return all_gather(parts, tensor, *args, **how)

    with patch.object(dist, "all_reduce", reduced), patch.object(dist, "all_gather", gathered):
        yield found
