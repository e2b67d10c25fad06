"""The folders and the sentence models that a test finds."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from hebbian_softmax.lab.data import tokenise
from tests.lab.data.english import write_model


@pytest.fixture(autouse=True)
def _folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test has a cache and a data root of its own."""
    monkeypatch.setenv("HEBBIAN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HEBBIAN_DATA", str(tmp_path / "data"))


@pytest.fixture
def no_model(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """NLTK has no folder of data, and this process has no tokeniser."""
    import nltk

    monkeypatch.setattr(nltk.data, "path", [])
    tokenise.tokeniser.cache_clear()
    yield
    tokenise.tokeniser.cache_clear()


@pytest.fixture
def english(tmp_path: Path, no_model: None) -> Path:
    """The data root with nothing but the tiny model, which is the only one that NLTK finds."""
    write_model(tmp_path / "data")
    tokenise.find_punkt(tmp_path / "data")
    return tmp_path / "data"
