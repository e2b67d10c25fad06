"""When steps write, and how strongly: ``start``, and fading with the learning rate."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from hebbian_softmax import HebbianSoftmax
from hebbian_softmax.write.timing import Timing, begin_group, timing_of_step
from tests.heads import assert_same_bits, attached_head, copied_state, train

LITERAL: dict[str, Any] = {"write": "literal", "gamma": 0.5, "limit": 1000}


def write_one(head: HebbianSoftmax, optimizer: torch.optim.Optimizer, lr: float | Tensor, label: int = 1) -> float:
    """Make a step that moves nothing by gradients, and return λ: how much of the way to h the row went."""
    for group in optimizer.param_groups:
        group["lr"] = lr
    h = torch.randn(1, head.in_features, dtype=head.weight.dtype)
    before = head.weight.detach()[label].clone()
    optimizer.zero_grad()
    (0 * head.loss(h, torch.tensor([label]))).backward()
    optimizer.step()
    way = h[0] - before
    gone = head.weight.detach()[label] - before
    rate = float(gone @ way / (way @ way))
    torch.testing.assert_close(gone, rate * way, rtol=1e-6, atol=1e-9)
    return rate


def literal_head(**options: Any) -> tuple[HebbianSoftmax, torch.optim.Optimizer]:
    torch.manual_seed(0)
    return attached_head(dtype=torch.float64, **(LITERAL | options))


def test_writes_follow_the_learning_rate_down_and_up_again() -> None:
    head, optimizer = literal_head(fade=True)
    rates = [write_one(head, optimizer, lr) for lr in (0.1, 0.1, 0.05, 0.01, 0.0, 0.1, 0.2, 0.1)]
    assert rates == pytest.approx([1, 1, 0.25, 0.05, 0, 0.5, 0.5, 0.25])


@pytest.mark.parametrize("schedule", ["constant", "warm-up", "warm-up from 0"])
def test_a_constant_learning_rate_and_a_warm_up_change_nothing(schedule: str) -> None:
    states = []
    for fade in (True, False):
        torch.manual_seed(0)
        head, optimizer = attached_head(torch.optim.Adam, fade=fade)
        for step in range(6):
            first = {"constant": 5, "warm-up": 1, "warm-up from 0": 0}[schedule]
            optimizer.param_groups[0]["lr"] = 0.1 * max(first, step) / 5
            train(head, optimizer, (step % 3, 4))
        states.append(copied_state(head))
    assert_same_bits(*states)
    assert torch.isfinite(states[0]["weight"]).all()


def test_without_any_learning_rate_above_0_writes_are_full() -> None:
    head, optimizer = literal_head(fade=True)
    assert [write_one(head, optimizer, 0.0) for _ in range(4)] == pytest.approx([1, 1, 0.5, 0.5])


def test_numbers_stay_numbers_whatever_the_default_device() -> None:
    with torch.device("meta"):  # a tensor that is made here has no value to read
        timing = Timing(True, 0.19, 0.2)
        assert timing.strength() == pytest.approx(0.95)
        assert timing.fallen(torch.device("meta")) == pytest.approx(0.5)


def test_the_ratio_has_the_precision_of_float64() -> None:
    old = torch.get_default_dtype()
    try:
        for dtype in (torch.float16, torch.bfloat16, torch.float32):
            torch.set_default_dtype(dtype)
            assert Timing(True, 0.02, 0.1).strength() == 0.02 / 0.1
            lr, highest = (torch.tensor(each, dtype=torch.float64) for each in (2e-8, 2.5e-8))
            assert float(Timing(True, lr, highest).strength()) == 2e-8 / 2.5e-8
    finally:
        torch.set_default_dtype(old)
    head, optimizer = literal_head(fade=True)
    rates = [write_one(head, optimizer, lr) for lr in (0.1, 0.1, 0.007)]
    assert rates[2] == pytest.approx(0.5 * (0.007 / 0.1), rel=1e-12)


def test_every_step_notes_its_learning_rate() -> None:
    head, optimizer = literal_head(fade=True)
    write_one(head, optimizer, 0.1)
    write_one(head, optimizer, 0.1)
    optimizer.param_groups[0]["lr"] = 0.2
    optimizer.zero_grad()
    head.loss(torch.randn(1, 4, dtype=torch.float64), torch.tensor([1]), remember=False).backward()
    optimizer.step()
    assert write_one(head, optimizer, 0.1) == pytest.approx(0.25)


def test_learning_rates_on_a_device_stay_there() -> None:
    group: dict[str, Any] = {"lr": torch.zeros((), device="meta")}
    begin_group(group)
    assert group["highest_lr"].device.type == "meta"
    for lr in (torch.zeros((), device="meta"), torch.zeros(1, device="meta")):
        group["lr"] = lr
        timing = timing_of_step(group)
        assert timing.waits
        assert timing.highest is group["highest_lr"]
        assert isinstance(timing.lr, Tensor)
        assert isinstance(timing.highest, Tensor)
        assert {timing.lr.shape, timing.highest.shape} == {lr.shape}
        strength = timing.strength()
        assert isinstance(strength, Tensor)
        assert (strength.dtype, strength.shape, strength.device.type) == (torch.float64, (), "meta")


def test_a_class_that_first_comes_at_the_end_of_a_cosine_is_written_whole() -> None:
    head, optimizer = literal_head(fade=True)

    def cosine(share: float) -> float:
        return 0.05 * (1 + math.cos(math.pi * share))

    for step in range(95):
        write_one(head, optimizer, cosine(step / 100), label=1)
    assert write_one(head, optimizer, cosine(0.95), label=2) == pytest.approx(1)
    assert write_one(head, optimizer, cosine(0.95), label=2) == pytest.approx(cosine(0.95) / 0.1)


def test_a_class_first_seen_before_the_start_does_not_fade_in_its_first_write_after_it() -> None:
    head, optimizer = literal_head(fade=True, start=4)
    assert [write_one(head, optimizer, 0.1) for _ in range(4)] == [0, 0, 0, 0]
    assert head.counts[1] == 4
    assert head.since_start[1] == 0
    assert write_one(head, optimizer, 0.02) == pytest.approx(0.5)
    assert write_one(head, optimizer, 0.02) == pytest.approx(0.1)


def test_memorize_neither_waits_nor_fades() -> None:
    head, optimizer = literal_head(fade=True, start=5)
    write_one(head, optimizer, 0.1)
    h = torch.randn(1, 4, dtype=torch.float64)
    head.memorize(h, torch.tensor([3]))
    assert torch.equal(head.weight[3], h[0])
    write_one(head, optimizer, 0.0)
    head.memorize(h, torch.tensor([2]))
    assert torch.equal(head.weight[2], h[0])
    assert not head.since_start.any()  # steps have not begun to write
    write_one(head, optimizer, 0.1)
    assert write_one(head, optimizer, 0.02, label=2) == pytest.approx(1)
    head.memorize(h, torch.tensor([4]))
    assert write_one(head, optimizer, 0.02, label=4) == pytest.approx(0.2)


def test_not_memorizing_is_no_first_write() -> None:
    head, optimizer = literal_head(fade=True)
    write_one(head, optimizer, 0.1, label=3)
    head.memorizing = False
    assert write_one(head, optimizer, 0.01, label=1) == 0
    head.memorizing = True
    assert write_one(head, optimizer, 0.01, label=1) == pytest.approx(1)
    assert write_one(head, optimizer, 0.01, label=1) == pytest.approx(0.05)


def test_the_learning_rate_is_that_of_the_group_with_the_weight() -> None:
    head = HebbianSoftmax(4, 6, bias=True, fade=True, dtype=torch.float64, **LITERAL)
    optimizer = torch.optim.SGD([{"params": [head.bias], "lr": 10.0}, {"params": [head.weight], "lr": 0.1}])
    head.attach(optimizer)
    h, y = torch.randn(1, 4, dtype=torch.float64), torch.tensor([1])
    for lr in (0.1, 0.1, 0.025):
        optimizer.param_groups[1]["lr"] = lr
        optimizer.zero_grad()
        before = head.weight.detach()[1].clone()
        (0 * head.loss(h, y)).backward()
        optimizer.step()
        h = h + 1
    torch.testing.assert_close(head.weight.detach()[1] - before, 0.125 * (h[0] - 1 - before))
    assert "highest_lr" not in optimizer.param_groups[0]
    assert optimizer.param_groups[1]["highest_lr"] == 0.1


def test_a_new_optimizer_begins_anew_and_a_loaded_one_goes_on() -> None:
    head, optimizer = literal_head(fade=True)
    for lr in (0.1, 0.1, 0.01):
        write_one(head, optimizer, lr)
    other = torch.optim.SGD(head.parameters(), lr=0.01)
    head.attach(other, replace=True)
    assert write_one(head, other, 0.01) == pytest.approx(0.5)
    third = torch.optim.SGD(head.parameters(), lr=0.01)
    head.attach(third, replace=True)
    third.load_state_dict(optimizer.state_dict())
    assert write_one(head, third, 0.01) == pytest.approx(0.05)
    old = optimizer.state_dict()
    del old["param_groups"][0]["highest_lr"]  # saved by version 0.1
    third.load_state_dict(old)
    assert write_one(head, third, 0.01) == pytest.approx(0.5)


def test_a_run_resumes_bit_for_bit() -> None:
    def schedule(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 12)

    torch.manual_seed(0)
    head, optimizer = attached_head(torch.optim.Adam, fade=True, start=3)
    scheduler = schedule(optimizer)

    def go_on(steps: range) -> None:
        for step in steps:
            torch.manual_seed(step)
            train(head, optimizer, (step % 4, 5))
            scheduler.step()

    go_on(range(5))
    states = copy.deepcopy((head.state_dict(), optimizer.state_dict(), scheduler.state_dict()))
    go_on(range(5, 12))
    expected = copied_state(head)
    head, optimizer = attached_head(torch.optim.Adam, fade=True, start=3)
    scheduler = schedule(optimizer)
    for each, state in zip((head, optimizer, scheduler), states, strict=True):
        each.load_state_dict(state)
    go_on(range(5, 12))
    assert_same_bits(head.state_dict(), expected)


def test_a_learning_rate_may_be_a_tensor_or_missing() -> None:
    head, optimizer = literal_head(fade=True)
    rates = [write_one(head, optimizer, torch.tensor(lr, dtype=torch.float64)) for lr in (0.1, 0.1, 0.05)]
    assert rates == pytest.approx([1, 1, 0.25])
    assert optimizer.param_groups[0]["highest_lr"] == 0.1

    class WithoutRate(torch.optim.Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {})

        def step(self, closure: Any = None) -> None:
            pass

    other = WithoutRate(head.parameters())
    head.attach(other, replace=True)
    for group in other.param_groups:
        assert "highest_lr" not in group
    before, h = head.weight.detach()[1].clone(), torch.randn(1, 4, dtype=torch.float64)
    head.loss(h, torch.tensor([1])).backward()
    other.step()
    torch.testing.assert_close(head.weight.detach()[1] - before, 0.5 * (h[0] - before))


def test_without_fading_the_optimizer_has_no_further_key() -> None:
    head, optimizer = attached_head()
    train(head, optimizer)
    assert "highest_lr" not in optimizer.param_groups[0]


def test_a_state_without_the_second_count_was_written_from_the_first_step() -> None:
    head, optimizer = attached_head()
    train(head, optimizer)
    state = head.state_dict()
    del state["since_start"]
    other = HebbianSoftmax(4, 6, gamma=0.3, limit=9)
    other.load_state_dict(state)
    assert other.since_start.tolist() == head.counts.tolist() == [0, 1, 1, 0, 0, 0]
    head.add_classes(2)
    assert head.since_start.tolist() == [0, 1, 1, 0, 0, 0, 0, 0]
    head.reset_memory()
    assert not head.since_start.any()


def settled(head: HebbianSoftmax, optimizer: torch.optim.Optimizer, steps: int) -> list[int]:
    """Train on activations that are always the same for a class; return when writing began, after each step."""
    own, found = torch.randn(6, 4, generator=torch.Generator().manual_seed(1)), []
    for step in range(steps):
        labels = torch.tensor([step % 3, 3 + step % 3])
        optimizer.zero_grad()
        head.loss(own[labels].to(head.weight.dtype), labels).backward()
        optimizer.step()
        assert head.settling is not None
        found.append(int(head.settling.began))
    return found


def test_writing_begins_once_features_have_settled() -> None:
    torch.manual_seed(0)
    head, optimizer = attached_head(start="auto", limit=100)
    began = settled(head, optimizer, 110)
    first = next(step for step, value in enumerate(began) if value >= 0)
    assert first == 3 + 100 - 1  # in the first three batches no class comes a second time
    assert set(began[first:]) == {first + 1}
    assert int(head.since_start.sum()) == 2 * (len(began) - first - 1)


@pytest.mark.parametrize(
    ("fit", "recent", "batches", "begins"),
    [(0.9, 1.0, 99, True), (0.9, 1.0, 98, False), (0.7, 1.0, 99, False), (0.1, 0.1, 150, False), (0.5, 0.5, 150, True)],
)
def test_the_longer_mean_of_the_fit_must_catch_up(fit: float, recent: float, batches: int, begins: bool) -> None:
    settling = HebbianSoftmax(4, 6, gamma=0.3, limit=9, start="auto").settling
    assert settling is not None
    settling.fit.fill_(fit)
    settling.recent.fill_(recent)
    settling.batches.fill_(batches)
    settling.memory.fill_(1.0)
    cosine = recent  # so the shorter mean stays
    means = torch.tensor([[cosine, (1 - cosine**2) ** 0.5, 0.0, 0.0]])
    settling.memory[2] = torch.tensor([1.0, 0.0, 0.0, 0.0])
    settling.see(torch.tensor([2]), means, torch.tensor([5]), torch.zeros(4), torch.tensor(300))
    assert int(settling.began) == (301 if begins else -1)
    assert float(settling.recent) == pytest.approx(recent, abs=1e-6)


def test_what_is_known_of_settling_is_saved_and_goes_on_to_the_bit() -> None:
    torch.manual_seed(0)
    head, optimizer = attached_head(torch.optim.Adam, start="auto", limit=100)
    settled(head, optimizer, 97)
    states = copy.deepcopy((head.state_dict(), optimizer.state_dict()))
    assert settled(head, optimizer, 12)[-1] >= 0
    other, second = attached_head(torch.optim.Adam, start="auto", limit=100)
    other.load_state_dict(states[0])
    second.load_state_dict(states[1])
    settled(other, second, 12)
    assert head.since_start.any()
    assert_same_bits(other.state_dict(), head.state_dict())
    assert int(copy.deepcopy(head).bfloat16().settling.memory.dtype.itemsize) == 4  # type: ignore[union-attr]


def test_states_of_heads_that_did_not_wait() -> None:
    head, optimizer = attached_head()
    train(head, optimizer)
    waiting = HebbianSoftmax(4, 6, gamma=0.3, limit=9, start="auto")
    waiting.load_state_dict(head.state_dict())
    assert waiting.settling is not None
    assert int(waiting.settling.began) == 0
    assert int(waiting.settling.stride) == 1
    head.load_state_dict(waiting.state_dict())
    new = HebbianSoftmax(4, 6, gamma=0.3, limit=9, start="auto")
    new.load_state_dict(HebbianSoftmax(4, 6, gamma=0.3, limit=9).state_dict())
    assert new.settling is not None
    assert int(new.settling.began) == -1
    trained = HebbianSoftmax.from_linear(torch.nn.Linear(4, 6), gamma=0.3, limit=9, start="auto")
    assert trained.settling is not None
    assert int(trained.settling.began) == 0
    trained.load_state_dict(torch.nn.Linear(4, 6).state_dict() | {"bias": torch.zeros(6)})
    assert int(trained.settling.began) == 0
    trained.reset_memory()
    assert int(trained.settling.began) == -1


@pytest.mark.parametrize(("classes", "more"), [(0, 5), (3, 4), (1000, 100), (5000, 100)])
def test_classes_are_sampled_also_of_a_head_that_grows(classes: int, more: int) -> None:
    head = HebbianSoftmax(4, classes, gamma=0.3, limit=9, start="auto")
    head.add_classes(more)
    assert head.settling is not None
    total = classes + more
    sampled = head.settling.sampled(torch.arange(total))
    assert int(sampled.sum()) == len(head.settling.memory) == min(total, 1024)
    assert sampled[0]
    other = HebbianSoftmax(4, total, gamma=0.3, limit=9, start="auto")
    other.load_state_dict(head.state_dict())
    assert other.settling is not None
    assert torch.equal(other.settling.sampled(torch.arange(total)), sampled)
