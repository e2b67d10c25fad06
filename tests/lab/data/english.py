"""Files and texts for tests of English corpora, such as a tiny sentence model for NLTK, which loads at once."""

import io
import tarfile
import zipfile
from collections.abc import Mapping
from pathlib import Path

from hebbian_softmax.lab.data.corpus import Corpus
from tests import SHARED

REAL = SHARED / "data"
PUNKT = "/nltk/nltk_data/gh-pages/packages/tokenizers/punkt_tab.zip"  # where NLTK's site has its model
MODEL = {
    "punkt_tab/english/abbrev_types.txt": "mr\ndr\nu.s\n",
    "punkt_tab/english/collocations.tab": "",
    "punkt_tab/english/sent_starters.txt": "he\nthe\n",
    "punkt_tab/english/ortho_context.tab": "he\t46\nthe\t46\nholmes\t4\n",
}


def write(place: Path, files: Mapping[str, str | bytes]) -> Path:
    """Write files to a folder, a .zip or a .tar.xz, depending on the name of the place, and return the place."""
    contents = {name: text.encode() if isinstance(text, str) else text for name, text in files.items()}
    if place.suffix == ".zip":
        place.write_bytes(zipped(contents))
    elif place.suffix == ".xz":
        with tarfile.open(place, "w:xz") as archive:
            for name, content in contents.items():
                member = tarfile.TarInfo(name)
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
    else:
        for name, content in contents.items():
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            (place / name).write_bytes(content)
    return place


def zipped(files: Mapping[str, str | bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return buffer.getvalue()


def write_model(root: Path) -> None:
    """Write the model to `nltk_data` under a data root."""
    write(root / "nltk_data" / "tokenizers", MODEL)


def text_of(corpus: Corpus, split: str) -> str:
    return " ".join(corpus.words[number] for number in corpus.splits[split])
