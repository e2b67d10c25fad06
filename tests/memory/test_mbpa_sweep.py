"""Several K and α at once give the same as each of them alone."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.testing import assert_close

from hebbian_softmax import MbPA
from tests.memory.oracles import mbpa_log_prob, stream
from tests.memory.test_workspace import WORKSPACE
from tests.operations import Watch

EXACT = {"rtol": 1e-9, "atol": 1e-9}


@settings(max_examples=15)
@given(st.data())
def test_a_sweep_is_each_of_its_evaluations(data: st.DataObject) -> None:
    length, bias = data.draw(st.integers(2, 16)), data.draw(st.booleans())
    h, targets = stream(length, 3, 7, seed=data.draw(st.integers(0, 99)))
    torch.manual_seed(1)
    head = nn.Linear(3, 7, bias=bias, dtype=torch.float64)
    counts, rates = [5, 2, 9, 2], [0.7, 0.1]  # In any order, and one of them twice.
    mbpa, cut, parts = MbPA(9, 3), data.draw(st.integers(0, length)), []
    for part, labels in ((h[:cut], targets[:cut]), (h[cut:], targets[cut:])):
        options: dict[str, Any] = {"block": data.draw(st.integers(1, 20)), "neighbours": counts}
        options |= {"workspace": data.draw(st.sampled_from([1, 1_000, 20_000, 2**20])), "learning_rates": rates}
        parts.append(mbpa.sequence_log_prob(part, labels, head.weight, head.bias, **options))
    found = torch.cat(parts, -1)
    assert found.shape == (4, 2, length)
    for i, k in enumerate(counts):
        for j, rate in enumerate(rates):
            expected = mbpa_log_prob(
                h, targets, head, 9, neighbours=k, steps=1, learning_rate=rate, l2=0.5, epsilon=1e-3
            )
            assert_close(found[i, j], expected, **EXACT)


def test_one_of_the_two_alone_keeps_the_other() -> None:
    h, targets = stream(12, 3, 7, batch=2)
    head = nn.Linear(3, 7, dtype=torch.float64)

    def found(count: int, rate: float, **sweep: Any) -> torch.Tensor:
        return MbPA(8, count, 1, rate).sequence_log_prob(h, targets, head.weight, head.bias, **sweep)

    several = found(4, 0.6, learning_rates=[0.3, 0.1])
    assert_close(several, torch.stack([found(4, 0.3), found(4, 0.1)]), **EXACT)
    several = found(4, 0.6, neighbours=[2, 8])
    assert_close(several, torch.stack([found(2, 0.6), found(8, 0.6)]), **EXACT)


@pytest.mark.parametrize(
    ("steps", "sweep", "message"),
    [
        (2, {"neighbours": [3]}, "need steps=1"),
        (2, {"learning_rates": [0.1]}, "need steps=1"),
        (1, {"neighbours": [3, 9]}, "at most the memory's size, 8, got 9"),
        (1, {"neighbours": []}, "at least one value"),
        (1, {"neighbours": [0]}, "neighbours must be"),
        (1, {"learning_rates": [0.1, 0.0]}, "learning_rates must be positive"),
    ],
)
def test_bad_grids_are_refused_and_nothing_is_stored(steps: int, sweep: dict[str, Any], message: str) -> None:
    h, targets = stream(4, 3, 7)
    head, mbpa = nn.Linear(3, 7, dtype=torch.float64), MbPA(8, 3, steps)
    with pytest.raises(ValueError, match=message):
        mbpa.sequence_log_prob(h, targets, head.weight, head.bias, **sweep)
    assert len(mbpa) == 0


def test_a_sweep_stays_in_its_workspace() -> None:
    h, targets, weight = torch.randn(40, 16), torch.randint(50, (40,)), torch.randn(20_000, 16)
    mbpa = MbPA(100, 8)
    mbpa.observe(h, targets)
    vectors = 4 * 100 * (16 * 4 + 8) + 8 * 10 * (40 + 20_000) + 8 * 4 * 16 * 40 + 6 * 8 * 40
    with Watch() as watch:
        mbpa.sequence_log_prob(
            h, targets, weight, neighbours=[4, 8], learning_rates=[0.1, 0.3, 1.0], workspace=WORKSPACE
        )
    assert watch.most < WORKSPACE + vectors
