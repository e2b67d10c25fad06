"""The code of docs/distributed.md, run on two ranks as it stands."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests import ROOT
from tests.distributed.pool import Pool
from tests.distributed.training import assert_same, snapshot

PAGE = ROOT / "docs" / "distributed.md"


def blocks() -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def example(*needles: str) -> str:
    """The blocks that every example shares, then those that contain the given words, in the order of the page."""
    wanted = ("class Model", "def number_of_targets", *needles)
    found = [block for block in blocks() if any(needle in block for needle in wanted)]
    assert len(found) == len(wanted), "each word names one block of the page"
    return "\n".join(found)


def make_batches(rank: int, world_size: int) -> list[tuple[Tensor, Tensor]]:
    """Four uneven batches, some targets ignored."""
    generator = torch.Generator().manual_seed(0)
    batches = []
    for _ in range(4):
        x, targets = torch.randn(7, 20, generator=generator), torch.randint(9, (7,), generator=generator)
        targets[2] = -100
        mine = torch.arange(7) % 3 % world_size == rank
        batches.append((x[mine], targets[mine]))
    return batches


def run(code: str, folder: str, row_ranks: int = 1) -> dict[str, Tensor]:
    """Train the model of the documentation, all in float64, and return its state; row ranks see the same batches."""
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    rank, world_size = rank // row_ranks, world_size // row_ranks
    torch.set_default_dtype(torch.float64)
    try:
        torch.manual_seed(3)
        namespace: dict[str, Any] = {"steps": make_batches(rank, world_size), "folder": folder}
        exec(compile(code, str(PAGE), "exec"), namespace)
        return snapshot(namespace["model"])
    finally:
        torch.set_default_dtype(torch.float32)


ALONE = """
model = Model()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
model.head.attach(optimizer)

def step(*batches):
    x, targets = (torch.cat(parts) for parts in zip(*batches))
    (model(x, targets) / (targets != -100).sum()).backward()
    optimizer.step()
    optimizer.zero_grad()

for batch in steps:
    step(batch)
"""


def run_alone(more: str = "", loop: str = ALONE) -> dict[str, Tensor]:
    code = next(block for block in blocks() if "class Model" in block)
    return run(code + loop + more, "")


def test_ddp(pool: Pool) -> None:
    expected = run_alone()
    assert expected["head.counts"].sum() == 4 * 6
    assert_same(pool.run(2, run, example("DistributedDataParallel(model)"), ""), expected)


def test_ddp_with_micro_batches(pool: Pool) -> None:
    code = example("DistributedDataParallel(model)", "no_sync()")
    expected = run_alone("step(*steps[:2]); step(*steps[2:])")
    assert_same(pool.run(2, run, code, ""), expected)


def test_fsdp_and_its_checkpoint(pool: Pool, tmp_path: Path) -> None:
    code = example("fully_shard(model.head, mesh=mesh)", "dcp.save")
    assert_same(pool.run(2, run, code, str(tmp_path)), run_alone())


def run_with_shared_rows(code: str) -> list[Tensor]:
    """Train with the same batches on all ranks, in float64, and return the body, and this rank's rows."""
    torch.set_default_dtype(torch.float64)
    try:
        namespace: dict[str, Any] = {"steps": make_batches(0, 1)}
        exec(compile(code, str(PAGE), "exec"), namespace)
        return [namespace["body"].weight.detach(), namespace["weight"].detach()]
    finally:
        torch.set_default_dtype(torch.float32)


def test_the_loss_of_shared_rows(pool: Pool) -> None:
    code = example("rows = RowPart.of")
    ((body, weight),) = pool.run(1, run_with_shared_rows, code)
    found = pool.run(3, run_with_shared_rows, code)
    for mine, _ in found:
        torch.testing.assert_close(mine, body)
    torch.testing.assert_close(torch.cat([rows for _, rows in found]), weight)


def test_shared_rows_and_their_checkpoint(pool: Pool, tmp_path: Path) -> None:
    code = example("shard_rows(model.head, mesh)", "dcp.save")
    assert_same(pool.run(2, run, code, str(tmp_path), 2), run_alone())


def test_shared_rows_and_a_shared_batch(pool: Pool) -> None:
    code = example("def clip_gradients", 'shard_rows(model.head, mesh["rows"])')
    clipped = ALONE.replace("optimizer.step()", "nn.utils.clip_grad_norm_(model.parameters(), 1.0); optimizer.step()")
    assert_same(pool.run(4, run, code, "", 2), run_alone(loop=clipped))


def test_every_block_is_run() -> None:
    run_here = [
        example("DistributedDataParallel(model)", "no_sync()"),
        example("fully_shard(model.head, mesh=mesh)", "dcp.save"),
        example("shard_rows(model.head, mesh)", "dcp.save"),
        example("def clip_gradients", 'shard_rows(model.head, mesh["rows"])'),
        example("rows = RowPart.of"),
    ]
    assert all(any(block in code for code in run_here) for block in blocks())
