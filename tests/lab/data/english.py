"""What tests of English corpora need: NLTK's sentence model, the real one where it is at hand, else a tiny one."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from hebbian_softmax.lab.data import tokenise

REAL = Path(__file__).parents[4] / "shared" / "data"


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
    """A data root with a sentence model and nothing else; NLTK finds it, and no other."""
    import nltk

    root = tmp_path_factory.mktemp("data")
    if (REAL / "nltk_data").is_dir():
        (root / "nltk_data").symlink_to(REAL / "nltk_data")
    else:
        write_model(root)
    monkeypatch.setattr(nltk.data, "path", [])
    tokenise.tokeniser.cache_clear()
    tokenise.find_punkt(root)
    yield root
    tokenise.tokeniser.cache_clear()
