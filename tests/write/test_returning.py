"""How often classes seen once come again, by which a first write says how likely its class is."""

from __future__ import annotations

import copy

import pytest
import torch

from hebbian_softmax import HebbianSoftmax
from hebbian_softmax.write.running import RunningStatistics, sampling_stride
from tests.heads import early_head

FEATURES = 4


def of(classes: int) -> RunningStatistics:
    return RunningStatistics(FEATURES, classes, device="cpu", dtype=torch.float64)


def feed(running: RunningStatistics, batches: list[list[int]], classes: int) -> list[float]:
    """Take in batches of targets from the beginning, and return c* after each, as a first write in it reads it.

    Along the mean activation rows have log c, and rare rows have been seen e³ times on average.
    """
    counts, found = torch.zeros(classes, dtype=torch.int64), []
    running.along.copy_(torch.tensor([3.0, 3.0, 10.0, 10.0]))
    for targets in batches:
        seen, n = torch.tensor(targets).unique(return_counts=True)
        running.see_returning(counts, seen, n)
        running.see_activations(torch.zeros(FEATURES), torch.zeros(()), n.sum())
        found.append(float(running.usual_component().exp()))
        counts[seen] += n
    return found


MOST = pytest.approx(20.0855, rel=1e-4)  # e³


def test_classes_count_by_how_long_they_have_waited() -> None:
    """Each batch has a new class and the one that was new before it; the first class of all never comes again."""
    found = feed(of(20), [[0, 1], *([k, k + 1] for k in range(1, 18))], 20)
    # In batch k of 0, 1, … class 0 has waited k batches, and the other class seen once has waited one and comes.
    for k in (9, 17):
        assert found[k] == pytest.approx(max(1, k / (sum(range(1, k + 1)) + k) * k))
    assert found[17] > 1


def test_classes_that_come_evenly_are_expected_as_often_as_they_come() -> None:
    """Each new class comes in every third batch from then on."""
    found = feed(of(40), [[new for new in range(k + 1) if (k - new) % 3 == 0] for k in range(40)], 40)
    # Of three classes seen once, those that have waited one and two batches do not come, and the third one does.
    assert found[39] == pytest.approx(3 / (1 + 2 + 3) * 39, rel=0.05)


def test_a_class_that_comes_once_is_not_expected_again() -> None:
    assert feed(of(9), [[k] for k in range(9)], 9)[1:] == pytest.approx([1.0] * 8)


def test_no_more_than_rare_rows_have_is_expected() -> None:
    """In the last of 60 batches each class seen once comes again."""
    assert feed(of(70), [[0], *[[k, k - 1] for k in range(1, 60)]], 70)[59] == MOST


def test_where_no_class_was_seen_once_all_come_often() -> None:
    assert feed(of(9), [[k, k] for k in range(9)], 9) == [MOST] * 9


@pytest.mark.parametrize(
    ("classes", "stride"), [(0, 1), (1, 1), (1024, 1), (1025, 2), (2048, 2), (2049, 4), (10**7, 16384)]
)
def test_at_most_1024_classes_are_sampled_evenly(classes: int, stride: int) -> None:
    assert sampling_stride(classes) == stride
    sampled = of(classes).first.shape[0]
    assert sampled <= 1024
    assert sampled * stride >= classes  # to the last one


def test_classes_that_are_not_sampled_are_not_looked_at() -> None:
    running = of(3000)
    feed(running, [[7, 8, 2100], [9], [7, 8, 8, 2100, 16]], 3000)
    assert running.returning.tolist() == pytest.approx([2 * 3 / 3, (1 + 1 + 2 + 2) / 3])
    assert running.first.nonzero().flatten().tolist() == [4]  # class 16; the first batch has the number 0


@pytest.mark.parametrize("by", [3, 500])
def test_a_head_that_grows_samples_its_new_classes(by: int) -> None:
    """With 1,025 classes and more every second is sampled."""
    head = early_head(FEATURES, 1022, write="across")
    head.memorize(torch.randn(2, FEATURES) + 1, torch.tensor([0, 1]))
    head.memorize(torch.randn(2, FEATURES) + 1, torch.tensor([4, 5]))
    head.add_classes(by)
    fresh = HebbianSoftmax(FEATURES, 1022 + by)
    assert head.running.first.shape == fresh.running.first.shape  # so that states fit
    head.memorize(torch.randn(2, FEATURES) + 1, torch.tensor([1022, 6]))
    assert head.running.first.nonzero().flatten().tolist() == [2, 3, 511]
    assert head.running.first[[2, 3, 511]].tolist() == [1, 2, 2]
    twin = copy.deepcopy(head)
    twin.memorize(torch.randn(2, FEATURES) + 1, torch.tensor([1022, 6]))
    assert twin.running.returning[0] > 0


def test_a_sample_that_keeps_its_size_is_spread_over_twice_the_classes() -> None:
    running = of(1024)
    running.first.copy_(torch.arange(1024))
    assert running.grow(2048) == 2
    assert running.first.tolist() == [*range(0, 1024, 2), *[0] * 512]


def test_a_head_that_begins_without_classes_looks_at_those_that_come() -> None:
    head = early_head(FEATURES, 0, write="across")
    head.add_classes(3)
    for k in (0, 1, 2, 0):
        head.memorize(torch.randn(1, FEATURES) + 1, torch.tensor([k]))
    assert head.running.first.tolist() == [0, 1, 2]
    assert head.running.returning.tolist() == pytest.approx([3 / 4, (1 + 3 + 6) / 4])


def test_states_from_before_there_was_this_begin_anew() -> None:
    head = early_head(FEATURES, 3, write="across")
    for _ in range(3):
        head.memorize(torch.randn(2, FEATURES) + 1, torch.tensor([0, 1]))
    head.memorize(torch.randn(1, FEATURES) + 1, torch.tensor([2]))
    new = ("running.first", "running.returning")
    state = {key: value for key, value in head.state_dict().items() if key not in new}
    again = early_head(FEATURES, 3, write="across")
    again.load_state_dict(state)
    assert again.running.first.tolist() == [0, 0, 0]
    again.memorize(torch.randn(1, FEATURES) + 1, torch.tensor([2]))
    assert again.running.returning.tolist() == pytest.approx([4 / 5, 4 / 5])  # it may have come with the first batch


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_state_of_another_dtype_that_is_taken_as_it_is_can_go_on(dtype: torch.dtype) -> None:
    state = {key: value.to(dtype) for key, value in early_head(FEATURES, 3, write="across").state_dict().items()}
    state["filled"] = HebbianSoftmax(FEATURES, 3).filled
    head = early_head(FEATURES, 3, write="across")
    head.load_state_dict(state, assign=True)
    assert head.running.first.dtype == torch.int64
    for k in (0, 1, 0):
        head.memorize(torch.randn(1, FEATURES).to(dtype) + 1, torch.tensor([k]))
    assert head.running.first.tolist() == [0, 1, 0]


def test_resetting_forgets_it() -> None:
    head = early_head(FEATURES, 3, write="across")
    head.memorize(torch.randn(2, FEATURES), torch.tensor([0, 1]))
    head.memorize(torch.randn(2, FEATURES), torch.tensor([0, 2]))
    head.reset_memory()
    assert head.running.first.tolist() == [0, 0, 0]
    assert head.running.returning.tolist() == [0.0, 0.0]
