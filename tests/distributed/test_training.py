"""DDP and FSDP2 over gloo: equal to one process on the joined batch, and bit-identical across ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from hebbian_softmax import ConstantRate, InclusiveRate, PaperRate, RecentRate
from tests.distributed.pool import Pool
from tests.distributed.training import Model, Setup, Step, Training, check, count_targets, make_steps, snapshot

every_way = pytest.mark.parametrize("how", ["ddp", "root", "head"])
fsdp = pytest.mark.parametrize("how", ["root", pytest.param("head", marks=pytest.mark.slow)])
two_or_three = pytest.mark.parametrize("world_size", [pytest.param(2, marks=pytest.mark.slow), 3])
clearing = pytest.mark.parametrize("set_to_none", [True, False])


@pytest.mark.parametrize(
    ("scale", "write", "optimizer"),
    [
        (1.0, "literal", "sgd"),
        (0.5, "centred", "adam"),
        ("match", "across", "sgd"),
        ("match", "across", "adam"),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in [
                (1.0, "literal", "adam"),
                (0.5, "across", "sgd"),
                ("match", "literal", "adam"),
                ("match", "centred", "sgd"),
            ]
        ),
    ],
)
@every_way
@two_or_three
def test_equals_one_process(
    pool: Pool, world_size: int, how: str, scale: float | str, write: str, optimizer: str
) -> None:
    setup = Setup(head={"scale": scale, "write": write, "bias": True}, optimizer=optimizer)
    alone = check(pool, how, setup, [4] * world_size)
    assert alone["head.counts"].sum() == 16 * world_size
    assert alone["head.counts"].max() > 6  # a class went past the limit


@pytest.mark.parametrize(
    ("how", "head"),
    [
        ("ddp", {"objective": "ip"}),
        ("ddp", {"objective": "svm"}),
        ("ddp", {"objective": "smax"}),
        ("ddp", {"rate": InclusiveRate(0.2, 9)}),
        ("ddp", {"rate": ConstantRate(0.3)}),
        ("ddp", {"limit": 0}),
        ("head", {"objective": "ip"}),
        ("head", {"rate": InclusiveRate(0.2, 9)}),
    ],
    ids=str,
)
def test_objectives_and_rates(pool: Pool, how: str, head: dict[str, Any]) -> None:
    check(pool, how, Setup(head=head), [3, 5, 4])


class Sooner(RecentRate):
    """Grows from 0 as soon as the mean count does, and falls with the batches, so that few of them show both."""

    def __call__(self, counts: Tensor, n: Tensor, mean_count: Any = 0, batches: Any = 0, *_: Any) -> Tensor:
        return super().__call__(counts, n, mean_count, 10**6, 0) / (1 + batches)


class Hasty(RecentRate):
    """As after very many batches, so that few of them show how the rate follows the learning rate."""

    def __call__(self, counts: Tensor, n: Tensor, mean_count: Any = 0, batches: Any = 0, *rest: Any) -> Tensor:
        return super().__call__(counts, n, mean_count, 10**6, *rest)


@pytest.mark.parametrize("how", ["ddp", "head"])
def test_a_rate_that_rises_as_the_learning_rate_falls(pool: Pool, how: str) -> None:
    rows = []
    for rate in (Hasty(0.9), RecentRate(0.9)):
        head = {"rate": rate, "limit": 50, "fade": True, "write": "centred"}
        setup = Setup(head=head, optimizer="slow", counts=tuple(range(20, 27)), decay=0.5)
        rows.append(check(pool, how, setup, [3, 5, 4], steps=3)["head.weight"])
    assert not torch.allclose(*rows, rtol=1e-3)


@pytest.mark.parametrize("how", ["ddp", "head"])
def test_a_limit_that_grows(pool: Pool, how: str) -> None:
    rows = []
    for rate in (Sooner(0.3), PaperRate(0.3, 1)):
        setup = Setup(head={"rate": rate, "limit": 1, "write": "across"}, optimizer="slow")
        alone = check(pool, how, setup, [3, 5, 4], steps=10)
        assert alone["head.running.seen"] > 8 * setup.classes  # so T has reached 2 and more
        rows.append(alone["head.weight"])
    assert not torch.equal(*rows)


def test_the_usual_limit_is_the_number_of_all_classes(pool: Pool) -> None:
    """Each rank has a part of the rows; classes seen 7 times or more are left to gradients."""
    setup = Setup(head={"limit": None}, counts=(4, 5, 6, 7, 8, 99, 5))
    given = [Setup(head={"limit": limit}, counts=setup.counts) for limit in (7, 6, 8)]
    usual, same, *others = (check(pool, "head", each, [3, 5], steps=2)["head.weight"] for each in (setup, *given))
    torch.testing.assert_close(usual, same, rtol=0, atol=0)
    assert not any(torch.equal(usual, other) for other in others)


@pytest.mark.parametrize(("how", "dtype"), [("ddp", torch.float64), ("root", torch.float64)])
def test_features_that_settle(pool: Pool, how: str, dtype: torch.dtype) -> None:
    """Classes come often and the body hardly learns, so their activations stay where they are."""
    setup = Setup(classes=3, head={"start": "auto", "limit": 500}, optimizer="slow", dtype=dtype)
    alone = check(pool, how, setup, [6, 3, 5], steps=30, targets=lambda rank, drawn: drawn)
    assert int(alone["head.settling.batches"]) > 1
    assert alone["head.settling.memory"].any(1).all()


@pytest.mark.parametrize(("how", "optimizer"), [("ddp", "adam"), ("head", "sgd"), ("ddp", "one-pass")])
def test_writes_that_begin_later_and_fade(pool: Pool, how: str, optimizer: str) -> None:
    head = {"start": 2, "fade": True, "limit": 50}
    alone = check(pool, how, Setup(head=head, optimizer=optimizer, decay=0.5), [3, 5, 4], steps=5)
    assert alone["head.counts"].sum() == 5 * 12
    assert alone["head.since_start"].sum() == 3 * 12


@pytest.mark.parametrize("how", ["ddp", "root"])
@two_or_three
def test_tied_weights(pool: Pool, world_size: int, how: str) -> None:
    check(pool, how, Setup(tied=True, optimizer="adam"), [4] * world_size)


@pytest.mark.parametrize(("how", "optimizer"), [("ddp", "one-pass"), ("root", "one-pass"), ("ddp", "spread")])
def test_one_pass_and_an_optimizer_whose_state_is_spread_over_ranks(pool: Pool, how: str, optimizer: str) -> None:
    check(pool, how, Setup(optimizer=optimizer), [3, 5])


@every_way
def test_rows_that_only_the_rule_changes(pool: Pool, how: str) -> None:
    check(pool, how, Setup(frozen=True), [3, 5], micro_batches=2)


@pytest.mark.parametrize("sizes", [[1, 7], [6, 1, 3], [5, 0], [0, 4, 2]], ids=str)
def test_uneven_and_empty_batches(pool: Pool, sizes: list[int]) -> None:
    check(pool, "ddp", Setup(), sizes)


@pytest.mark.parametrize("classes", [4, 6, 8])
@fsdp
def test_rows_that_do_not_divide_and_a_rank_without_rows(pool: Pool, how: str, classes: int) -> None:
    """4 classes on 3 ranks are 2, 2 and 0 rows; 8 are 3, 3 and 2. The batches are uneven too."""
    check(pool, how, Setup(classes=classes, clip=0.1), [3, 0, 5])


@pytest.mark.parametrize(("how", "world_size"), [("ddp", 2), ("ddp", 3), ("root", 2)])
def test_a_rank_with_all_targets_ignored(pool: Pool, how: str, world_size: int) -> None:
    def targets(rank: int, drawn: Tensor) -> Tensor:
        return drawn if rank != 1 else drawn * 0 - 100

    alone = check(pool, how, Setup(), [4] * world_size, targets=targets)
    assert alone["head.counts"].sum() == 16 * (world_size - 1)


def test_all_targets_of_all_ranks_ignored(pool: Pool) -> None:
    alone = check(pool, "ddp", Setup(), [4, 4], targets=lambda rank, drawn: drawn * 0 - 100)
    assert alone["head.counts"].sum() == 0
    assert alone["head.running.batches"].tolist() == [0, 0]


@two_or_three
def test_a_rank_with_no_active_class(pool: Pool, world_size: int) -> None:
    """Rank 1 sees only classes past the limit, which are counted and no longer written."""

    def targets(rank: int, drawn: Tensor) -> Tensor:
        return 5 + drawn % 2 if rank == 1 else drawn % 5

    alone = check(pool, "ddp", Setup(counts=(0, 0, 0, 0, 0, 6, 9)), [4] * world_size, targets=targets)
    assert alone["head.counts"][5:].sum() == 15 + 16


@clearing
@pytest.mark.parametrize("bucket_view", [True, False])
@two_or_three
def test_accumulation_under_no_sync(pool: Pool, world_size: int, bucket_view: bool, set_to_none: bool) -> None:
    setup, options = Setup(set_to_none=set_to_none, optimizer="adam"), {"gradient_as_bucket_view": bucket_view}
    check(pool, "ddp", setup, [3, 1, 2][:world_size], options=options, micro_batches=3)


@clearing
@pytest.mark.parametrize("classes", [4, 7])
@fsdp
def test_accumulation_without_gradient_sync(pool: Pool, how: str, classes: int, set_to_none: bool) -> None:
    check(pool, how, Setup(classes=classes, set_to_none=set_to_none), [3, 1, 2], micro_batches=3)


@clearing
@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize(
    "options",
    [
        {"gradient_as_bucket_view": True},
        {"broadcast_buffers": False},
        {"broadcast_buffers": False, "gradient_as_bucket_view": True},
        {"static_graph": True},
        {"bucket_cap_mb": 1e-5},
    ],
    ids=lambda options: "-".join(options),
)
def test_options_of_ddp(pool: Pool, options: dict[str, Any], clip: float | None, set_to_none: bool) -> None:
    check(pool, "ddp", Setup(clip=clip, set_to_none=set_to_none), [2, 4], options=options)


@pytest.mark.parametrize("reshard", [True, False])
def test_reshard_after_forward(pool: Pool, reshard: bool) -> None:
    check(pool, "root", Setup(), [3, 4], options={"reshard_after_forward": reshard})


def train_folded(setup: Setup, steps: list[Step], how: str) -> dict[str, Tensor]:
    training = Training(setup, how)
    training.head.attachment.pending.fold_rows = 2
    return training.run(steps)


def test_many_activations_are_folded(pool: Pool) -> None:
    check(pool, "root", Setup(classes=4, clip=0.1), [3, 1, 2], train_folded, micro_batches=4)


class Absent(Model):
    """On the last of several ranks the model does not use its head."""

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        if dist.is_initialized() and dist.get_rank() == dist.get_world_size() - 1:
            return self.hidden(x).sum() * 0
        return super().forward(x, targets)


@two_or_three
def test_a_rank_that_has_nothing_pending_takes_part(pool: Pool, world_size: int) -> None:
    sizes, options = [4] * (world_size - 1) + [0], {"find_unused_parameters": True}
    check(pool, "ddp", Setup(kind=Absent), sizes, options=options)


class Features(Model):
    """Gives activations only."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return self.hidden(x)


def train_in_the_loop(setup: Setup, steps: list[Step], how: str) -> dict[str, Tensor]:
    training = Training(setup, how)
    training.called = lambda x, targets: training.head.loss(training.model(x), targets, reduction="sum")
    return training.run(steps)


def test_loss_called_outside_the_model(pool: Pool) -> None:
    check(pool, "head", Setup(kind=Features), [3, 4], train_in_the_loop)


class OwnLoss(Model):
    """Frozen features, ``remember``, and a product with the weight that is made without calling the head."""

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        h = self.hidden(x).detach()
        self.head.remember(h, targets)
        return F.cross_entropy(F.linear(h, self.head.weight), targets, reduction="sum") + self.body.weight.sum() * 0


def test_remember_frozen_features_without_calling_the_head(pool: Pool) -> None:
    assert check(pool, "root", Setup(kind=OwnLoss), [3, 3])["head.counts"].sum() == 24


def skip_and_go_on(setup: Setup, steps: list[Step], how: str, foreach: bool = False) -> dict[str, Tensor]:
    """Only the last micro-batch of each step counts: the gradients of the others are cleared without a step."""
    training = Training(setup, how)
    training.optimizer.defaults["foreach"] = foreach  # the default on a GPU; zero_grad looks here
    for step in steps:
        for batches in step:
            training.optimizer.zero_grad(set_to_none=setup.set_to_none)
            training.backward([batches], batches)
        training.finish_step()
    return snapshot(training.model)


class Logits(Model):
    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        return self.head(self.hidden(x))


def train_in_contexts(setup: Setup, steps: list[Step], how: str) -> dict[str, Tensor]:
    """Train as users do whose models return logits."""
    training = Training(setup, how)
    for step in steps:
        for batches in step if how != "alone" else [[each for part in step for each in part]]:
            x, targets = training.own(batches)
            with training.head.targets(targets):
                loss = F.cross_entropy(training.called(x, targets), targets, reduction="sum")
            (loss * training.ranks / count_targets(step)).backward()
        training.finish_step()
    return snapshot(training.model)


@every_way
def test_the_targets_context_around_a_wrapped_model(pool: Pool, how: str) -> None:
    alone = check(pool, how, Setup(kind=Logits), [3, 5], train_in_contexts, micro_batches=2)
    assert alone["head.counts"].sum() == 4 * 2 * 8


@clearing
def test_what_is_cleared_is_not_written_with_ddp(pool: Pool, set_to_none: bool) -> None:
    alone = check(pool, "ddp", Setup(set_to_none=set_to_none), [4, 4], skip_and_go_on, micro_batches=2)
    assert alone["head.counts"].sum() == 4 * 8


@pytest.mark.parametrize(("set_to_none", "foreach"), [(True, False), (False, False), (False, True)])
@pytest.mark.parametrize(
    ("clip", "micro_batches"),
    [
        (0.1, 2),
        (None, 3),
        pytest.param(None, 2, marks=pytest.mark.slow),
        pytest.param(0.1, 3, marks=pytest.mark.slow),
    ],
)
def test_what_is_cleared_is_not_written_with_fsdp(
    pool: Pool, set_to_none: bool, foreach: bool, clip: float | None, micro_batches: int
) -> None:
    """The third rank has no rows, and so no gradient to look at."""
    setup, options = Setup(classes=4, set_to_none=set_to_none, clip=clip), {"foreach": foreach}
    alone = check(pool, "root", setup, [4, 4, 4], skip_and_go_on, options, micro_batches=micro_batches)
    assert alone["head.counts"].sum() == 4 * 12


def step_without_gradient(setup: Setup, steps: list[Step], how: str) -> dict[str, Tensor]:
    """A loss of weight 0: its gradient is zero, but it came. Then a step with nothing pending at all."""
    training = Training(setup, how)
    (training.called(*training.own(steps[0][0])) * 0).backward()
    training.finish_step()
    training.optimizer.step()
    return snapshot(training.model)


def test_a_gradient_of_zero_and_no_gradient(pool: Pool) -> None:
    assert check(pool, "ddp", Setup(), [4, 4], step_without_gradient, steps=1)["head.counts"].sum() == 8


class WithAuxiliaryLoss(Model):
    auxiliary = False

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        return self.hidden(x).sum() if self.auxiliary else super().forward(x, targets)


def auxiliary_loss(setup: Setup, steps: list[Step], how: str) -> dict[str, Tensor]:
    """The head's gradients are cleared; then the tied weight gets those of a loss in which the head has no part."""
    training = Training(setup, how)
    for training.model.auxiliary in (False, True):
        training.optimizer.zero_grad()
        training.backward(steps[0], steps[0][0])
    assert training.head.weight.grad is not None
    training.finish_step()
    return snapshot(training.model)


def test_gradients_from_elsewhere_do_not_bring_back_what_was_cleared(pool: Pool) -> None:
    setup = Setup(tied=True, kind=WithAuxiliaryLoss)
    assert check(pool, "root", setup, [4, 4], auxiliary_loss, steps=1)["head.counts"].sum() == 0


def forget_once(setup: Setup, steps: list[Step]) -> dict[str, Tensor]:
    """The last rank remembers nothing in the first step; in the second step a first backward pass is cleared."""
    training = Training(setup, "root")
    training.model.remember = dist.get_rank() < 2
    training.run(steps[:1])
    training.model.remember = True
    training.backward(steps[0], steps[0][0])
    training.optimizer.zero_grad(set_to_none=False)
    return training.run(steps[1:])


def test_ranks_that_were_out_of_step_agree_again(pool: Pool) -> None:
    """The last rank has no rows: it learns from other ranks that the gradients of a pass were cleared, and of which."""
    setup = Setup(classes=4, set_to_none=False)
    steps = make_steps(setup, [4, 4, 4], steps=2)
    ranks = pool.run(3, forget_once, setup, steps)
    seen = torch.cat([*(targets for _x, targets in steps[0][0][:2]), *(targets for _x, targets in steps[1][0])])
    assert [values["head.counts"].tolist() for values in ranks] == [seen.bincount(minlength=4).tolist()] * 3
