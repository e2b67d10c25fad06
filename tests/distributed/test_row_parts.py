"""How a rank learns which rows it has, what is refused on all ranks alike, and what a shared loss costs."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from hebbian_softmax import RowPart, linear_cross_entropy, linear_log_prob, linear_topk
from tests.distributed.pool import Pool
from tests.operations import Watch


def facts(part: RowPart) -> tuple[int, ...]:
    return part.start, part.rows, part.total, part.largest, dist.get_world_size(part.group)


def parts(shape: tuple[int, int]) -> list[Any]:
    """Return this rank's part of five rows on a mesh of this shape, however they are laid out."""
    whole = torch.arange(10.0).reshape(5, 2)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("batch", "rows"))
    placed = distribute_tensor(whole, mesh, [Replicate(), Shard(0)])
    by_both = distribute_tensor(whole, mesh, [Shard(0), Shard(0)])
    plain = placed.to_local()
    found = [RowPart.of(placed), RowPart.of(by_both, mesh_dim="rows"), RowPart.of(plain, mesh.get_group("rows"))]
    assert all(torch.equal(plain, whole[part.start : part.stop]) for part in found)
    return [*map(facts, found), facts(RowPart.of(torch.zeros(dist.get_rank(), 3)))]


@pytest.mark.parametrize("shape", [(1, 3), pytest.param((2, 2), marks=pytest.mark.slow)], ids=str)
def test_parts_of_a_mesh_of_a_group_and_of_all_ranks(pool: Pool, shape: tuple[int, int]) -> None:
    ranks = shape[0] * shape[1]
    expected = {2: [(0, 3, 5, 3, 2), (3, 2, 5, 3, 2)], 3: [(0, 2, 5, 2, 3), (2, 2, 5, 2, 3), (4, 1, 5, 2, 3)]}[shape[1]]
    for rank, mine in enumerate(pool.run(ranks, parts, shape)):
        assert mine[:3] == [expected[rank % shape[1]]] * 3
        assert mine[3] == (sum(range(rank)), rank, sum(range(ranks)), ranks - 1, ranks)


def message(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def refusals() -> dict[str, str]:
    """Return the errors of this rank; the second of them is given other arguments in some of the calls."""
    rank, second = dist.get_rank(), dist.get_rank() == 1
    mesh = init_device_mesh("cpu", (2, 1))
    whole, wide = torch.randn(11, 4), [torch.randn(3, 5 + rank), torch.randn(4)]
    placed = distribute_tensor(whole, mesh, [Shard(0), Replicate()])
    w = placed.to_local()
    rows = RowPart.of(placed)
    h, y = torch.randn(6, 4), torch.tensor([0, 10, 4, 5, -100, 9])
    masked = torch.zeros(11).masked_fill(torch.arange(11) == 5, -torch.inf)

    def loss(h: Tensor = h, w: Any = w, y: Tensor = y, rows: Any = rows, **options: Any) -> Tensor:
        return linear_cross_entropy(h, w, y, rows=rows, **options)

    def in_autocast(w: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return loss(w=w)

    calls: dict[str, Callable[[], Any]] = {
        "no class": lambda: loss(y=y + 1),
        "no class of log_prob": lambda: linear_log_prob(h, w, y + 1, rows=rows),
        "masked": lambda: loss(prior=masked),
        "rows of the second": lambda: loss(w=w[1:] if second else w),
        "dtype of the second": lambda: loss(w=w.double() if second else w),
        "batch of the second": lambda: loss(h[rank:], y=y[rank:]),
        "half on the second": lambda: in_autocast(w.bfloat16() if second else w),
        "frozen on the second": lambda: loss(w=w.clone().requires_grad_(not second)),
        "k of the second": lambda: linear_topk(h, w, 2 + rank, rows=rows),
        "prior": lambda: loss(prior=masked[: len(w)]),
        "weight": lambda: loss(weight=torch.ones(5)),
        "k": lambda: linear_topk(h, w, 12, rows=rows),
        "reference": lambda: loss(impl="reference"),
        "transform": lambda: torch.func.grad(loss)(h),
        "meta": lambda: loss(h.to("meta")),
        "no part": lambda: loss(rows=3),
        "placed": lambda: loss(w=placed),
        "parts": lambda: RowPart.of(wide[0]),
        "vector": lambda: RowPart.of(wide[rank]),
        "columns": lambda: RowPart.of(distribute_tensor(whole, mesh, [Shard(1), Replicate()])),
        "replicated": lambda: RowPart.of(distribute_tensor(whole, mesh, [Replicate(), Replicate()])),
        "both": lambda: RowPart.of(placed, dist.group.WORLD),
        "no tensor": lambda: RowPart.of([[1.0]]),  # type: ignore[arg-type]
        "no group": lambda: RowPart.of(w, 3),  # type: ignore[arg-type]
        "no mesh": lambda: RowPart.of(w, mesh_dim="rows"),
        "no dimension": lambda: RowPart.of(placed, mesh_dim="rows"),
        "none": loss,
    }
    return {name: message(call) for name, call in calls.items()}


def test_what_one_rank_refuses_all_refuse(pool: Pool) -> None:
    """Otherwise the others would wait for it."""
    first, second = pool.run(2, refusals)
    matrices = "ValueError: the parts of weight must be matrices (rows, features) of the same features on all ranks"
    alike = {
        "no class": "IndexError: target must be in [0, 10] or ignore_index=-100, got 11",
        "no class of log_prob": "IndexError: target must be in [0, 10] or ignore_index=-100, got 11",
        "masked": "ValueError: target must not be a class that prior masks with -inf, got 5",
        "prior": "ValueError: prior must have shape (11,), one number for each class of all ranks, got (6,)",
        "weight": "ValueError: weight must have shape (11,), one number for each class of all ranks, got (5,)",
        "k": "ValueError: k must be at most the number of classes, 11, got 12",
        "reference": 'ValueError: impl="reference" needs all rows on one rank; with rows= use "auto", "chunked" or '
        '"triton"',
        "transform": "RuntimeError: a matrix whose rows are shared among ranks cannot go through torch.func",
        "meta": "RuntimeError: a matrix whose rows are shared among ranks cannot go through torch.func",
        "no part": "TypeError: rows must be a RowPart, as RowPart.of(weight) gives it, got int",
        "placed": "TypeError: with rows=, pass the rows of this rank, weight.to_local(), and no DTensor",
        "parts": f"{matrices}, got (3, 5), (3, 6)",
        "vector": f"{matrices}, got (3, 5), no matrix",
        "columns": "ValueError: the ranks that share the rows hold them as Shard(dim=0), got",
        "replicated": "ValueError: mesh_dim must say which ranks share the rows of a weight laid out as",
        "both": "ValueError: group is for plain tensors; the ranks that share a DTensor are those of its mesh",
        "no tensor": "TypeError: weight must be a tensor with the rows of this rank, got list",
        "no group": "ValueError: group must be a process group with this rank",
        "no mesh": "ValueError: mesh_dim is for DTensors, got 'rows' with a Tensor",
        "no dimension": "ValueError: mesh_dim must be a dimension of the mesh, range(0, 2), got 'rows'",
        "batch of the second": "RuntimeError: the ranks that share the rows must be given inputs of the same shape and "
        "the same options; this one has",
        "none": "no error",
    }
    for name in ("half on the second", "frozen on the second", "k of the second"):
        alike[name] = alike["batch of the second"]
    for name, expected in alike.items():
        for found in (first, second):
            assert found[name].startswith(expected) or (name == "prior" and found is second), found[name]
    other = "RuntimeError: another rank that shares the rows has refused its arguments; its error says why"
    assert first["rows of the second"] == first["dtype of the second"] == other
    assert second["rows of the second"] == (
        "ValueError: linear_weight must have the 5 rows of this rank, from class 6 on, got shape (4, 4)"
    )
    assert second["dtype of the second"].startswith("TypeError: linear_weight must have the dtype of input")


def products(workspace: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    h, w, y = torch.randn(150, 16), torch.randn(70, 16, requires_grad=True), torch.randint(140, (150,))
    rows = RowPart.of(w)
    with Watch() as watch:
        linear_cross_entropy(h.requires_grad_(), w, y, rows=rows, workspace=workspace)
    return watch.products


def test_every_logit_is_computed_once(pool: Pool) -> None:
    """The exchange comes between the sums and the factors of the same logits: three products for each chunk of rows."""
    for found in pool.run(2, products, 40_000):
        assert len(found) == 3 * 2


def trained_on_a_mesh() -> list[Tensor]:
    """Return the loss and the gradients of a DTensor's rows, and of the input."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("rows",))
    torch.manual_seed(4)
    h, whole, y = torch.randn(6, 4, requires_grad=True), torch.randn(11, 4), torch.arange(6)
    weight = torch.nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)]))
    loss = linear_cross_entropy(h, weight.to_local(), y, rows=RowPart.of(weight))
    loss.backward()
    assert isinstance(weight.grad, DTensor)
    assert h.grad is not None
    return [loss.detach(), h.grad, weight.grad.full_tensor()]


def test_a_parameter_on_a_mesh(pool: Pool) -> None:
    torch.manual_seed(4)
    h, w, y = torch.randn(6, 4, requires_grad=True), torch.randn(11, 4, requires_grad=True), torch.arange(6)
    loss = linear_cross_entropy(h, w, y)
    expected = [loss.detach(), *torch.autograd.grad(loss, (h, w))]
    for found in pool.run(2, trained_on_a_mesh):
        for mine, other in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, other)


def compiled() -> list[list[Tensor]]:
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor")  # The compiler looks at all attributes.
    h, w, y = torch.randn(6, 4), torch.randn(5, 4), torch.arange(6)
    rows = RowPart.of(w)

    def both(h: Tensor, w: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        loss = linear_cross_entropy(2 * h, w, y, rows=rows) * 3
        return loss, linear_log_prob(h, w, y, rows=rows)[0] + 1, linear_topk(h, w, 2, rows=rows)[1] + 1

    found = []
    for function in (both, torch.compile(both, backend="aot_eager")):
        ours = [each.clone().requires_grad_() for each in (h, w)]
        results = function(*ours, y)
        gradients = torch.autograd.grad(results[0] + results[1].sum(), ours)
        found.append([each.detach() for each in (*results, *gradients)])
    return found


@pytest.mark.slow
def test_a_compiled_model_leaves_the_exchange_out_of_its_graph(pool: Pool) -> None:
    for plain, in_graph in pool.run(2, compiled):
        for mine, other in zip(in_graph, plain, strict=True):
            torch.testing.assert_close(mine, other)
