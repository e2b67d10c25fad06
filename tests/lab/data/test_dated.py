"""Dated articles: which split they go to, when words are first seen, and which lines are refused."""

import argparse
import gzip
import json
import lzma
from collections.abc import Callable
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from hebbian_softmax.lab.base.errors import LabError
from hebbian_softmax.lab.data.corpus import SPLITS, Corpus
from hebbian_softmax.lab.data.dated import REUTERS_FILE as REUTERS
from hebbian_softmax.lab.data.dated import FileOptions, Options, parse_days, plan
from hebbian_softmax.lab.data.prepare import prepare
from hebbian_softmax.lab.data.registry import load_corpus
from hebbian_softmax.lab.data.texts import PART
from tests.lab.data.english import REAL, text_of, write

ARTICLES: list[dict[str, str | None]] = [
    {"date": "1987-02-01", "title": "OIL UP", "text": "Oil rose.\nIt fell."},
    {"date": "1987-06-17T23:59:59", "title": None, "text": "Oil fell."},
    {"date": "1987-06-18", "title": "", "text": "Oil sank."},
    {"date": "1987-06-30", "title": "No split", "text": "Never read."},
    {"date": "1987-10-20", "title": "CRASH", "text": "It fell \ud83d badly."},
]


def lines(articles: list[dict[str, str | None]] = ARTICLES) -> bytes:
    return b"".join(json.dumps(article).encode() + b"\n" for article in articles)


def read(kind: type[Any] = Options, **options: object) -> Corpus:
    return prepare(plan(kind(**({"minimum": 1} | options))), processes=1, quiet=True)[0]


@pytest.mark.parametrize(("suffix", "pack"), [("", bytes), (".xz", lzma.compress), (".gz", gzip.compress)])
def test_articles_go_to_the_split_of_their_day(english: Path, suffix: str, pack: Callable[[bytes], bytes]) -> None:
    write(english, {REUTERS + suffix: pack(lines())})
    corpus = read()
    assert text_of(corpus, "train") == "oil up <eos> oil rose . <eos> it fell . <eos> oil fell . <eos>"
    assert text_of(corpus, "valid") == "oil <unk> . <eos>"
    assert text_of(corpus, "test") == "<unk> <eos> it fell <unk> <unk> . <eos>"
    assert corpus.manifest["notes"]["articles"] == {"train": 2, "valid": 1, "test": 1}
    assert corpus.arrays["train_starts"].tolist() == [0, 11]
    assert corpus.arrays["train_days"].tolist() == [date(1987, 2, 1).toordinal(), date(1987, 6, 17).toordinal()]


def test_the_day_a_word_is_first_seen(english: Path) -> None:
    articles: list[dict[str, str | None]] = [
        {"date": "1987-06-01", "text": "Late news."},
        {"date": "1987-03-01", "text": "Early news."},  # not in chronological order
        {"date": "1987-06-18", "text": "x"},
        {"date": "1987-10-19", "text": "x"},
    ]
    write(english, {REUTERS: lines(articles)})
    corpus = read()
    days = zip(corpus.words, corpus.arrays["first_days"].tolist(), strict=True)
    seen = {word: str(date.fromordinal(day)) for word, day in days if day}
    assert seen == {"late": "1987-06-01", **dict.fromkeys(("early", "news", ".", "<eos>"), "1987-03-01")}


def test_a_file_and_days_of_ones_own(english: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.jsonl").write_bytes(lines())
    days = {"train": "1987-06-18..1987-10-20", "valid": "1987-06-17..1987-06-17", "test": "1987-02-01..1987-02-01"}
    options = {split: parse_days(text) for split, text in days.items()}
    corpus = read(FileOptions, file=str(tmp_path / "mine.jsonl"), **options)
    assert text_of(corpus, "train").startswith("oil sank . <eos> no split <eos> never read . <eos> crash <eos>")
    assert corpus.name.startswith("dated-")


@pytest.mark.parametrize(
    "text", ["1987-02-01", "1987-02-01..", "1987-02-30..1987-03-01", "1987-03-01..1987-02-01", "a..b"]
)
def test_days_that_are_none(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="must"):
        parse_days(text)


def test_days_that_overlap() -> None:
    with pytest.raises(LabError, match="the days of train and test overlap"):
        plan(Options(test=parse_days("1987-06-17..1987-06-17")))


@pytest.mark.parametrize(
    "line",
    [b"{", b"[]", b"{}", b'{"date": "soon", "text": "x"}', b'{"date": "1987-02-01", "text": 3}', b'{"text": "x"}',
     b'{"date": "1987-02-01", "text": "\xff"}', b'{"date": 5, "text": "x"}'],
)  # fmt: skip
def test_a_line_that_is_no_article_is_named(english: Path, line: bytes) -> None:
    padding = b" " * PART  # puts the line into the second part
    write(english, {REUTERS: lines(ARTICLES[:2]) + padding + b"\n" + line + b"\n"})
    with pytest.raises(LabError, match=r"reuters-21578\.jsonl, line 4 is not an article"):
        read()


@pytest.mark.parametrize(("suffix", "pack"), [(".xz", lzma.compress), (".gz", gzip.compress)])
def test_a_cut_file_is_named(english: Path, suffix: str, pack: Callable[[bytes], bytes]) -> None:
    write(english, {REUTERS + suffix: pack(lines())[:-12]})
    with pytest.raises(LabError, match=rf"reuters-21578\.jsonl{suffix} cannot be read"):
        read()


def test_no_file(english: Path, tmp_path: Path) -> None:
    with pytest.raises(LabError, match=r"reuters-21578\.jsonl is not there.*HEBBIAN_DATA"):
        read()
    with pytest.raises(LabError, match=r"none\.jsonl is not there"):
        read(FileOptions, **asdict(Options()), file=str(tmp_path / "none.jsonl"))


def test_a_split_without_articles(english: Path) -> None:
    write(english, {REUTERS: lines(ARTICLES[:-1])})
    expected = r"reuters-21578\.jsonl has no words of 1987-10-19 to 1987-10-20, the days of the test split: .*--test"
    with pytest.raises(LabError, match=expected):
        read()


@pytest.mark.skipif(not (REAL / "news").is_dir(), reason="no ../shared/data/news")
@pytest.mark.slow
def test_the_real_one() -> None:
    corpus = load_corpus("reuters", data_root=str(REAL), quiet=True)
    assert corpus.manifest["notes"]["articles"] == {"train": 16_431, "valid": 1_368, "test": 1_243}
    assert [len(corpus.splits[split]) for split in SPLITS] == [2_765_594, 215_329, 168_749]
