"""A small corpus with something to learn, settings to go with it, and models in float64 to compare with."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hebbian_softmax.lab.data.corpus import Corpus, write_corpus
from hebbian_softmax.lab.language.learner import make_model
from hebbian_softmax.lab.language.model import LanguageModel
from hebbian_softmax.lab.language.settings import Settings, TrainSettings
from hebbian_softmax.lab.language.zipf import zipf_corpus

WORDS = 40
SIZES: dict[str, Any] = {"hidden": 8, "embedding": 6, "layers": 1, "batch": 4, "sequence": 5}


def settings(kind: type[Settings] = TrainSettings, **changes: Any) -> Any:
    small: dict[str, Any] = {"device": "cpu", "tensorboard": "no", "warmup": 2, "evaluations": 3, "valid_streams": 4}
    small["start"] = 0  # these trainings end before features have settled
    return kind(**{**SIZES, **small, **changes})


def corpus(words: int = WORDS, tokens: int = 800) -> Corpus:
    return zipf_corpus(words, tokens)


def prepared(folder: Path, **splits: Tensor) -> Corpus:
    """Write the corpus to a folder; splits can be replaced."""
    made = corpus()
    arrays = {name: splits.get(name, ids).numpy() for name, ids in made.splits.items()}
    return write_corpus(folder, "toy", arrays, made.words, made.counts.tolist(), {"words": WORDS}, [])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the corpus, for test modules that import this fixture."""
    path = tmp_path_factory.mktemp("corpora") / "toy"
    prepared(path)
    return path


def device() -> torch.device:
    return torch.device("cpu")


def model(hebbian: bool = True, **changes: Any) -> LanguageModel:
    return make_model(settings(**changes), WORDS, hebbian=hebbian, device=device())


def widen(model: LanguageModel) -> LanguageModel:
    """Change a model to float64, in which rounding is too small to be mistaken for a difference."""
    model.double().precision = torch.float64
    return model


def exactly(model: LanguageModel) -> LanguageModel:
    """Return a copy of a model in float64."""
    return widen(copy.deepcopy(model))
