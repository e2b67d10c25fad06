"""The picture of words shows what each part gave, and can always be drawn."""

import io
import math

import pytest
import torch
from matplotlib.image import imread

from hebbian_softmax.lab.base.errors import LabError
from hebbian_softmax.lab.language.memories.cache import CacheSettings
from hebbian_softmax.lab.language.memories.mbpa import MbpaSettings
from hebbian_softmax.lab.language.memories.memory import ALONE, Memories, mixture
from hebbian_softmax.lab.language.memories.outcome import MOST, Word, choose_stretch, draw, view

CACHE = CacheSettings(5, 0.3, 0.2)
MBPA = MbpaSettings(5, 3, share=0.1)
BOTH = Memories((CACHE, MBPA))
INF, NAN = -math.inf, math.nan


def log(*values: float) -> torch.Tensor:
    return torch.tensor(values).log()


PARTS = {
    "model": log(0.5, 0.25, 0.125, 0.1),
    "cache": torch.tensor([NAN, INF, math.log(0.5), math.log(0.9)]),
    "mbpa": log(0.5, 0.5, 0.5, 0.1),
}
WORDS = ["the", "<unk>", "$x_1$ |", "日本"]


def test_what_each_part_gave() -> None:
    words = view(PARTS, BOTH, torch.tensor([0, 1, 2, 3]), WORDS, (0, 4))
    assert [word.word for word in words] == WORDS
    expected = [(0.45, 0.0, 0.05), (0.175, 0.0, 0.05), (0.0875, 0.1, 0.05), (0.07, 0.18, 0.01)]
    for word, (model, cache, mbpa), loss in zip(words, expected, mixture(PARTS, BOTH).tolist(), strict=True):
        assert word.parts == pytest.approx({"model": model, "cache": cache, "mbpa": mbpa})
        assert word.mixture == pytest.approx(math.exp(-loss))
    only = view(PARTS, ALONE, torch.tensor([0, 1, 2, 3]), WORDS, (1, 3))
    assert [word.position for word in only] == [1, 2]
    for word, model in zip(only, (0.25, 0.125), strict=True):
        assert word.parts == pytest.approx({"model": model, "cache": 0.0, "mbpa": 0.0})


def test_the_stretch_where_the_cache_helped_most() -> None:
    torch.manual_seed(3)
    parts = {name: torch.rand(50).log() for name in ("model", "cache", "mbpa")}
    for length in (1, 7, 50, 80):
        first, last = choose_stretch(parts, BOTH, length)
        size = min(length, 50)
        gain = (0.8 * parts["model"].exp() + 0.2 * parts["cache"].exp()).log() - parts["model"]
        gains = [float(gain[start : start + size].double().sum()) for start in range(51 - size)]
        assert (first, last) == (gains.index(max(gains)), gains.index(max(gains)) + size)
    mbpa = Memories((MBPA,))
    gain = (0.9 * parts["model"].exp() + 0.1 * parts["mbpa"].exp()).log() - parts["model"]
    assert choose_stretch(parts, mbpa, 1)[0] == int(gain.argmax())


@pytest.mark.parametrize("stretch", [(0, 5), (-1, 2), (3, 3), (0, MOST + 1)])
def test_a_stretch_that_cannot_be_shown(stretch: tuple[int, int]) -> None:
    with pytest.raises(LabError, match=r"--words .*(inside the text|at most)"):
        view({"model": torch.zeros(4)}, BOTH, torch.zeros(4 if stretch[1] < 9 else 999).int(), WORDS, stretch)


def orange(words: list[Word]) -> int:
    """Draw the words and count the pixels of the cache's colour."""
    image = imread(io.BytesIO(draw(words, BOTH)), format="png")
    assert image.shape[1] > 500
    return int((abs(image[:, :, :3] * 255 - [0xD5, 0x5E, 0x00]) < 1).all(2).sum())


@pytest.mark.parametrize("count", [1, 25])
def test_any_words_can_be_drawn(count: int) -> None:
    """Words in scripts that the font lacks, and with signs of formulas, cause no warning."""
    without, half = (
        orange([Word(at, WORDS[at % 4], 0.1, {"model": 0.1, "cache": cache, "mbpa": 0.0}) for at in range(count)])
        for cache in (0.0, 0.1)
    )
    assert half > without + 500 * count
