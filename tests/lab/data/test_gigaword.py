"""GigaWord's SGML, in small files that have the form of the LDC's."""

import gzip
import shutil
from datetime import date
from pathlib import Path

import pytest

from hebbian_softmax.lab.base.errors import LabError
from hebbian_softmax.lab.data.corpus import Corpus
from hebbian_softmax.lab.data.gigaword import SIZE, Options, choose_articles, paragraphs, plan, read_articles
from hebbian_softmax.lab.data.prepare import prepare
from tests.lab.data.english import text_of, write


def article(agency: str, day: str, number: int, text: str, kind: str = "story") -> str:
    return (
        f'<DOC id="{agency}_ENG_{day}.{number:04d}" type="{kind}" >\n'
        f"<HEADLINE>\nNews of {agency.lower()}\n</HEADLINE>\n"
        f"<DATELINE>\nParis, Jan 1 (AFP)\n</DATELINE>\n<TEXT>\n{text}\n</TEXT>\n</DOC>\n"
    )


FILES = {
    "data/afp_eng/afp_eng_199912.gz": article("AFP", "19991231", 1, "<P>\nToo old.\n</P>"),
    "data/afp_eng/afp_eng_200001.gz": article("AFP", "20000101", 1, "<P>\nOne\nline.\n</P>\n<P>\nAT&amp;T rose.\n</P>")
    + article("AFP", "20000102", 1, "No paragraphs here.", kind="other"),
    "data/xin_eng/xin_eng_200001.gz": article("XIN", "20000101", 1, "<P>\nFrom Beijing.\n</P>"),
    "data/afp_eng/afp_eng_200911.gz": article("AFP", "20091130", 1, "<P>\nThe last day.\n</P>"),
    "data/afp_eng/afp_eng_200912.gz": article("AFP", "20091201", 1, "<P>\nTo validate.\n</P>"),
    "data/afp_eng/afp_eng_201001.gz": "".join(
        article("AFP", "20100101", number, f"<P>\nTest {number}.\n</P>") for number in range(1, 10)
    ),
    "data/afp_eng/afp_eng_201012.gz": article("AFP", "20101231", 1, "<P>\nTest end.\n</P>"),
    "docs/readme_200001.txt": "no articles",
}
NOVEMBER = "gigaword/data/afp_eng/afp_eng_200911.gz"
HEAD = "news of afp <eos> paris , jan 1 ( afp ) <eos> "


@pytest.fixture
def root(english: Path) -> Path:
    write(english / "gigaword", {name: gzip.compress(text.encode()) for name, text in FILES.items()})
    return english


def read(root: Path, processes: int = 1, size: int = SIZE, **options: object) -> Corpus:
    made = plan(Options(**options), size)  # type: ignore[arg-type]
    return prepare(made, data_root=str(root), processes=processes, quiet=True)[0]


def test_the_years_are_split_and_read_in_the_order_of_time(root: Path) -> None:
    corpus = read(root)
    assert text_of(corpus, "train") == (
        HEAD + "one line . <eos> at & t rose . <eos> "
        + HEAD + "no paragraphs here . <eos> "
        + "news of xin <eos> paris , jan 1 ( afp ) <eos> from beijing . <eos> "
        + HEAD + "the last day . <eos>"
    )  # fmt: skip
    assert corpus.name == "gigaword"
    assert text_of(corpus, "valid") == HEAD + "<unk> <unk> . <eos>"
    assert corpus.manifest["notes"]["articles"] == {"train": 4, "valid": 1, "test": 10}
    days = [date.fromordinal(day) for day in corpus.arrays["test_days"].tolist()]
    assert days == [date(2010, 1, 1)] * 9 + [date(2010, 12, 31)]
    assert corpus.manifest["sources"][0]["name"] == "data/afp_eng/afp_eng_200001.gz"


def test_the_vocabulary_has_a_size(root: Path) -> None:
    corpus = read(root, size=10)
    assert len(corpus.words) == 10
    assert {"<unk>", "<eos>", "news"} < set(corpus.words)


def test_a_random_part_of_the_evaluation_articles(root: Path) -> None:
    def chosen(articles: int, processes: int) -> list[int]:
        corpus = read(root, processes, eval_articles=articles)
        assert corpus.manifest["notes"]["articles"] == {"train": 4, "valid": 1, "test": min(articles, 10)}
        assert text_of(corpus, "train") == whole
        shutil.rmtree(corpus.path)
        return corpus.splits["test"].tolist()

    whole = text_of(read(root), "train")
    assert chosen(4, processes=1) == chosen(4, processes=2) != chosen(100, processes=1)


def test_the_choice_is_random_by_the_seed(root: Path) -> None:
    files = [root / "gigaword" / name for name in FILES if "_eng_2010" in name]
    choices = [choose_articles(Options(eval_articles=3, seed=seed), files, 1) for seed in range(30)]
    assert all(len(choice) == 3 for choice in choices)
    assert len(set(choices)) > 15
    assert len(frozenset().union(*choices)) == 10  # each article has its chance


def test_paragraphs() -> None:
    assert paragraphs(b"<TEXT>\n<P>\na &lt;b&gt; <br/>\n</P>\n<P>\n</P>\nrest\n</TEXT>") == ["\na <b>  \n", "\nrest\n"]


def test_latin_1_is_read_too(root: Path) -> None:
    write(root, {NOVEMBER: gzip.compress(article("AFP", "20091130", 1, "<P>\nCafé.\n</P>").encode("latin-1"))})
    assert "café ." in text_of(read(root), "train")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (gzip.compress(b"x" * 1000)[:-20], "EOFError"),
        (b"no gzip", "BadGzipFile"),
        (gzip.compress(b'<DOC id="AFP_ENG_20091130.0001" type="story" >\n'), "does not end"),
        (gzip.compress(b'<DOC id="AFP_ENG_20091130.0001">\n<DOC id="AFP_ENG_20091130.0002">\n'), "does not end"),
        (gzip.compress(b"<DOC>\n</DOC>\n"), "names no article"),
        (gzip.compress(b'<DOC id="AFP_ENG_20091131.0001">\n</DOC>\n'), "day"),
    ],
    ids=["cut", "no gzip", "no end", "no end before the next", "no name", "no such day"],
)
def test_a_damaged_file_is_named(root: Path, content: bytes, message: str) -> None:
    write(root, {NOVEMBER: content})
    with pytest.raises(LabError, match=rf"afp_eng_200911\.gz .*{message}.*: (copy|replace) it"):
        list(read_articles(root / NOVEMBER))
    with pytest.raises(LabError, match=r"afp_eng_200911\.gz "):
        read(root, processes=2)


def test_a_month_twice(root: Path) -> None:
    # As gunzip --keep leaves it.
    write(root, {NOVEMBER.removesuffix(".gz"): gzip.decompress((root / NOVEMBER).read_bytes())})
    with pytest.raises(LabError, match=r"afp_eng_200911 and .*afp_eng_200911\.gz are the same month twice"):
        read(root)


def test_a_further_month_makes_it_again(root: Path) -> None:
    before = read(root)
    month = gzip.compress(article("CNA", "20000201", 1, "<P>\nFrom Taipei.\n</P>").encode())
    write(root, {"gigaword/data/cna_eng/cna_eng_200002.gz": month})
    assert read(root).manifest["notes"]["articles"]["train"] == 5 == before.manifest["notes"]["articles"]["train"] + 1


def test_a_seed_of_nothing() -> None:
    with pytest.raises(LabError, match="--seed chooses articles for --eval-articles"):
        plan(Options(seed=1))


def test_no_files(english: Path, tmp_path: Path) -> None:
    with pytest.raises(LabError, match=r"gigaword has no files of GigaWord v5 .*LDC2011T07"):
        read(english)
    with pytest.raises(LabError, match=r"elsewhere has no files"):
        read(english, folder=str(tmp_path / "elsewhere"))


def test_a_split_without_articles(root: Path) -> None:
    for path in (root / "gigaword").rglob("*_eng_2010*"):
        path.unlink()
    with pytest.raises(LabError, match="gigaword has no articles of 2010 for the test split: add those files"):
        read(root)
