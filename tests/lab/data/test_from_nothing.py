"""From an empty data root to a prepared corpus, as a user types it, with every file coming from a web server."""

import io
import os
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from hebbian_softmax.lab.cli import main
from hebbian_softmax.lab.data import gutenberg, gutenberg_books, tokenise, wikitext
from hebbian_softmax.lab.data.corpus import Corpus, open_corpus
from hebbian_softmax.lab.data.wikitext import Official
from tests.lab.base.test_files import names
from tests.lab.data.english import model_files
from tests.lab.data.serving import FileServer, internet

BOOKS = {"train": [11, 10, 12], "valid": [30], "test": [40]}
EVERY = [11, 10, 12, 30, 40]  # in the order in which they are asked for
PUNKT = "/nltk/nltk_data/gh-pages/packages/tokenizers/punkt_tab.zip"
MODEL = {f"punkt_tab/english/{name}": text for name, text in model_files().items()}


def zipped(files: dict[str, str]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return buffer.getvalue()


def book(number: int, sentences: int = 30) -> bytes:
    body = f"Mr. Holmes read book {number}. He ran. " * sentences
    return f"START OF THE PROJECT GUTENBERG EBOOK X\r\n{body}\r\nEND OF THE PROJECT GUTENBERG EBOOK".encode()


def address(number: int) -> str:
    return f"/cache/epub/{number}/pg{number}.txt"


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FileServer]:
    """A world in which nothing is on this machine and everything on the server."""
    import nltk

    monkeypatch.setenv("HEBBIAN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HEBBIAN_DATA", str(tmp_path / "data"))
    monkeypatch.setattr(nltk.data, "path", [])
    tokenise.tokeniser.cache_clear()
    files = {PUNKT: zipped(MODEL), **{address(number): book(number) for number in EVERY}}
    with internet(files, monkeypatch) as server:
        monkeypatch.setattr(gutenberg_books, "PAUSE", 0.0)
        monkeypatch.setattr(gutenberg, "BOOKS", BOOKS)
        yield server
    tokenise.tokeniser.cache_clear()


def prepare(*arguments: str) -> int:
    return main(["data", "prepare", *arguments, "--processes", "1"])


def result(tmp_path: Path, name: str) -> Corpus:
    return open_corpus(tmp_path / "cache" / "corpora" / name, verify=True)


def text_of(corpus: Corpus, split: str) -> str:
    return " ".join(corpus.words[number] for number in corpus.splits[split])


@pytest.mark.parametrize("name", ["wikitext-2", "wikitext-103"])
def test_wikitext(server: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setitem(wikitext.OFFICIAL, name, Official(name, (4, 3, 3), 4))
    texts = {"train": " the cat <unk> \n", "valid": " the cat \n", "test": " the <unk> \n"}
    archive = zipped({f"{name}/wiki.{split}.tokens": text for split, text in texts.items()})
    server.files[f"/{name}-v1.zip"] = archive
    assert prepare(name) == 0
    assert text_of(result(tmp_path, name), "train") == "the cat <unk> <eos>"
    assert (tmp_path / "data" / name / f"{name}-v1.zip").read_bytes() == archive
    assert prepare(name) == 0
    assert server.asked == [f"/{name}-v1.zip"]


def test_gutenberg(server: FileServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    del server.files[address(12)]
    server.statuses[address(30)] = 503  # which is tried again
    assert prepare("gutenberg") == 0
    shown = capsys.readouterr()
    assert "gutenberg: 5/5 books, not there 1" in shown.err
    missing = "books that are not there: 12 (train)"
    assert f"gutenberg: {missing}, at {gutenberg_books.MIRROR}" in shown.err
    assert f"  {missing}\n" in shown.out
    corpus = result(tmp_path, "gutenberg")
    read = "mr. holmes read book {} . <eos> he ran . <eos>"
    assert text_of(corpus, "train").startswith("<unk> " + read.format(11))  # the title once
    assert read.format(10) in text_of(corpus, "train")
    assert "<unk> . <eos> he ran" in text_of(corpus, "test")  # 40 is no word of training
    assert corpus.manifest["notes"]["books not there"] == {"train": [12]}
    assert corpus.manifest["notes"]["books"] == {"train": 2, "valid": 1, "test": 1}
    assert {source["name"] for source in corpus.manifest["sources"]} == {"10.txt", "11.txt", "30.txt", "40.txt"}
    assert server.most_at_once == 1
    assert server.asked == [PUNKT, *map(address, (11, 10, 12, 30, 30, 40))]

    server.asked.clear()
    assert prepare("gutenberg") == 0
    assert server.asked == []
    assert f"  {missing}\n" in capsys.readouterr().out


def test_a_pause_between_books(server: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(gutenberg_books, "PAUSE", 7.0)
    monkeypatch.setattr(gutenberg_books.time, "sleep", pauses.append)
    assert prepare("gutenberg", "--quiet") == 0
    assert pauses == [7.0] * (len(EVERY) - 1)


def test_a_mirror_of_ones_own(server: FileServer, tmp_path: Path) -> None:
    for number in EVERY:
        server.files[f"/{number}/{number}.txt"] = server.files.pop(address(number))
    assert prepare("gutenberg", "--mirror", server.url + "/{id}/{id}.txt", "--quiet") == 0
    assert result(tmp_path, "gutenberg").manifest["notes"]["books"] == {"train": 3, "valid": 1, "test": 1}


@pytest.mark.parametrize("mirror", ["https://example.org/10.txt", "ftp://example.org/{id}.txt"])
def test_a_mirror_that_is_none(mirror: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        prepare("gutenberg", "--mirror", mirror)
    assert "--mirror: must be an http or https address with {id} in it" in capsys.readouterr().err


def test_a_refused_download_goes_on_where_it_stopped(
    server: FileServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.statuses[address(12)] = 403
    assert prepare("gutenberg") == 1
    error = capsys.readouterr().err
    assert "3 of 5 books are still to come: cannot download https://gutenberg.pglaf.org" in error
    assert f"{address(12)} (HTTP 403" in error
    assert names(tmp_path / "data" / "gutenberg") == {"10.txt", "11.txt"}
    assert names(tmp_path / "cache" / "corpora") == {".gutenberg.lock"}
    server.asked.clear()
    assert prepare("gutenberg") == 0
    assert server.asked == [address(number) for number in (12, 30, 40)]
    assert "gutenberg: 5/5 books" in capsys.readouterr().err


def test_a_killed_download_goes_on_in_the_middle_of_a_book(server: FileServer, tmp_path: Path) -> None:
    """The process is killed while a book is on its way, and what is left on the disk is used."""
    script = (
        "import sys\n"
        "from pathlib import Path\n"
        "from hebbian_softmax.lab.data import gutenberg_books as books\n"
        "books.PAUSE = 0\n"
        "folder = Path(sys.argv[1])\n"
        "books.collect(folder, {'train': [11, 10, 12], 'valid': [30], 'test': [40]}, folder, sys.argv[2], True)\n"
    )
    server.hanging.add(address(12))
    server.files[address(12)] = book(12, sentences=3000)  # more than stays in a file's buffer
    folder = tmp_path / "data" / "gutenberg"
    mirror = server.url + "/cache/epub/{id}/pg{id}.txt"
    command = [sys.executable, "-c", script, str(folder), mirror]
    with subprocess.Popen(command, env=os.environ) as process:
        assert server.hung.wait(60)
        part, deadline = folder / "12.txt.part", time.monotonic() + 30
        while not (part.exists() and part.stat().st_size) and time.monotonic() < deadline:
            time.sleep(0.01)
        process.kill()
    have = part.stat().st_size
    assert 0 < have <= len(server.files[address(12)]) // 2
    assert names(folder) == {"11.txt", "10.txt", "12.txt.part", "12.txt.part.json"}
    server.hanging.clear()
    server.asked.clear()
    server.ranges.clear()
    assert prepare("gutenberg", "--quiet", "--mirror", mirror) == 0
    assert server.asked == [PUNKT, address(12), address(30), address(40)]
    assert server.ranges == [None, f"bytes={have}-", None, None]
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {
        f"{number}.txt": server.files[address(number)] for number in EVERY
    }


def test_an_address_without_any_book(
    server: FileServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gutenberg_books, "SUSPECT", 3)
    assert prepare("gutenberg", "--mirror", server.url + "/wrong/{id}") == 1
    assert "/wrong/12 is not there, nor are 2 other books: " in capsys.readouterr().err
    assert server.asked == [PUNKT, "/wrong/11", "/wrong/10", "/wrong/12"]


def test_books_that_are_gone_do_not_make_an_address_wrong(
    server: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gutenberg_books, "SUSPECT", 2)
    (tmp_path / "data" / "gutenberg").mkdir(parents=True)
    for number in (11, 30, 40):  # as an earlier download left it
        (tmp_path / "data" / "gutenberg" / f"{number}.txt").write_bytes(book(number))
    for number in (10, 12):
        del server.files[address(number)]
    assert prepare("gutenberg", "--quiet") == 0
    assert result(tmp_path, "gutenberg").manifest["notes"]["books not there"] == {"train": [10, 12]}


def test_a_web_page_is_no_book(server: FileServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    server.files[address(10)] = b"\xef\xbb\xbf\r\n<!DOCTYPE html><p>Are you human?"
    assert prepare("gutenberg") == 1
    assert f"{address(10)} is a web page, not a book" in capsys.readouterr().err
    assert names(tmp_path / "data" / "gutenberg") == {"11.txt"}


@pytest.mark.parametrize(
    "content", [b"<html>log in first</html>", zipped({"other/file": "x"}), zipped({})], ids=["page", "other", "empty"]
)
def test_a_sentence_model_that_is_none(
    server: FileServer, tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes
) -> None:
    server.files[PUNKT] = content
    for _ in range(2):  # it is not taken for one when it is there the next time
        assert prepare("gutenberg") == 1
        error = capsys.readouterr().err
        assert "hebbian: error: " in error
        assert "punkt_tab.zip does not hold NLTK's English sentence model: delete it" in error
    (tmp_path / "data" / "nltk_data" / "tokenizers" / "punkt_tab.zip").unlink()
    server.files[PUNKT] = zipped(MODEL)
    assert prepare("gutenberg", "--quiet") == 0
