"""Learning rates by hand."""

import math

import pytest

from hebbian_softmax.lab.language.schedule import SCHEDULES, learning_rate


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [1, 2, 2, 2, 2, 2]),
        ("linear", [1, 2, 2, 1.5, 1, 0.5]),
        ("cosine", [1, 2, *(1 + math.cos(math.pi * done / 4) for done in range(4))]),
    ],
)
def test_warm_up_then_the_schedule(schedule: str, expected: list[float]) -> None:
    rates = [learning_rate(step, peak=2.0, schedule=schedule, warmup=2, steps=6) for step in range(6)]
    assert rates == pytest.approx(expected)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_run_that_ends_in_its_warm_up_only_rises(schedule: str) -> None:
    rates = [learning_rate(step, peak=1.0, schedule=schedule, warmup=10, steps=5) for step in range(5)]
    assert rates == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5])
    assert learning_rate(0, peak=1.0, schedule=schedule, warmup=0, steps=1) == 1.0
