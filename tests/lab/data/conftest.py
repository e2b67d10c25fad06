"""The sentence models that NLTK finds in a test."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from hebbian_softmax.lab.data import tokenise
from tests.lab.data.english import REAL, write_model


@pytest.fixture
def no_model(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """NLTK has no folder of data, and this process has no tokeniser."""
    import nltk

    monkeypatch.setattr(nltk.data, "path", [])
    tokenise.tokeniser.cache_clear()
    yield
    tokenise.tokeniser.cache_clear()


@pytest.fixture
def english(tmp_path_factory: pytest.TempPathFactory, no_model: None) -> Path:
    """A data root with nothing but the tiny model, which is the only one that NLTK finds."""
    root = tmp_path_factory.mktemp("data")
    write_model(root)
    tokenise.find_punkt(root)
    return root


@pytest.fixture
def real_english(no_model: None) -> Path:
    """The data root with the real corpora and NLTK's own model."""
    tokenise.find_punkt(REAL)
    return REAL
