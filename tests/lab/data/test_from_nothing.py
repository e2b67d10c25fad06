"""From an empty data root to a prepared corpus, with every file coming from a web server."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hebbian_softmax.lab.base.errors import LabError
from hebbian_softmax.lab.cli import main
from hebbian_softmax.lab.data.command import summary
from hebbian_softmax.lab.data.corpus import Corpus, open_corpus
from hebbian_softmax.lab.data.gutenberg import MIRROR, PAUSE, SUSPECT, Options, Splits, collect, plan
from hebbian_softmax.lab.data.prepare import Plan, prepare
from hebbian_softmax.lab.data.wikitext import Official
from hebbian_softmax.lab.data.wikitext import plan as wikitext
from tests.lab.base.test_files import names
from tests.lab.data.english import MODEL, PUNKT, text_of, write, zipped
from tests.lab.data.serving import FileServer, internet
from tests.lab.processes import start

BOOKS = {"train": [11, 10, 12], "valid": [30], "test": [40]}
EVERY = [11, 10, 12, 30, 40]  # in the order in which they are fetched


def book(number: int, sentences: int = 30) -> bytes:
    body = f"Mr. Holmes read book {number}. He ran. " * sentences
    return f"START OF THE PROJECT GUTENBERG EBOOK X\r\n{body}\r\nEND OF THE PROJECT GUTENBERG EBOOK".encode()


def address(number: int) -> str:
    return f"/cache/epub/{number}/pg{number}.txt"


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds that the program wanted to wait; it does not wait."""
    waited: list[float] = []
    monkeypatch.setattr(time, "sleep", waited.append)
    return waited


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, no_model: None, pauses: list[float]) -> Iterator[FileServer]:
    """A world in which this machine has no file, and the server has all of them."""
    files = {PUNKT: zipped(MODEL), **{address(number): book(number) for number in EVERY}}
    with internet(files, monkeypatch) as server:
        yield server


def make(plan: Plan, quiet: bool = True) -> Corpus:
    return open_corpus(prepare(plan, processes=1, quiet=quiet)[0].path, verify=True)


def gutenberg(mirror: str = MIRROR, books: Splits = BOOKS) -> Plan:
    return plan(Options(mirror=mirror), books)


@pytest.mark.parametrize("name", ["wikitext-2", "wikitext-103"])
def test_wikitext(server: FileServer, tmp_path: Path, name: str) -> None:
    texts = {"train": " the cat <unk> \n", "valid": " the cat \n", "test": " the <unk> \n"}
    archive = zipped({f"{name}/wiki.{split}.tokens": text for split, text in texts.items()})
    server.files[f"/{name}-v1.zip"] = archive
    for _ in range(2):
        assert text_of(make(wikitext(Official(name, (4, 3, 3), 4))), "train") == "the cat <unk> <eos>"
    assert (tmp_path / "data" / name / f"{name}-v1.zip").read_bytes() == archive
    assert server.asked == [f"/{name}-v1.zip"]


def test_gutenberg(server: FileServer, capsys: pytest.CaptureFixture[str]) -> None:
    del server.files[address(12)]
    server.statuses[address(30)] = [503]  # is tried again
    corpus = make(gutenberg(), quiet=False)
    shown = capsys.readouterr().err
    assert "gutenberg: 5/5 books, not there 1" in shown
    missing = "books that are not there: 12 (train)"
    assert f"gutenberg: {missing}, at {MIRROR}" in shown
    assert summary(corpus).endswith(f"  {missing}")
    read = "mr. holmes read book {} . <eos> he ran . <eos>"
    assert text_of(corpus, "train").startswith("<unk> " + read.format(11))  # the title occurs once
    assert read.format(10) in text_of(corpus, "train")
    assert "<unk> . <eos> he ran" in text_of(corpus, "test")  # 40 is not a word of the training books
    assert corpus.manifest["notes"]["books not there"] == {"train": [12]}
    assert corpus.manifest["notes"]["books"] == {"train": 2, "valid": 1, "test": 1}
    assert {source["name"] for source in corpus.manifest["sources"]} == {"10.txt", "11.txt", "30.txt", "40.txt"}
    assert server.asked == [PUNKT, *map(address, (11, 10, 12, 30, 30, 40))]

    server.asked.clear()
    assert summary(make(gutenberg())) == summary(corpus)
    assert server.asked == []


def test_a_mirror_of_ones_own_and_a_pause_between_books(server: FileServer, pauses: list[float]) -> None:
    for number in EVERY:
        server.files[f"/{number}/{number}.txt"] = server.files.pop(address(number))
    corpus = make(gutenberg("https://mirror.example/{id}/{id}.txt"))
    assert corpus.manifest["notes"]["books"] == {"train": 3, "valid": 1, "test": 1}
    assert pauses == [PAUSE] * (len(EVERY) - 1)


@pytest.mark.parametrize("mirror", ["https://example.org/10.txt", "ftp://example.org/{id}.txt"])
def test_a_mirror_that_is_none(mirror: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["data", "prepare", "gutenberg", "--mirror", mirror])
    assert "--mirror: must be an http or https address with {id} in it" in capsys.readouterr().err


def test_a_refused_download_goes_on_where_it_stopped(
    server: FileServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.statuses[address(12)] = [403]
    with pytest.raises(LabError, match=r"3 of 5 books are still to come: cannot download .*/pg12\.txt \(HTTP 403"):
        make(gutenberg())
    assert names(tmp_path / "data" / "gutenberg") == {"10.txt", "11.txt", "checksums.json"}
    assert names(tmp_path / "cache" / "corpora") == {".gutenberg.lock"}
    server.asked.clear()
    make(gutenberg(), quiet=False)
    assert server.asked == [address(number) for number in (12, 30, 40)]
    assert "gutenberg: 5/5 books" in capsys.readouterr().err


def collect_at_once(folder: Path, mirror: str) -> int:
    """Collect the books without pauses, in a process of its own."""
    time.sleep = lambda seconds: None
    collect(folder, BOOKS, folder, mirror, quiet=True)
    return 0


def test_a_killed_download_goes_on_in_the_middle_of_a_book(
    server: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process is killed while it receives a book; the files that it leaves are used."""
    monkeypatch.undo()  # this test waits for another process
    server.hanging.add(address(12))
    server.files[address(12)] = book(12, sentences=3000)  # more than a file's buffer holds
    folder, mirror = tmp_path / "data" / "gutenberg", server.url + "/cache/epub/{id}/pg{id}.txt"
    process = start(collect_at_once, folder, mirror)
    assert server.hung.wait(60)
    part, deadline = folder / "12.txt.part", time.monotonic() + 30
    while not (part.exists() and part.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.01)
    process.kill()
    process.join()
    have = part.stat().st_size
    assert 0 < have <= len(server.files[address(12)]) // 2
    assert names(folder) == {"11.txt", "10.txt", "12.txt.part", "12.txt.part.json", "checksums.json"}
    server.hanging.clear()
    server.asked.clear()
    server.ranges.clear()
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    collected, missing = collect(folder, BOOKS, tmp_path, mirror, quiet=True)
    assert missing == {}
    assert server.asked == [address(12), address(30), address(40)]
    assert server.ranges == [f"bytes={have}-", None, None]
    assert sorted(collected) == sorted(EVERY)
    assert all(path.read_bytes() == server.files[address(number)] for number, path in collected.items())
    assert names(folder) == {f"{number}.txt" for number in EVERY} | {"checksums.json"}


def test_an_address_without_any_book(server: FileServer) -> None:
    books = {**BOOKS, "train": list(range(SUSPECT + 5))}
    with pytest.raises(LabError, match=rf"/wrong/{SUSPECT - 1} is not there, nor are {SUSPECT - 1} other books: "):
        make(gutenberg("https://mirror.example/wrong/{id}", books))
    assert server.asked == [PUNKT, *(f"/wrong/{number}" for number in range(SUSPECT))]


def test_books_that_are_gone_do_not_make_an_address_wrong(server: FileServer, tmp_path: Path) -> None:
    earlier = {f"{number}.txt": book(number) for number in (11, 30, 40)}  # an earlier download left them
    write(tmp_path / "data" / "gutenberg", earlier)
    gone = list(range(100, 100 + SUSPECT))
    corpus = make(gutenberg(books={**BOOKS, "train": [11, *gone]}))
    assert corpus.manifest["notes"]["books not there"] == {"train": gone}


def test_a_web_page_is_no_book(server: FileServer, tmp_path: Path) -> None:
    server.files[address(10)] = b"\xef\xbb\xbf\r\n<!DOCTYPE html><p>Are you human?"
    with pytest.raises(LabError, match=r"/pg10\.txt is a web page, not a book"):
        make(gutenberg())
    assert names(tmp_path / "data" / "gutenberg") == {"11.txt", "checksums.json"}


@pytest.mark.parametrize(
    "content", [b"<html>log in first</html>", zipped({"other/file": "x"}), zipped({})], ids=["page", "other", "empty"]
)
def test_a_sentence_model_that_is_none(server: FileServer, tmp_path: Path, content: bytes) -> None:
    server.files[PUNKT] = content
    for _ in range(2):  # nor is the file taken for a model when it is there the next time
        with pytest.raises(LabError, match=r"punkt_tab\.zip does not hold NLTK's English sentence model: delete it"):
            make(gutenberg())
    (tmp_path / "data" / "nltk_data" / "tokenizers" / "punkt_tab.zip").unlink()
    server.files[PUNKT] = zipped(MODEL)
    make(gutenberg())
