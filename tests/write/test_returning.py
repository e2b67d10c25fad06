"""How often classes seen once come again, by which a first write says how likely its class is."""

from __future__ import annotations

import pytest
import torch

from hebbian_softmax import HebbianSoftmax
from hebbian_softmax.write.returning import Returning
from tests.heads import early_head

FEATURES = 4


def of(classes: int) -> Returning:
    return Returning(classes, device="cpu", dtype=torch.float64)


def feed(returning: Returning, batches: list[list[int]], classes: int) -> list[float]:
    """Take in batches of targets from the beginning, and return c* after each, as a first write in it reads it."""
    counts, found = torch.zeros(classes, dtype=torch.int64), []
    for number, targets in enumerate(batches):
        seen, n = torch.tensor(targets).unique(return_counts=True)
        returning.see(counts, seen, n, torch.tensor(number))
        found.append(float(returning.usual_count(torch.tensor(number), 50)))
        counts[seen] += n
    return found


def test_classes_count_by_how_long_they_have_waited() -> None:
    """Each batch has a new class and the one that was new before it; the first class of all never comes again."""
    found = feed(of(20), [[0, 1], *([k, k + 1] for k in range(1, 18))], 20)
    # In batch k of 0, 1, … class 0 has waited k batches, and the other class seen once has waited one and comes.
    for k in (9, 17):
        came, waited = k, sum(range(1, k + 1)) + k
        assert found[k] == pytest.approx(max(1, came / waited * k))
    assert found[17] > 1


def test_classes_that_come_evenly_are_expected_as_often_as_they_come() -> None:
    """Each new class comes in every third batch from then on."""
    batches = [[new for new in range(k + 1) if (k - new) % 3 == 0] for k in range(40)]
    found = feed(of(40), batches, 40)
    # One of three classes seen once has waited three batches and comes; the others have waited one and two.
    assert found[39] == pytest.approx(3 / (1 + 2 + 3) * 39, rel=0.05)


def test_a_class_that_comes_once_is_not_expected_again() -> None:
    assert feed(of(9), [[k] for k in range(9)], 9) == [1.0] * 9


def test_where_no_class_was_seen_once_all_come_often() -> None:
    assert feed(of(9), [[k, k] for k in range(9)], 9)[1:] == [50.0] * 8
    assert float(of(9).usual_count(torch.tensor(3), 0)) == 1.0


def test_of_many_classes_some_are_sampled() -> None:
    """Of 3,000 classes every second is, and 1,024 in all; what the others do is not looked at."""
    returning = of(3000)
    assert returning.size == 1024
    assert returning.sampled(torch.tensor([0, 1, 2, 2046, 2047, 2048])).tolist() == [
        True,
        False,
        True,
        True,
        False,
        False,
    ]
    feed(returning, [[7, 8, 2100], [9], [7, 8, 8, 2100]], 3000)
    assert returning.first.nonzero().numel() == 0  # the first batch has the number 0
    assert returning.sums.tolist() == pytest.approx([2 * 2 / 3, (1 + 2) / 3])


def test_a_head_that_grows_samples_its_new_classes() -> None:
    head = early_head(FEATURES, 3, write="across")
    for _ in range(2):
        head.memorize(torch.randn(2, FEATURES) + 1, torch.tensor([0, 1]))
    head.add_classes(2)
    head.memorize(torch.randn(1, FEATURES) + 1, torch.tensor([4]))
    assert head.returning.first.tolist() == [0, 0, 0, 0, 2]


def test_states_from_before_begin_anew() -> None:
    head = early_head(FEATURES, 3, write="across")
    for _ in range(3):
        head.memorize(torch.randn(2, FEATURES) + 1, torch.tensor([0, 1]))
    head.memorize(torch.randn(1, FEATURES) + 1, torch.tensor([2]))
    state = {key: value for key, value in head.state_dict().items() if not key.startswith("returning.")}
    again = early_head(FEATURES, 3, write="across")
    again.load_state_dict(state)
    assert [each.tolist() for each in again.returning.buffers()] == [1, [0, 0, 0], [0.0, 0.0]]
    again.memorize(torch.randn(1, FEATURES) + 1, torch.tensor([2]))
    assert again.returning.sums.tolist() == pytest.approx([4 / 5, 4 / 5])  # it may have come with the first batch


def test_resetting_forgets_it() -> None:
    head = HebbianSoftmax(FEATURES, 3)
    head.memorize(torch.randn(2, FEATURES), torch.tensor([0, 1]))
    head.memorize(torch.randn(2, FEATURES), torch.tensor([0, 2]))
    head.reset_memory()
    assert [each.tolist() for each in head.returning.buffers()] == [1, [0, 0, 0], [0.0, 0.0]]


def test_its_sums_stay_float32() -> None:
    head = HebbianSoftmax(FEATURES, 3).half()
    assert head.returning.sums.dtype == torch.float32
    assert head.returning.first.dtype == torch.int64
