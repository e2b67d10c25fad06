"""The corpus of your own texts: where they may be, how they are cut, and what is refused."""

import gzip
import io
import lzma
import os
import tarfile
from pathlib import Path

import pytest

from hebbian_softmax.lab.base.errors import LabError
from hebbian_softmax.lab.cli import main
from hebbian_softmax.lab.data.corpus import SPLITS, Corpus
from hebbian_softmax.lab.data.prepare import prepare
from hebbian_softmax.lab.data.registry import load_corpus
from hebbian_softmax.lab.data.texts import PART, TOKENS, Options, Piece, cut, plan
from tests.lab.data.english import text_of, write, zipped

TEXTS = {"train": "The cat sat. He\nran.\n\nThe cat ran.", "valid": "The dog ran.", "test": "He sat."}
EXPECTED = {
    "train": "the cat sat . <eos> he ran . <eos> the cat ran . <eos>",
    "valid": "the <unk> ran . <eos>",
    "test": "he sat . <eos>",
}


@pytest.fixture
def places(english: Path, tmp_path: Path) -> dict[str, str]:
    """A file for each split; the data root has the sentence model."""
    write(tmp_path, TEXTS)
    return {split: str(tmp_path / split) for split in SPLITS}


def read(places: dict[str, str], minimum: int = 1, tokens: str = "nltk", name: str = "", part: int = PART) -> Corpus:
    made = plan(Options(**places, minimum=minimum, tokens=tokens), part)
    return prepare(made, name=name, processes=1, quiet=True)[0]


def texts_of(corpus: Corpus) -> dict[str, str]:
    return {split: text_of(corpus, split) for split in SPLITS}


def test_a_file_for_each_split(places: dict[str, str]) -> None:
    corpus = read(places)
    assert texts_of(corpus) == EXPECTED
    assert corpus.manifest["notes"]["places"] == places  # the settings have only the checksums


@pytest.mark.parametrize("name", ["folder", "texts.zip", "texts.tar.xz", "text.xz", "text.gz", "bom"])
def test_where_a_text_may_lie(places: dict[str, str], tmp_path: Path, name: str) -> None:
    text, first, second = (part.encode() for part in (TEXTS["train"], *TEXTS["train"].split("\n\n")))
    files = {"text.xz": lzma.compress(text), "text.gz": gzip.compress(text), "bom": b"\xef\xbb\xbf" + text}
    if name in files:
        write(tmp_path, {name: files[name]})
    else:
        write(tmp_path / name, {"a.txt": first, "b/c.txt": second, "notes.md": b"not this"})
    assert texts_of(read({**places, "train": str(tmp_path / name)})) == EXPECTED


def test_tokens_between_spaces(places: dict[str, str]) -> None:
    Path(places["train"]).write_text("Ein Satz .\n\nnoch <unk> ein\u2028Satz .", encoding="utf-8")
    found = texts_of(read(places, tokens="spaces"))
    assert found["train"] == "Ein Satz . <eos> <eos> noch <unk> ein Satz . <eos>"
    assert found["test"] == "<unk> <unk> <eos>"


@pytest.mark.parametrize("split", SPLITS)
def test_a_text_with_unknown_words_is_noticed(
    places: dict[str, str], split: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path(places[split]).write_text("The <unk> sat .\nHe 's ill .\n", encoding="utf-8")
    found = read(places, tokens="auto")
    assert found.settings["tokens"] == "spaces"
    told = capsys.readouterr().err
    assert f"the {split} text has <unk>" in told
    assert "if it is there by chance, give --tokens nltk" in told
    if split == "train":
        assert texts_of(found)["train"] == "The <unk> sat . <eos> He 's ill . <eos>"
        assert "< unk >" in texts_of(read(places, tokens="nltk", name="asked-for"))["train"]


def test_the_mark_of_unknown_words_inside_of_a_word_is_no_mark(places: dict[str, str]) -> None:
    Path(places["train"]).write_text(TEXTS["train"] + "\n\nSee foo<unk>bar.", encoding="utf-8")
    assert read(places, tokens="auto").settings["tokens"] == "nltk"


def test_pieces_change_nothing_where_lines_are_sentences(places: dict[str, str]) -> None:
    """Blank pieces stay, and so does a byte order mark that is not at the beginning of the file."""
    Path(places["train"]).write_text("a\n\n\n\n\ufeffb\n", encoding="utf-8")
    assert texts_of(read(places, tokens="spaces", part=2))["train"] == "a <eos> <eos> <eos> <eos> \ufeffb <eos>"


def test_rare_words_are_unknown(places: dict[str, str]) -> None:
    found = texts_of(read(places, minimum=2))
    assert found["train"] == "the cat <unk> . <eos> <unk> ran . <eos> the cat ran . <eos>"


@pytest.mark.parametrize(
    ("by_lines", "expected"),
    [
        (True, [b"one two\nthree four\n", b"\nfive\n \nsix seven eight\n"]),
        (False, [b"one two\nthree four\n\n", b"five\n \nsix seven eight\n\n", b"no end\n" * 23]),
    ],
)
def test_pieces_end_with_a_paragraph_or_line(by_lines: bool, expected: list[bytes]) -> None:
    """A piece of a long text without paragraphs ends with a line."""
    text = b"one two\nthree four\n\nfive\n \nsix seven eight\n\n" + b"no end\n" * 40 + b"the last"
    firsts, parts, ended = zip(*cut(io.BytesIO(text), Path("text"), by_lines, part=10), strict=True)
    assert all(ended)
    assert list(parts[: len(expected)]) == expected
    assert b"".join(parts) == text
    assert list(firsts) == [1 + b"".join(parts[:number]).count(b"\n") for number in range(len(parts))]


def test_a_line_longer_than_a_piece_may_be_is_cut_at_a_space(places: dict[str, str]) -> None:
    """Corpora such as text8 are one line of a hundred megabytes. Its pieces have no sentence ends between them."""
    text = b"head\n" + b"eins zwei drei " * 30 + b"\nlast"
    pieces = list(cut(io.BytesIO(text), Path("text"), True, part=4))
    assert b"".join(piece.content for piece in pieces) == text
    assert max(len(piece.content) for piece in pieces) <= 2 * 64
    assert [piece.first for piece in pieces] == [1 + text[:at].count(b"\n") for at in starts(pieces)]
    assert not all(piece.ended for piece in pieces)
    Path(places["train"]).write_bytes(text)
    whole = texts_of(read(places, tokens="spaces", name="whole"))
    assert texts_of(read(places, tokens="spaces", name="pieces", part=4)) == whole
    with pytest.raises(LabError, match=r"text, line 2 has \d+ bytes without a space: it is no text; take it out"):
        list(cut(io.BytesIO(b"a\n" + b"b" * 500), Path("text"), True, part=4))


def starts(pieces: list[Piece]) -> list[int]:
    """Return where the pieces begin in their text."""
    return [sum(len(piece.content) for piece in pieces[:number]) for number in range(len(pieces))]


def test_a_minimum_above_every_count_is_refused(places: dict[str, str]) -> None:
    with pytest.raises(LabError, match=r"no word occurs 100 times in the training text, so all would become <unk>"):
        read(places, minimum=100)
    assert not list(Path(places["train"]).parent.glob("cache/corpora/texts*"))


def test_names_that_are_not_utf8(places: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Such names are texts in which a byte is half of a surrogate pair."""
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    write(folder, {os.fsdecode(b"\xff.txt"): TEXTS["train"]})
    (tmp_path / "texts.tar").write_bytes(tarred(folder))
    command = ["data", "prepare", "texts", "--minimum", "1", "--processes", "1"]
    for number, train in enumerate((folder, tmp_path / "texts.tar")):
        given = [word for split, place in {**places, "train": train}.items() for word in (f"--{split}", str(place))]
        assert main([*command, *given, "--name", f"mine-{number}"]) == 0
        assert texts_of(load_corpus(f"mine-{number}")) == EXPECTED
    assert load_corpus("mine-0").manifest["notes"]["places"]["train"] == str(folder)
    write(folder, {os.fsdecode(b"\xff.txt"): b"\xff"})
    given = [word for split, place in {**places, "train": folder}.items() for word in (f"--{split}", str(place))]
    capsys.readouterr()
    assert main([*command, *given]) == 1
    assert r"caf\xe9/\xff.txt is not a text in UTF-8" in capsys.readouterr().err
    assert main(["data", "show", str(folder)]) == 1
    assert r"caf\xe9 is not a prepared corpus" in capsys.readouterr().err


def tarred(folder: Path) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        archive.add(folder, "texts")
    return buffer.getvalue()


def test_a_text_in_pieces_is_the_text(places: dict[str, str]) -> None:
    Path(places["train"]).write_text("\n\n".join([TEXTS["train"]] * 50))
    whole = texts_of(read(places, name="whole"))
    assert texts_of(read(places, name="pieces", part=64)) == whole


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"caf\xe9", r"valid is not a text in UTF-8 \(.*0xe9.*\): convert it"),
        (b"\xef\xbb\xbf\ncaf\xe9", r"valid is not a text in UTF-8 \(line 2: byte 0xe9, "),
        (b"\n" * 3 + b"caf\xe9", r"valid is not a text in UTF-8 \(line 4: byte 0xe9, "),
        (b"a\nb\0", r"valid is not a text in UTF-8 \(line 2: a zero byte\): convert it"),
        (b" \n", "valid has no words: name a text, .* with --valid"),
        ("\u00a0\n".encode(), "valid has no words: name a text, .* with --valid"),
        (TEXTS["test"].encode(), "--valid and --test name the same text"),
    ],
)
@pytest.mark.parametrize("tokens", TOKENS)
def test_what_is_no_text_is_named(places: dict[str, str], content: bytes, message: str, tokens: str) -> None:
    """Lines are counted from the beginning of the file, not of the piece."""
    Path(places["valid"]).write_bytes(content)
    with pytest.raises(LabError, match=message):
        read(places, tokens=tokens, part=2)
    assert not list(Path(places["valid"]).parent.glob("cache/corpora/texts*"))


def test_folders_without_texts_are_not_called_the_same_text(places: dict[str, str], tmp_path: Path) -> None:
    write(tmp_path, {"one/notes.md": "", "other/notes.md": ""})
    with pytest.raises(LabError, match=r"one has no words: .* with --valid"):
        plan(Options(places["train"], str(tmp_path / "one"), str(tmp_path / "other")))


def with_password(archive: bytes) -> bytes:
    """Set the flag of encryption in both headers of a zip's first file."""
    content = bytearray(archive)
    for head, flags in ((b"PK\3\4", 6), (b"PK\1\2", 8)):
        content[content.index(head) + flags] |= 1
    return bytes(content)


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("pipe", "pipe is a pipe or a device, .*: name a file with --train"),  # is empty at the second reading
        ("texts.zip", r"texts\.zip cannot be read .*encrypted.*: replace it"),
        ("nowhere", "nowhere is not there"),
        ("text.xz", r"text\.xz cannot be read .*replace it"),
    ],
)
def test_a_place_that_cannot_be_read_is_named(places: dict[str, str], tmp_path: Path, place: str, message: str) -> None:
    os.mkfifo(tmp_path / "pipe")
    damaged = lzma.compress(b"The cat sat. " * 1000)[:-20]
    write(tmp_path, {"texts.zip": with_password(zipped({"a.txt": "The cat sat."})), "text.xz": damaged})
    with pytest.raises(LabError, match=message):
        plan(Options(**{**places, "train": str(tmp_path / place)}))
