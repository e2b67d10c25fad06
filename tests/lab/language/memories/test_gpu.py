"""Memories of language models give the same numbers on a CUDA device as on a CPU, also in half precision."""

from typing import Any

import pytest
import torch
from torch.testing import assert_close

from hebbian_softmax.lab.language.learner import make_model
from hebbian_softmax.lab.language.memories.cache import CacheSettings
from hebbian_softmax.lab.language.memories.mbpa import MbpaSettings
from hebbian_softmax.lab.language.memories.memory import Memories, mixture, read_parts
from hebbian_softmax.lab.language.memories.settings import Grids
from hebbian_softmax.lab.language.memories.sweep import memory_rows
from hebbian_softmax.lab.language.model import LanguageModel
from tests.lab.language.toy import WORDS, corpus, settings

pytestmark = pytest.mark.gpu
BOTH = Memories((CacheSettings(200, 0.3), MbpaSettings(200, 32)))


def model(device: str, **changes: Any) -> LanguageModel:
    options = settings(hidden=64, embedding=32, **changes)
    return make_model(options, WORDS, hebbian=True, device=torch.device(device)).eval()


@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-4), ("bf16", 1e-2)])
def test_the_numbers_are_those_of_the_cpu(precision: str, tolerance: float) -> None:
    ids = corpus(tokens=8000).splits["valid"]
    found = read_parts(model("cuda", precision=precision), ids, BOTH)
    expected = read_parts(model("cpu", precision="fp32"), ids, BOTH)
    assert {each.device.type for each in found.values()} == {"cpu"}
    for memory in BOTH.used:
        memories = Memories((memory,))
        assert_close(mixture(found, memories).mean(), mixture(expected, memories).mean(), rtol=tolerance, atol=0)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_sweep_ends_in_what_it_chose(precision: str) -> None:
    words = corpus(tokens=8000)
    grids = Grids(sizes=(50, 200), neighbours=(16, 32), two_step_words=40)
    found = memory_rows(model("cuda", precision=precision), words, grids=grids, quiet=True)
    alone, cached, _ = (row.scores["valid"].perplexity for row in found.rows)
    assert cached == pytest.approx(found.sweep.points["cache"][0].perplexity, rel=1e-3)
    assert cached <= 1.05 * alone
    single = read_parts(model("cuda", precision=precision), words.splits["test"], found.rows[-1].memories)
    assert_close(mixture(single, found.rows[-1].memories), found.losses("test")[-1], rtol=1e-3, atol=1e-3)
