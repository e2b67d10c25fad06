"""The benchmark of section 3.2 runs on a trained model, and finds what must be so."""

import json
from pathlib import Path

import pytest

from benchmarks import tracking
from hebbian_softmax.lab.cli import main
from hebbian_softmax.memory import Tracking


def test_rows_at_a_constant_rate_are_the_averages(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = "train zipf --preset tiny --vocabulary 60 --tokens 4000 --steps 2 --evaluations 1 --final none --quiet"
    assert main([*command.split(), "--runs", str(tmp_path)]) == 0
    (run,) = tmp_path.glob("zipf-*")
    tracking.main([str(run), "--words", "150", "--next", "40", "--rate", "0.2", "--json", str(tmp_path / "found.json")])
    found = json.loads((tmp_path / "found.json").read_text())
    exact, batches, paper, *_ = (found["results"][name] for name in found["results"])
    assert all(of["cosine"] > 0.999999 and of["error"] < 1e-5 for of in exact["tracking"].values())
    assert batches["tracking"]["2–4"]["error"] > 1e-3  # means over a batch
    assert paper["tracking"]["1"]["error"] == pytest.approx(1 / 0.2 - 1, rel=1e-4)  # the first is written whole
    assert sum(of["classes"] for of in exact["tracking"].values()) == found["classes_seen"]
    assert "infinite cache" in capsys.readouterr().out


def test_classes_are_put_together_by_their_number() -> None:
    found = tracking.together([Tracking(2, 3, 1.0, 0.0), Tracking(4, 1, 0.0, 4.0), Tracking(100, 2, 0.5, 1.0)])
    assert found == {
        "2–4": {"classes": 4, "cosine": 0.75, "error": 1.0},
        "100+": {"classes": 2, "cosine": 0.5, "error": 1.0},
    }
