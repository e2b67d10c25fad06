"""WikiText: the real corpus where it is at hand, and small ones, some with something wrong."""

import lzma
from collections.abc import Iterator
from pathlib import Path

import pytest

from hebbian_softmax.lab.base.errors import LabError
from hebbian_softmax.lab.data.corpus import SPLITS, Corpus
from hebbian_softmax.lab.data.prepare import prepare
from hebbian_softmax.lab.data.registry import load_corpus
from hebbian_softmax.lab.data.wikitext import Official, plan
from tests.lab.data.english import REAL, text_of, write, zipped
from tests.lab.data.serving import internet

SMALL = Official("wikitext-2", (12, 3, 3), 7)
TRAIN = " \n = A title = \n \n the cat \u2028 \r <unk> the \n"  # another separator inside a line is no end of it
TEXTS = {"train": TRAIN, "valid": " the cat \n", "test": " the <unk> \n"}


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty data root, in a world without any file to download."""
    (tmp_path / "data" / "wikitext-2").mkdir(parents=True)
    with internet({}, monkeypatch):
        yield tmp_path / "data"


def files(**changes: bytes) -> dict[str, bytes]:
    texts = {split: text.encode() for split, text in TEXTS.items()} | changes
    return {f"wikitext-2/wiki.{split}.tokens": text for split, text in texts.items()}


def read() -> Corpus:
    return prepare(plan(SMALL), processes=1, quiet=True)[0]


def assert_right(corpus: Corpus) -> None:
    literal = [token for line in TRAIN.split("\n")[:-1] for token in [*line.split(), "<eos>"]]
    assert text_of(corpus, "train").split() == literal
    assert corpus.words == ["<eos>", "=", "the", "<unk>", "A", "cat", "title"]
    assert corpus.counts.tolist() == [4, 2, 2, 1, 1, 1, 1]
    assert text_of(corpus, "test") == "the <unk> <eos>"


@pytest.mark.parametrize("place", ["", "wikitext-2"])
def test_the_archive(root: Path, place: str) -> None:
    write(root / place / "wikitext-2-v1.zip", files())
    assert_right(read())
    assert [source["name"] for source in read().manifest["sources"]] == ["wikitext-2-v1.zip"]


@pytest.mark.parametrize("packed", [True, False])
def test_texts_in_a_folder(root: Path, packed: bool) -> None:
    write(root, {f"{name}.xz": lzma.compress(text) for name, text in files().items()} if packed else files())
    assert_right(read())


def test_by_name_it_is_used_as_it_is(root: Path) -> None:
    write(root / "wikitext-2-v1.zip", files())
    assert_right(read())
    write(root / "wikitext-2-v1.zip", files(test=b" the \n"))
    assert_right(load_corpus("wikitext-2", quiet=True))  # a run does not look at changed sources
    with pytest.raises(LabError, match="not wikitext-2"):
        read()  # makes it again from the changed source, which is refused
    assert_right(load_corpus("wikitext-2", quiet=True))
    (root / "wikitext-2-v1.zip").unlink()
    (root / "wikitext-2" / "wiki.test.tokens").write_bytes(b"of no use alone")
    assert_right(load_corpus("wikitext-2", quiet=True))
    assert_right(read())


ZIP = "wikitext-2-v1.zip"
WHOLE = zipped(files(train=TRAIN.encode() + bytes(range(32, 127)) * 50))
FLIPPED = WHOLE[:80] + bytes([WHOLE[80] ^ 0xFF]) + WHOLE[81:]
CUT_XZ = {f"{name}.xz": lzma.compress(text)[: -4 if "test" in name else None] for name, text in files().items()}
UNREADABLE = r"wikitext-2-v1\.zip cannot be read .*replace it"
OTHER_COUNTS = r"wikitext-2-v1\.zip: not wikitext-2, with 14 / 3 / 3 tokens and 8 words where it has 12 / 3 / 3"
EMPTY_TEST = r"train\.tokens and .*valid\.tokens and .*test\.tokens: not .* 12 / 3 / 0 tokens"


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ({}, r"cannot download .*put the file at .*wikitext-2-v1\.zip yourself"),
        (dict(list(files().items())[1:]), r"wikitext-2 has no wiki\.train\.tokens, .*wikitext-2-v1\.zip yourself"),
        ({ZIP: WHOLE[:-30]}, UNREADABLE),
        ({ZIP: b"not found"}, UNREADABLE),
        ({ZIP: FLIPPED}, UNREADABLE),
        ({ZIP: zipped({"wikitext-103/wiki.train.tokens": "a \n"})}, UNREADABLE),
        (CUT_XZ, r"wiki\.test\.tokens\.xz cannot be read"),
        (
            {ZIP: zipped(files(valid=b" the \xff cat \n"))},
            r"-v1\.zip holds bytes in its valid split that are not UTF-8",
        ),
        ({ZIP: zipped(files(train=TRAIN.encode() + b" more \n"))}, OTHER_COUNTS),
        (files(test=b""), EMPTY_TEST),
    ],
    ids=["nothing", "no train", "cut", "a page", "flipped", "another", "cut xz", "no text", "counts", "empty test"],
)
def test_what_is_wrong_is_named(root: Path, found: dict[str, bytes], message: str) -> None:
    write(root, found)
    with pytest.raises(LabError, match=message):
        read()


@pytest.mark.skipif(not (REAL / "wikitext-2").is_dir(), reason="no ../shared/data/wikitext-2")
def test_the_real_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEBBIAN_DATA", str(REAL))
    corpus = load_corpus("wikitext-2", quiet=True)
    assert [len(corpus.splits[split]) for split in SPLITS] == [2_088_628, 217_646, 245_569]
    assert len(corpus.words) == 33_278
    assert corpus.counts.tolist() == sorted(corpus.counts.tolist(), reverse=True)
