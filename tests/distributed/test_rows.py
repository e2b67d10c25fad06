"""Rows shared by ranks that see the same batch: equal to one process, alone and with FSDP2 or DDP beside them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from tests.distributed.pool import Pool
from tests.distributed.test_beside import memorize
from tests.distributed.test_checkpoint import dealt, resume, train_and_save
from tests.distributed.test_training import Logits, skip_and_go_on, train_in_contexts
from tests.distributed.training import (
    FEATURES,
    Model,
    Setup,
    Step,
    Training,
    assert_same,
    check,
    make_steps,
    snapshot,
    train,
)

slow = pytest.mark.slow


def slowly(*cases: Any) -> list[Any]:
    return [pytest.param(*each, marks=slow) for each in cases]


@pytest.mark.parametrize(
    ("how", "sizes", "row_ranks", "classes", "optimizer"),
    [
        ("rows", [5], 2, 7, "one-pass"),
        ("rows", [5], 3, 4, "sgd"),  # 2, 2 and 0 rows
        ("rows-root", [3, 4], 2, 7, "foreach"),
        ("rows-ddp", [3, 4], 2, 7, "sgd"),
        *slowly(
            ("rows", [5], 2, 7, "foreach"),
            ("rows", [5], 4, 7, "one-pass"),
            ("rows-head", [3, 4], 2, 8, "foreach"),
            *(("rows", [5], ranks, classes, "sgd") for ranks in (2, 3, 4) for classes in (3, 5, 8)),
            ("rows-apart", [5], 2, 7, "sgd"),
            ("rows-root", [5, 3], 1, 7, "adam"),
            *(("rows", [5], ranks, 7, optimizer) for ranks in (2, 3) for optimizer in ("adam", "one-pass")),
            *(
                (how, [0, 6], 2, classes, optimizer)
                for how in ("rows-root", "rows-head", "rows-ddp")
                for classes in (3, 8)
                for optimizer in ("sgd", "adam", "one-pass")
            ),
        ),
    ],
)
def test_equals_one_process(
    pool: Pool, how: str, sizes: list[int], row_ranks: int, classes: int, optimizer: str
) -> None:
    setup = Setup(classes=classes, head={"bias": True, "limit": 3}, optimizer=optimizer, clip=0.1)
    alone = check(pool, how, setup, sizes, row_ranks=row_ranks, steps=5)
    assert alone["head.counts"].max() > 3  # a class went past the limit
    assert alone["head.counts"].sum() == 5 * sum(sizes)


class Options(Model):
    """A loss with most of the options of ``head.loss``."""

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        classes = torch.arange(self.head.num_classes, dtype=x.dtype)
        return self.head.loss(
            self.hidden(x),
            targets,
            reduction="sum",
            label_smoothing=0.1,
            weight=1 + classes / 10,
            prior=torch.where(classes == 2, -torch.inf, -classes / 5),
            token_weight=1 + (x[:, 0] > 0).to(x.dtype),
            temperature=1.3,
            softcap=4.0,
            z_loss=0.01,
        )


class Soft(Model):
    """Probabilities as targets, which have more than half at the target."""

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        probabilities = (F.one_hot(targets, self.head.num_classes) + 0.3 / self.head.num_classes) / 1.3
        return self.head.loss(self.hidden(x), probabilities.to(x.dtype), reduction="sum", label_smoothing=0.1)


def some_ignored(rank: int, drawn: Tensor) -> Tensor:
    """Ignored targets, and none of the class that is masked."""
    return torch.where(drawn < 2, -100, drawn).where(drawn != 2, 3)


@pytest.mark.parametrize(
    ("how", "sizes", "row_ranks", "head", "kind"),
    [
        ("rows", [5], 3, {}, Options),
        *slowly(
            ("rows-root", [3, 4], 2, {}, Options),
            ("rows", [5], 2, {}, Options),
            ("rows-head", [3, 4], 2, {}, Options),
            ("rows-ddp", [3, 4], 2, {}, Options),
            ("rows", [5], 2, {"write": "literal"}, Options),
            ("rows-root", [3, 4], 2, {"scale": 0.5, "objective": "ip"}, Options),
        ),
    ],
)
def test_options_of_the_loss_and_accumulation(
    pool: Pool, how: str, sizes: list[int], row_ranks: int, head: dict[str, Any], kind: type[Model]
) -> None:
    setup = Setup(head={"bias": True} | head, kind=kind, set_to_none=False)
    alone = check(pool, how, setup, sizes, row_ranks=row_ranks, micro_batches=2, targets=some_ignored)
    assert 0 < alone["head.counts"].sum() < 4 * 2 * sum(sizes)


@slow
@pytest.mark.parametrize(("how", "row_ranks"), [("rows", 2), ("rows", 3), ("rows-root", 2)])
def test_probabilities_as_targets(pool: Pool, how: str, row_ranks: int) -> None:
    sizes = [4] if how == "rows" else [4, 2]
    alone = check(pool, how, Setup(kind=Soft), sizes, row_ranks=row_ranks)
    assert alone["head.counts"].sum() == 4 * sum(sizes)


@pytest.mark.parametrize(("how", "row_ranks", "classes"), [("rows", 3, 4), *slowly(("rows-root", 2, 7))])
def test_the_targets_context_and_the_logits_of_all_classes(pool: Pool, how: str, row_ranks: int, classes: int) -> None:
    setup = Setup(kind=Logits, head={"bias": True}, classes=classes)
    sizes = [4] if how == "rows" else [3, 5]
    alone = check(pool, how, setup, sizes, train_in_contexts, row_ranks=row_ranks, micro_batches=2)
    assert alone["head.counts"].sum() == 4 * 2 * sum(sizes)


@pytest.mark.parametrize("set_to_none", [False, pytest.param(True, marks=slow)])
def test_what_is_cleared_is_not_written(pool: Pool, set_to_none: bool) -> None:
    """The third rank has no rows, and so no gradient to look at."""
    setup = Setup(classes=4, set_to_none=set_to_none)
    alone = check(pool, "rows", setup, [4], skip_and_go_on, row_ranks=3, micro_batches=2)
    assert alone["head.counts"].sum() == 4 * 4


@pytest.mark.parametrize(
    ("how", "attached"), [("rows", False), *slowly(("rows", True), ("rows-root", True), ("rows-head", False))]
)
def test_memorize_on_all_ranks(pool: Pool, how: str, attached: bool) -> None:
    setup = Setup()
    h, targets = torch.randn(7, FEATURES, dtype=setup.dtype), torch.tensor([0, 1, 1, 6, 0, 1, 5])
    h[3, 2] = torch.nan
    batch_ranks = 1 if how == "rows" else 2
    batches = [(h[rank::batch_ranks], targets[rank::batch_ranks]) for rank in range(batch_ranks)]
    alone = memorize(setup, batches, "alone", attached)
    assert alone["head.counts"].tolist() == [4, 6, 0, 0, 0, 2, 0]
    assert_same(pool.run(2 * batch_ranks, memorize, setup, batches, how, attached), alone)


def train_with_dropout(setup: Setup, steps: list[Step], how: str) -> dict[str, Tensor]:
    """Each rank draws other random numbers; the first draws those of a single process."""
    training = Training(setup, how)
    torch.manual_seed(dist.get_rank() if dist.is_initialized() else 0)
    return training.run(steps)


def test_dropout_is_the_same_on_ranks_that_share_rows(pool: Pool) -> None:
    check(pool, "rows", Setup(head={"dropout": 0.5}), [5], train_with_dropout, row_ranks=2)


@pytest.mark.parametrize(
    ("saved", "ranks", "loaded", "resumed_on"),
    [
        ("rows", 2, "rows", 3),
        *slowly(
            ("rows", 2, "rows", 1),
            ("rows", 3, "rows", 2),
            ("rows", 2, "rows-root", 4),
            ("rows-root", 4, "rows", 3),
            ("rows-head", 4, "head", 2),
            ("root", 2, "rows", 3),
        ),
    ],
)
@pytest.mark.parametrize("optimizer", ["adam", pytest.param("sgd", marks=slow)])
def test_resumes_on_another_number_of_ranks(
    pool: Pool, tmp_path: Path, saved: str, ranks: int, loaded: str, resumed_on: int, optimizer: str
) -> None:
    setup = Setup(classes=8, optimizer=optimizer, head={"bias": True})
    sizes = {"rows": 1, "rows-root": 2, "rows-head": 2}
    steps = make_steps(setup, [6], steps=6)
    pool.run(ranks, train_and_save, setup, dealt(steps, sizes.get(saved, ranks)), saved, str(tmp_path))
    batches = dealt(steps, sizes.get(loaded, resumed_on))
    assert_same(pool.run(resumed_on, resume, setup, batches, loaded, str(tmp_path)), train(setup, steps, "alone"))


@slow
def test_resumes_in_a_process_without_ranks(pool: Pool, tmp_path: Path) -> None:
    setup = Setup(classes=8, optimizer="adam")
    steps = make_steps(setup, [6], steps=6)
    pool.run(2, train_and_save, setup, steps, "rows", str(tmp_path))
    with pytest.warns(UserWarning, match="torch.distributed is disabled, unavailable or uninitialized"):
        resumed = resume(setup, steps, "alone", str(tmp_path))
    assert_same([resumed], train(setup, steps, "alone"))


def full_state(setup: Setup, steps: list[Step], how: str) -> dict[str, Tensor]:
    training = Training(setup, how)
    training.run(steps)
    return get_model_state_dict(training.model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))


@pytest.mark.parametrize(("how", "ranks"), [("rows", 2), ("rows-root", 4)])
@slow
def test_a_full_state_dict_goes_into_a_single_process(pool: Pool, how: str, ranks: int) -> None:
    setup = Setup(head={"bias": True})
    steps = make_steps(setup, [3, 4][: ranks // 2])
    model = setup.model()
    model.load_state_dict(pool.run(ranks, full_state, setup, steps, how)[0])
    assert_same([snapshot(model)], train(setup, steps, "alone"))
