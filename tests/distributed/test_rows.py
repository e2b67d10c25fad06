"""Rows shared by ranks that see the same batch: equal to one process, alone and with FSDP2 or DDP beside it."""

from __future__ import annotations

import pytest

from tests.distributed.pool import Pool
from tests.distributed.rows import check_rows
from tests.distributed.training import Setup

slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("how", "shape", "classes", "optimizer"),
    [
        ("rows", (1, 2), 7, "adam"),
        ("rows", (1, 3), 4, "sgd"),
        ("rows", (1, 4), 7, "one-pass"),
        ("rows-root", (2, 2), 7, "adam"),
        ("rows-head", (2, 2), 8, "sgd"),
        ("rows-ddp", (2, 2), 7, "sgd"),
    ],
)
def test_equals_one_process(pool: Pool, how: str, shape: tuple[int, int], classes: int, optimizer: str) -> None:
    """4 classes on 3 ranks are 2, 2 and 0 rows."""
    setup = Setup(classes=classes, head={"bias": True, "limit": 3}, optimizer=optimizer, clip=0.1)
    alone = check_rows(pool, how, setup, shape, steps=5)
    assert alone["head.counts"].max() > 3  # a class went past the limit
