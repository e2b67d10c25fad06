"""Files and texts for tests of English corpora, such as a tiny sentence model for NLTK, which loads at once."""

import io
import zipfile
from collections.abc import Mapping
from pathlib import Path

from hebbian_softmax.lab.data.corpus import Corpus
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


def text_of(corpus: Corpus, split: str) -> str:
    return " ".join(corpus.words[number] for number in corpus.splits[split])
