"""What tests of English corpora need: a sentence model for NLTK, mostly a tiny one, which loads at once."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from hebbian_softmax.lab.data import tokenise
from tests import SHARED

REAL = SHARED / "data"


def model_files() -> dict[str, str]:
    """A model that knows a few abbreviations."""
    return {
        "abbrev_types.txt": "mr\ndr\nu.s\n",
        "collocations.tab": "",
        "sent_starters.txt": "he\nthe\n",
        "ortho_context.tab": "he\t46\nthe\t46\nholmes\t4\n",
    }


def write_model(root: Path) -> None:
    """The model as `nltk_data` under a data root."""
    folder = root / "nltk_data" / "tokenizers" / "punkt_tab" / "english"
    folder.mkdir(parents=True)
    for name, content in model_files().items():
        (folder / name).write_text(content)


@pytest.fixture
def english(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A data root with the tiny model and nothing else; NLTK finds it, and no other."""
    root = tmp_path_factory.mktemp("data")
    write_model(root)
    yield from _found(root, monkeypatch)


@pytest.fixture
def real_english(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The data root with the real corpora and NLTK's own model."""
    yield from _found(REAL, monkeypatch)


def _found(root: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    import nltk

    monkeypatch.setattr(nltk.data, "path", [])
    tokenise.tokeniser.cache_clear()
    tokenise.find_punkt(root)
    yield root
    tokenise.tokeniser.cache_clear()
