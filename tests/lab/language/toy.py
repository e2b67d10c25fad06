"""A small corpus with something to learn, and settings to go with it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hebbian_softmax.lab.data.corpus import Corpus, write_corpus
from hebbian_softmax.lab.language.settings import Settings, TrainSettings
from hebbian_softmax.lab.language.zipf import zipf_corpus

WORDS = 40
SIZES: dict[str, Any] = {"hidden": 8, "embedding": 6, "layers": 1, "batch": 4, "sequence": 5}


def settings(kind: type[Settings] = TrainSettings, **changes: Any) -> Any:
    small = {"device": "cpu", "tensorboard": "no", "warmup": 2, "evaluations": 3, "valid_streams": 4}
    return kind(**{**SIZES, **small, **changes})


def corpus(words: int = WORDS, tokens: int = 800) -> Corpus:
    return zipf_corpus(words, tokens)


def prepared(folder: Path, **splits: Tensor) -> Corpus:
    """The same as a folder; splits can be replaced."""
    made = corpus()
    arrays = {name: splits.get(name, ids).numpy() for name, ids in made.splits.items()}
    return write_corpus(folder, "toy", arrays, made.words, made.counts.tolist(), {"words": WORDS}, [])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The corpus as a folder, for the tests of a module that import this."""
    path = tmp_path_factory.mktemp("corpora") / "toy"
    prepared(path)
    return path


def device() -> torch.device:
    return torch.device("cpu")
