"""Learning curves over seeds: their means, what is left out, and from which words on one stays below another."""

from typing import Any

import pytest

from hebbian_softmax.lab.language.names import HEBBIAN
from hebbian_softmax.lab.language.report.curves import below_from, curve_panels, mean_curve


def log(*values: float | None, name: str = "valid_perplexity") -> list[dict[str, Any]]:
    return [{"step": n, "words": 1_000_000 * n, name: value} for n, value in enumerate(values, start=1)]


def test_a_mean_is_over_seeds_that_all_have_a_value() -> None:
    found = mean_curve([log(10.0, 8.0, None), log(14.0, 8.0, 3.0)], "valid_perplexity")
    assert [(words, mean) for words, mean, _ in found] == [(1e6, 12.0), (2e6, 8.0)]
    assert found[0][2] == pytest.approx(8**0.5)
    assert mean_curve([[{"step": 1, "valid_perplexity": 5.0}]], "valid_perplexity") == []


@pytest.mark.parametrize(
    ("plain", "other", "expected"),
    [
        ([9, 8, 7], [10, 7, 6], 2e6),
        ([9, 8, 7], [8, 9, 6], 3e6),
        ([9, 8, 7], [8, 7, 7], None),
        ([9, 8, 7], [8, 7, 6], 1e6),
    ],
)
def test_below_counts_from_where_it_stays_so(plain: list[float], other: list[float], expected: float | None) -> None:
    assert below_from([log(*plain)], [log(*other)]) == expected


def test_what_is_drawn() -> None:
    rare = "hebbian_valid_perplexity_<100"
    logs = {"one": [log(100.0, 10.0, 9.0), log(100.0, 12.0, 9.0)], "two": [log(50.0, name=rare)]}
    everything, rarest = curve_panels(logs, {"two": HEBBIAN})
    (one, two), (none, other) = everything.lines, rarest.lines
    assert (one.label, list(one.x), list(one.y)) == ("one", [1.0, 2.0, 3.0], [100.0, 11.0, 9.0])
    assert everything.log_y == pytest.approx((0.9 * 9, 90))  # 100 is above ten times 9: cut off
    assert one.low[1] == pytest.approx(11 - 2 * 2**0.5)
    assert one.high[2] == 9.0
    assert (list(two.y), list(none.y), list(other.y)) == ([], [], [50.0])
    assert not other.low
