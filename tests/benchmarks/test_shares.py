"""The benchmark of one rank's share runs, and its search and its computed scaling are right."""

import json
from pathlib import Path

import pytest
import torch
from benchmarks.shares import Share

from benchmarks import shares
from hebbian_softmax import linear_cross_entropy


@pytest.mark.slow
def test_a_quick_run_measures_every_share_and_computes_the_scaling(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shares.main(["--quick", "--link", "1e9", "--latency", "0", "--json", str(tmp_path / "shares.json")])
    record = json.loads((tmp_path / "shares.json").read_text())
    assert [share["ranks"] for share in record["measured"]] == list(shares.RANKS)
    assert all(share["ms"] is not None for share in record["measured"]), record["measured"]
    assert [row["computed_exchange_ms"] for row in record["computed"]] == pytest.approx(
        [2 * (r - 1) / r * 32 * (12 + 4 * 16) / 1e6 for r in shares.RANKS]
    )
    assert "computed: the exchange" in capsys.readouterr().out


def test_no_target_becomes_as_unlikely_as_none_is_in_training() -> None:
    """Beyond e⁻⁶⁰ the kernels compute a row again, which would be timed instead."""
    torch.manual_seed(0)
    training = shares.Training(2_000, 512, 64, "cpu")
    for _ in range(2 * shares.BATCHES):
        assert 1 < training.step() < 20  # Not learnt by heart either.
        h, targets = next(training.batches)
        losses = linear_cross_entropy(h.detach().float(), training.head.weight.detach(), targets, reduction="none")
        assert losses.max() < 30


def test_scaling_adds_the_exchange_to_the_measured_time() -> None:
    (one, two) = shares.scaling([Share(1, 10, ms=8.0), Share(2, 5, ms=4.0)], 1_000_000, {"link": 1e9}, 0.0)
    assert one["computed_speedup"] == 1.0
    assert two["computed_step_ms"] == 5.0
    assert two["computed_speedup"] == pytest.approx(1.6)
    assert two["computed_efficiency"] == pytest.approx(0.8)


@pytest.mark.parametrize("guess", [900, 1000, 1190])
def test_the_search_ends_between_what_fits_and_what_does_not(guess: int) -> None:
    good, bad = shares.largest(guess, lambda classes: classes <= 1000, grain=10)
    assert good <= 1000 < (bad or 0)
    assert (bad or 0) - good <= 20
