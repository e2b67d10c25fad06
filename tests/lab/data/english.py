"""Sentence models of NLTK for tests of English corpora; most tests use a tiny model, which loads at once."""

import io
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from hebbian_softmax.lab.data import tokenise
from tests import SHARED

REAL = SHARED / "data"
PUNKT = "/nltk/nltk_data/gh-pages/packages/tokenizers/punkt_tab.zip"  # where NLTK's site has its model


def model_files() -> dict[str, str]:
    """Return the files of a model that knows a few abbreviations."""
    return {
        "abbrev_types.txt": "mr\ndr\nu.s\n",
        "collocations.tab": "",
        "sent_starters.txt": "he\nthe\n",
        "ortho_context.tab": "he\t46\nthe\t46\nholmes\t4\n",
    }


def write_model(root: Path) -> None:
    """Write the model to `nltk_data` under a data root."""
    folder = root / "nltk_data" / "tokenizers" / "punkt_tab" / "english"
    folder.mkdir(parents=True)
    for name, content in model_files().items():
        (folder / name).write_text(content)


def zipped(files: Mapping[str, str]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return buffer.getvalue()


def zipped_model() -> bytes:
    """Return the model as NLTK's site has it."""
    return zipped({f"punkt_tab/english/{name}": text for name, text in model_files().items()})


@pytest.fixture
def english(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A data root with nothing but the tiny model, which is the only one that NLTK finds."""
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
