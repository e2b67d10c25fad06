"""Classes never seen on several ranks: each call has the targets of its own rank, and counts are those of all ranks.

So ranks differ from one process only in the step in which a class is first seen, and equal one process that makes a
call for each rank.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.distributed.pool import Pool
from tests.distributed.test_rows import Options, slowly, some_ignored
from tests.distributed.training import Setup, Step, Training, check, make_steps, snapshot, train


def train_by_calls(setup: Setup, steps: list[Step], how: str) -> dict[str, Tensor]:
    """Train; alone, each batch of a rank is a call of its own."""
    training = Training(setup, how)
    for step in steps:
        parts = [[each] for part in step for each in part] if how == "alone" else step
        for i, batches in enumerate(parts):
            with nullcontext() if i == len(parts) - 1 else training.unsynced():
                training.backward(step, batches)
        training.finish_step()
    return snapshot(training.model)


@pytest.mark.parametrize(
    ("how", "sizes", "row_ranks", "setting"),
    [
        ("ddp", [3, 2], 1, {}),
        ("root", [3, 2], 1, {"optimizer": "adam"}),
        ("rows", [4], 2, {"kind": Options}),
        *slowly(
            ("head", [2, 0, 3], 1, {}),
            ("rows", [5], 3, {}),
            ("rows-root", [3, 2], 2, {"optimizer": "foreach"}),
        ),
    ],
    ids=str,
)
def test_ranks_equal_one_process_that_makes_their_calls(
    pool: Pool, how: str, sizes: list[int], row_ranks: int, setting: dict[str, Any]
) -> None:
    setup = Setup(classes=12, head={"seen_only": True, "bias": True}, **setting)
    batches = {"steps": 3, "micro_batches": 2, "targets": some_ignored}
    alone = check(pool, how, setup, sizes, train_by_calls, row_ranks=row_ranks, **batches)
    assert (alone["head.counts"] == 0).any()
    without = Setup(classes=12, head={"bias": True}, **setting)
    with_all = train_by_calls(without, make_steps(without, sizes, **batches), "alone")  # type: ignore[arg-type]
    assert not torch.allclose(alone["head.weight"], with_all["head.weight"], atol=1e-4)


def test_once_all_classes_were_seen_ranks_equal_one_process_on_the_joined_batch(pool: Pool) -> None:
    setup = Setup(head={"seen_only": True}, counts=(1, 2, 3, 4, 1, 2, 9))
    alone = check(pool, "ddp", setup, [3, 2])
    without = Setup(counts=(1, 2, 3, 4, 1, 2, 9))
    plain = train(without, make_steps(without, [3, 2]), "alone")
    assert all(torch.equal(alone[name], plain[name]) for name in plain)
