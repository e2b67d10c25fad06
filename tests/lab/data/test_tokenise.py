"""The fast tokeniser gives the tokens of NLTK, called as in the paper's script."""

import itertools
import json
import lzma
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hebbian_softmax.lab.base.errors import LabError
from hebbian_softmax.lab.data.texts import read_texts
from hebbian_softmax.lab.data.tokenise import MARK, Tokeniser, find_punkt, tokeniser
from tests.lab.data.english import MODEL, PUNKT, REAL, write_model, zipped
from tests.lab.data.serving import internet


@pytest.fixture(scope="module", autouse=True)
def _model(tmp_path_factory: pytest.TempPathFactory) -> None:
    root = REAL
    if not (REAL / "nltk_data").is_dir():
        root = tmp_path_factory.mktemp("data")
        write_model(root)
    find_punkt(root)


def literal(text: str) -> list[str]:
    """Do what the paper's script does: sentences, words, a line break after each sentence, at last lower case."""
    import nltk

    tokens = []
    for sentence in nltk.sent_tokenize(text.replace("\r", " ").replace("\n", " ")):
        tokens.extend([*nltk.word_tokenize(sentence), "\n"])
    lowered = " ".join(tokens).lower()
    return [token for line in re.findall("[^\n]*\n", lowered) for token in (*line.split(" ")[:-1], "<eos>") if token]


PIECES = [
    *"ab.,:;?!'\"`()[]{}<>-*@#$%&*_»«”“’‘„—–…",
    *(" ", "  ", "\n", "\r\n", "\t", "\xa0", "\x0b", "\x1c", "\x85", "\u2028", "\u3000", "\0", "\ufeff"),
    *("''", '""', "``", "--", "---", "...", ". . .", ".)", '."', ".'", ".”", '?"', "!'", ").", "'.", '".', ",,", ":,"),
    *("cannot", "Gimme", "gonna", "wanna", "d'ye", "more'n", "'tis", "'Twas", "'s", "'ll", "n't", "N'T", "'re", "'D"),
    *("Mr.", "U.S.", "e.g.", "A.", "1.", "3.14", "1,000", "10:30", "The", "He", "word", "WORD", "naïve", "İΣ"),
    *("e\u0301", " the ", " He ", ". ", "? ", '" ', " '", ' "', ", ", MARK, f" {MARK} "),
]
texts = st.lists(st.sampled_from(PIECES), max_size=25).map("".join)


@settings(max_examples=700)
@given(texts)
def test_any_text(text: str) -> None:
    assert tokeniser().tokens(text) == literal(text)


@pytest.mark.parametrize(
    "text",
    [
        "Mr. Holmes can't come. He's ill.",
        '"I cannot," he said; "gimme 3,000.5 (or more)." \'Tis done...',
        "'Yes!' -- cried the dogs' owner?'  \"No.\"  ''Well'' . . . he went.",
        '""Twice"" quoted. \'\'Single\'\' twice. (It ended.) [So.] "He ran," she said. \'',
        "word. ) ' \"",
        "",
        "   ",
        ".",
        "\x1c",
    ],
)
def test_hard_texts(text: str) -> None:
    assert Tokeniser().tokens(text) == literal(text)


def test_a_tokeniser_that_forgets_gives_the_same() -> None:
    forgetful = Tokeniser(remembered=5, together=3)
    for text in ("The cat sat. He ran away!", "The dog sat. He, too, ran away.", "The cat sat. He ran away!"):
        assert forgetful.tokens(text) == literal(text)
        assert len(forgetful._known) < 30


@pytest.mark.slow
@pytest.mark.skipif(not (REAL / "gutenberg").is_dir(), reason="no ../shared/data/gutenberg")
def test_real_books() -> None:
    fresh, seen = Tokeniser(), 0
    for name, file in read_texts(REAL / "gutenberg" / "paper-valid-test.tar.xz"):
        text = file.read().decode("latin-1")[40_000:55_000]
        tokens = fresh.tokens(text)
        assert tokens == literal(text), name
        seen += len(tokens)
    assert seen > 60_000


@pytest.mark.skipif(not (REAL / "news").is_dir(), reason="no ../shared/data/news")
def test_real_news() -> None:
    fresh = Tokeniser()
    with lzma.open(REAL / "news" / "reuters-21578.jsonl.xz") as file:
        for line in itertools.islice(file, 0, 6000, 40):
            text = json.loads(line)["text"]
            assert fresh.tokens(text) == literal(text)


def test_the_model_is_found_in_the_data_root(tmp_path: Path, no_model: None) -> None:
    write_model(tmp_path)
    find_punkt(tmp_path)
    assert " ".join(Tokeniser().tokens("Mr. Holmes ran. He fell.")) == "mr. holmes ran . <eos> he fell . <eos>"


def test_what_is_missing_is_downloaded_once(tmp_path: Path, no_model: None, monkeypatch: pytest.MonkeyPatch) -> None:
    with internet({PUNKT: zipped(MODEL)}, monkeypatch) as server:
        find_punkt(tmp_path / "data", quiet=True)
        find_punkt(tmp_path / "data", quiet=True)
    assert server.asked == [PUNKT]
    assert " ".join(Tokeniser().tokens("Mr. Holmes ran.")) == "mr. holmes ran . <eos>"


def test_a_damaged_model_is_an_error_that_says_what_to_do(tmp_path: Path, no_model: None) -> None:
    write_model(tmp_path)
    (tmp_path / "nltk_data" / "tokenizers" / "punkt_tab" / "english" / "collocations.tab").unlink()
    find_punkt(tmp_path)
    with pytest.raises(LabError, match=r"NLTK cannot load .*NLTK_DATA"):
        Tokeniser()


def test_a_damaged_byte_of_the_model_is_an_error_that_names_it_or_does_no_harm(tmp_path: Path, no_model: None) -> None:
    path = tmp_path / "nltk_data" / "tokenizers" / "punkt_tab.zip"
    path.parent.mkdir(parents=True)

    def outcome(at: int) -> str:
        content = bytearray(zipped(MODEL))
        content[at] ^= 0xFF
        path.write_bytes(content)
        try:
            find_punkt(tmp_path)
            return " ".join(Tokeniser().tokens("Mr. Holmes came."))
        except LabError as error:
            return str(error)

    outcomes = [outcome(at) for at in range(0, 400, 20)]
    assert all(found == "mr. holmes came . <eos>" or str(path) in found for found in outcomes), outcomes
    assert any("NLTK cannot load" in found for found in outcomes)
