"""Gutenberg: which part of a book is used, which books go where, and the paper's counts on its own test books."""

import re
from pathlib import Path

import pytest

from hebbian_softmax.lab.base.errors import LabError
from hebbian_softmax.lab.data.corpus import Corpus
from hebbian_softmax.lab.data.gutenberg import BOOKS, Options, extract, extract_as_in_paper, plan
from hebbian_softmax.lab.data.prepare import prepare
from hebbian_softmax.lab.data.texts import read_texts
from hebbian_softmax.lab.data.tokenise import Tokeniser, find_punkt
from tests.lab.data.english import REAL, text_of, write, zipped

THIS = b"junk *** START OF THIS PROJECT GUTENBERG EBOOK TITLE *** body *** END OF THIS PROJECT GUTENBERG EBOOK more"
SMALL = {"train": [5, 4], "valid": [30, 3], "test": [40]}
NOVELS = {"b/2.txt": "He ran. " * 5 + "He fell.", "a/1.txt": "The cat sat. " * 3, "10.txt": "The dog ran. " * 3}


def script(text: bytes) -> str:
    """Do what the script in the paper's appendix does."""
    start_text = b"START OF THIS PROJECT GUTENBERG EBOOK"
    start = text.find(start_text) + len(start_text)
    end = text.find(b"END OF THIS PROJECT GUTENBERG EBOOK")
    return text[start:end].decode("utf-8", "ignore")


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (THIS, " TITLE *** body *** "),
        (THIS.replace(b"THIS", b"THE"), " TITLE *** body *** "),
        (THIS.replace(b"START OF THIS", b"START OF THE"), " TITLE *** body *** "),
        (b"no markers at all", "no markers at all"),
        (b"\xef\xbb\xbfwith a mark of its bytes", "with a mark of its bytes"),
        (b"START OF THE PROJECT GUTENBERG EBOOK never ends", " never ends"),
        (b"headers gone already END OF THE PROJECT GUTENBERG EBOOK", "headers gone already "),
        (b"caf\xc3\xa9", "café"),
        (b"caf\xe9", "café"),
        (b"", ""),
    ],
)
def test_between_the_markers(content: bytes, expected: str) -> None:
    assert extract(content, "1.txt") == expected


@pytest.mark.parametrize("content", [THIS, THIS.replace(b"THIS", b"THE"), b"x" * 50, b"caf\xe9" * 20, b"ab", b""])
def test_as_in_the_paper(content: bytes) -> None:
    assert extract_as_in_paper(content) == script(content)


def test_the_papers_books() -> None:
    assert {split: len(books) for split, books in BOOKS.items()} == {"train": 2017, "valid": 12, "test": 13}
    every = [book for books in BOOKS.values() for book in books]
    assert len(set(every)) == 2042
    # All but 2609 are in the mirror's folder /1; the paper's list has 2609, too.
    assert [book for book in every if not str(book).startswith("1")] == [2609]
    assert (BOOKS["test"][0], BOOKS["valid"][0], BOOKS["train"][:3]) == (11959, 11399, [10000, 10064, 1019])


@pytest.fixture
def root(english: Path) -> Path:
    """A data root with two books for validation and one for testing."""
    rest = zipped({"somewhere/40.txt": "The unheard ran.", "somewhere/140.txt": "Not this."})
    valid = {"valid/30.txt": THIS.replace(b"body", b"He ran."), "3.txt": b"The caf\xe9 ran."}
    write(english / "gutenberg", {**valid, "rest.zip": rest})
    return english


def novels(place: Path) -> Path:
    """Write the training books to a folder or an archive, depending on the name."""
    return write(place, {**NOVELS, "README": "no book"})


def prepared(root: Path, **options: object) -> Corpus:
    options = {"mirror": "ftp://nowhere/{id}"} | options  # an address that is refused at once
    return prepare(plan(Options(**options), SMALL), data_root=str(root), processes=1, quiet=True)[0]  # type: ignore[arg-type]


@pytest.mark.parametrize("form", ["folder", "novels.zip", "novels.tar.xz"])
def test_books_of_ones_own_train(root: Path, tmp_path: Path, form: str) -> None:
    corpus = prepared(root, books=str(novels(tmp_path / form)))
    order = sorted(NOVELS) if form == "folder" else NOVELS
    tokens = [token for name in order for token in Tokeniser().tokens(NOVELS[name])]
    kept = {token for token in tokens if tokens.count(token) >= 5}
    assert text_of(corpus, "train") == " ".join(token if token in kept else "<unk>" for token in tokens)
    assert "<unk>" in text_of(corpus, "train")
    assert text_of(corpus, "valid").endswith("the <unk> ran . <eos>")
    assert text_of(corpus, "test") == "the <unk> ran . <eos>"
    assert corpus.name.startswith("gutenberg-")
    assert corpus.manifest["notes"]["books"] == {"train": 3, "valid": 2, "test": 1}
    assert len(corpus.arrays["train_starts"]) == 3
    assert "first_days" not in corpus.arrays


@pytest.mark.parametrize("form", ["30.txt", "more.zip"])
def test_a_book_that_is_no_text_is_named(root: Path, form: str) -> None:
    folder = root / "gutenberg"
    (folder / "valid" / "30.txt").unlink()
    write(folder / "more.zip" if form == "more.zip" else folder, {"30.txt": b"He \0ran."})
    for number in (4, 5):
        (folder / f"{number}.txt").write_text("The cat sat.")
    named = str(folder / "30.txt") if form == "30.txt" else f"30.txt in an archive of {folder}"
    with pytest.raises(LabError, match=f"^{re.escape(named)} is not a text, it has zero bytes: take it out"):
        prepared(root)


def test_other_books_are_another_corpus(root: Path, tmp_path: Path) -> None:
    place = novels(tmp_path / "folder")
    first = prepared(root, books=str(place))
    assert prepared(root, books=str(place)).path == first.path
    (place / "10.txt").write_text("Other words. " * 3)
    assert prepared(root, books=str(place)).path != first.path


def test_the_papers_books_train_where_they_are_at_hand(root: Path) -> None:
    for number in (4, 5):
        (root / "gutenberg" / f"{number}.txt").write_text(f"Book {number}. " * 5)
    corpus = prepared(root)
    assert corpus.name == "gutenberg"
    assert text_of(corpus, "train").startswith("book 5 . <eos>")  # in the paper's order
    sources = {source["name"] for source in corpus.manifest["sources"]}
    assert sources == {"valid/30.txt", "3.txt", "4.txt", "5.txt", "rest.zip"}


def test_another_archive_or_book_makes_it_again(root: Path, tmp_path: Path) -> None:
    place = str(novels(tmp_path / "folder"))
    assert text_of(prepared(root, books=place), "test") == "the <unk> ran . <eos>"
    (root / "gutenberg" / "40.txt").write_text("He fell.")
    assert text_of(prepared(root, books=place), "test") == "he fell . <eos>".replace("fell", "<unk>")
    (root / "gutenberg" / "40.txt").unlink()
    write(root / "gutenberg" / "rest.zip", {"40.txt": "He ran."})
    assert text_of(prepared(root, books=place), "test") == "he ran . <eos>"


def test_bad_books(root: Path, tmp_path: Path) -> None:
    write(tmp_path, {"folder/c.txt": b"\x89PNG\0\0", "novels.doc": "x", "empty/README": "no book"})
    for place, message in {
        "folder": r"folder/c\.txt is not a text",
        "nowhere": "nowhere is not there",
        "novels.doc": r"novels\.doc is neither a folder nor an archive",
        "empty": "empty has no words to train on",
    }.items():
        with pytest.raises(LabError, match=message):
            prepared(root, books=str(tmp_path / place))


@pytest.mark.parametrize("form", ["cut.zip", "cut.tar.xz"])
def test_a_cut_archive_is_named(root: Path, tmp_path: Path, form: str) -> None:
    place = novels(tmp_path / form)
    place.write_bytes(place.read_bytes()[:-60])
    with pytest.raises(LabError, match=rf"{form} cannot be read"):
        prepared(root, books=str(place))


@pytest.mark.slow
@pytest.mark.skipif(not (REAL / "gutenberg").is_dir(), reason="no ../shared/data/gutenberg")
@pytest.mark.skipif(not (REAL / "nltk_data").is_dir(), reason="no ../shared/data/nltk_data")
def test_the_papers_test_books(no_model: None) -> None:
    """The count of tokens in ../shared/data/README.md; the paper has 526,646, with the NLTK of its day."""
    find_punkt(REAL)
    tokeniser = Tokeniser()
    found = {name: file.read() for name, file in read_texts(REAL / "gutenberg" / "paper-valid-test.tar.xz")}
    assert {int(Path(name).stem) for name in found if name.startswith("test/")} == set(BOOKS["test"])
    assert {int(Path(name).stem) for name in found if name.startswith("valid/")} == set(BOOKS["valid"])
    tokens = {book: len(tokeniser.tokens(extract_as_in_paper(found[f"test/{book}.txt"]))) for book in BOOKS["test"]}
    assert sum(tokens.values()) == 526_907
