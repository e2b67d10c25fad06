"""The benchmark of the memories runs, and finds our results equal to those of the loops."""

import json
from pathlib import Path

import pytest
import torch

from benchmarks import memory

SMALL = "--features 8 --classes 50 --window 30 --tokens 60 --loop-tokens 4 --layer-tokens 20 --mbpa-classes 50"
QUERIES = "--neighbours 5 --queries 20 --loop-queries 2 --two-step-queries 4 --rounds 1"


def test_it_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    threads = torch.get_num_threads()
    try:
        memory.main([*SMALL.split(), *QUERIES.split(), "--json", str(tmp_path / "found.json")])
    finally:
        torch.set_num_threads(threads)
    found = json.loads((tmp_path / "found.json").read_text())
    assert len(found["results"]) == 3
    for result in found["results"].values():
        assert result["ratio"] > 0
    loop, ours = found["results"]["cache, n = 30, V = 50"]["perplexity_torch.float64"]
    assert loop == pytest.approx(ours, rel=1e-9)
    assert "ratio" in capsys.readouterr().out
