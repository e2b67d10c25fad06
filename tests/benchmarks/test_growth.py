"""The benchmark of add_classes runs and writes what it prints."""

import json
from pathlib import Path

import pytest
import torch

from benchmarks import growth


@pytest.mark.slow
def test_it_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--classes", "20", "--features", "4", "--calls", "5", "--threads", str(torch.get_num_threads())]
    growth.main([*small, "--json", str(tmp_path / "found.json")])
    found = json.loads((tmp_path / "found.json").read_text())["milliseconds"]
    assert len(found) == 4
    output = capsys.readouterr().out
    for name, times in found.items():
        assert name in output
        assert times["largest later"] >= times["median"] > 0
        assert max(times["first"], times["largest later"]) >= times["amortised"]
