"""The infinite cache of section 3.2, the rows that stand for it, and the benchmark that compares both."""

import json
import math
from pathlib import Path

import pytest
import torch
from benchmarks.tracking import GeometricCache, Tracking, track
from torch.testing import assert_close

from benchmarks import tracking
from hebbian_softmax import ConstantRate
from hebbian_softmax.lab.cli import main
from tests.heads import early_head
from tests.memory.oracles import stream


def literal(h: torch.Tensor, targets: torch.Tensor, query: torch.Tensor, rate: float, classes: int) -> torch.Tensor:
    """Return the paper's sum over the occurrences of each class, most recent first."""
    found = torch.zeros(classes, dtype=torch.float64)
    for w in range(classes):
        occurrences = [i for i in reversed(range(len(h))) if int(targets[i]) == w]
        for j, i in enumerate(occurrences, start=1):
            found[w] += math.exp(rate * (1 - rate) ** (j - 1) * float(query @ h[i]))
    return found / found.sum()


@pytest.mark.parametrize("rate", [0.1, 0.5, 1.0])
def test_probabilities_are_the_papers_sum(rate: float) -> None:
    h, targets = stream(30, 4, 6)
    query = torch.randn(2, 4, dtype=torch.float64)
    expected = torch.stack([literal(h, targets, q, rate, 8) for q in query])
    assert_close(GeometricCache(rate, h, targets, 8).probabilities(query), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("rate", [0.05, 0.3, 1.0])
def test_hebbian_rows_of_a_frozen_network_are_the_geometric_average(rate: float) -> None:
    h, targets = stream(80, 5, 7)
    options = {"write": "literal", "dtype": torch.float64}
    head = early_head(5, 9, gamma=rate, limit=10**6, rate=ConstantRate(rate), **options)
    torch.nn.init.zeros_(head.weight)
    cache = GeometricCache(rate, h, targets, 9)
    for activation, target in zip(h, targets, strict=True):
        head.memorize(activation[None], target[None])
    assert_close(head.weight.detach(), cache.rows(), rtol=1e-12, atol=1e-12)
    assert torch.equal(head.counts, cache.counts())
    for each in track(head.weight.detach(), cache):
        assert each.cosine == pytest.approx(1, abs=1e-12)
        assert each.error < 1e-12


def test_the_papers_rate_tracks_it_only_roughly() -> None:
    """Annealed, λ starts at 1 and ends at γ: a row holds all of its first activation, and the average λ of it."""
    h, targets = stream(300, 16, 10)
    head = early_head(16, 10, gamma=0.1, limit=500, write="literal", dtype=torch.float64)
    for activation, target in zip(h, targets, strict=True):
        head.memorize(activation[None], target[None])
    found = track(head.weight.detach(), GeometricCache(0.1, h, targets, 10))
    assert [each.count for each in found] == sorted({int(n) for n in head.counts})
    assert sum(each.classes for each in found) == 10
    assert all(0.5 < each.cosine < 1 and 0 < each.error < 1 for each in found)


def test_rows_at_a_constant_rate_are_the_averages(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = "train zipf --preset tiny --vocabulary 60 --tokens 4000 --steps 2 --evaluations 1 --final none --quiet"
    assert main([*command.split(), "--runs", str(tmp_path)]) == 0
    (run,) = tmp_path.glob("zipf-*")
    tracking.main([str(run), "--words", "150", "--next", "40", "--rate", "0.2", "--json", str(tmp_path / "found.json")])
    found = json.loads((tmp_path / "found.json").read_text())
    exact, batches, paper, *_ = (found["results"][name] for name in found["results"])
    assert all(of["cosine"] > 0.999999 and of["error"] < 1e-5 for of in exact["tracking"].values())
    assert batches["tracking"]["2–4"]["error"] > 1e-3  # Means over a batch.
    assert paper["tracking"]["1"]["error"] == pytest.approx(4, rel=1e-4)  # 1 / rate - 1: it is written whole.
    assert sum(of["classes"] for of in exact["tracking"].values()) == found["classes_seen"]
    assert "infinite cache" in capsys.readouterr().out


def test_classes_are_put_together_by_their_number() -> None:
    found = tracking.together([Tracking(2, 3, 1.0, 0.0), Tracking(4, 1, 0.0, 4.0), Tracking(100, 2, 0.5, 1.0)])
    assert found == {
        "2–4": {"classes": 4, "cosine": 0.75, "error": 1.0},
        "100+": {"classes": 2, "cosine": 0.5, "error": 1.0},
    }
