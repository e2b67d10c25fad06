"""The examples of docs/contributing.md work."""

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from hebbian_softmax import HebbianSoftmax
from hebbian_softmax.lab.data.corpus import SPLITS
from hebbian_softmax.lab.data.prepare import prepare
from hebbian_softmax.lab.language.memories.memory import Memories, Memory
from hebbian_softmax.lab.language.model import NetworkOptions
from tests import ROOT
from tests.closeness import assert_as_close, assert_exact


def example(title: str) -> dict[str, Any]:
    """Run the module in the section of this title, and return its names."""
    page = (ROOT / "docs" / "contributing.md").read_text(encoding="utf-8")
    section = page.partition(f"### {title}\n")[2].partition("\n### ")[0]
    (code,) = re.findall(r"```python\n(.*?)```", section, flags=re.DOTALL)
    names: dict[str, Any] = {"__name__": "example"}
    exec(compile(code, title, "exec"), names)
    return names


def test_a_new_corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEBBIAN_CACHE", str(tmp_path))
    (tmp_path / "poems").mkdir()
    for split in SPLITS:
        (tmp_path / "poems" / f"{split}.txt").write_text("a rose is a rose\n")
    plan = example("A new corpus")["POEMS"].usual()
    corpus, _ = prepare(plan, data_root=str(tmp_path), processes=1, quiet=True)
    assert corpus.name == "poems"
    assert corpus.words == ["<unk>", "a", "rose"]  # `is` and `<eos>` occur once each


def test_another_network() -> None:
    names = example("Another network for the language models")
    head = HebbianSoftmax(8, 50, gamma=0.1, limit=5)
    model = names["WordGRU"](head, NetworkOptions(hidden=16, layers=2), memorizes=False)
    words = torch.randint(50, (90, 2))
    model(words[:20], words[1:21]).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    model.eval()
    with torch.no_grad():
        whole, _ = model.features(words)
        state, found = None, []
        for piece in words.split(40):
            features, state = model.features(piece, state)
            found.append(features)
        model.double().precision = torch.float64
        exact, _ = model.features(words)
    assert_as_close(torch.cat(found), whole, exact, "features of a text read in pieces")


def test_another_memory() -> None:
    names = example("Another memory of evaluation time")
    kind, grids = names["UnigramSettings"], names["UnigramGrid"](unigram_sizes=(3, 2))
    assert issubclass(kind, Memory)
    text = torch.tensor([7, 7, 5, 7, 5])
    expected = torch.tensor([[math.nan, 1, 0, 2 / 3, 1 / 3], [math.nan, 1, 0, 1 / 2, 1 / 2]]).log()
    read = kind.grid_reader(grids, Memories(), (torch.zeros(1), None), None)
    found = torch.cat([read(piece, piece) for piece in text.split(2)], dim=1)
    assert_exact(found, expected.double(), "log p of the words")
