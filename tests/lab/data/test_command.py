"""`hebbian data` as a user types it."""

import re
from pathlib import Path

import pytest

from hebbian_softmax.lab.cli import main
from hebbian_softmax.lab.data.command import summary
from hebbian_softmax.lab.data.corpus import SPLITS
from hebbian_softmax.lab.data.prepare import prepare
from hebbian_softmax.lab.data.registry import load_corpus
from hebbian_softmax.lab.data.wikitext import Official, plan
from tests import ROOT
from tests.lab.data.english import write

TRAIN = " the cat <unk> \n" + " word" * 20_000 + " \n"


@pytest.fixture(autouse=True)
def root(tmp_path: Path) -> Path:
    return write(tmp_path, {"train": TRAIN, "valid": " the cat \n", "test": " the" * 30 + " <unk> \n"})


def prepare_texts(root: Path, *options: str) -> int:
    places = [word for split in SPLITS for word in (f"--{split}", str(root / split))]
    fixed = ["--tokens", "spaces", "--minimum", "1", "--processes", "1"]
    return main(["data", "prepare", "texts", *places, *fixed, *options])


def test_prepare_list_show(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "list"]) == 0
    assert "none yet" in capsys.readouterr().out
    assert main(["data", "show", "wikitext-2"]) == 1
    assert "not prepared yet" in capsys.readouterr().err

    assert prepare_texts(root, "--name", "mine") == 0
    shown = capsys.readouterr()
    assert "mine: " in shown.out
    assert "20,005 tokens, 0.00% <unk>" in shown.out
    assert "32 tokens, 3.12% <unk>" in shown.out
    assert "vocabulary 5 words" in shown.out
    assert ">10K             1 words,  99.98% of training tokens" in shown.out
    assert "texts: 3 parts" in shown.err
    assert summary(load_corpus("mine"), chunk=20) + "\n" == shown.out

    assert prepare_texts(root, "--name", "mine") == 0
    again = capsys.readouterr()
    assert again.out == shown.out
    assert "was prepared before; delete" in again.err

    assert main(["data", "list"]) == 0
    listed = capsys.readouterr().out
    assert "any text: your own files, folders or archives" in listed
    assert "20,005 / 3 / 32 tokens, 5 words" in listed
    assert main(["data", "show", "mine", "--verify"]) == 0
    assert capsys.readouterr().out.startswith(shown.out)
    (root / "train").write_text("another text")
    assert prepare_texts(root, "--name", "mine") == 1
    assert "was prepared with other settings (train)" in capsys.readouterr().err


def test_words_of_a_corpus_cannot_move_the_cursor(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root / "train").write_text("\x1b[2J\x1b]0;x\x07 \x9b5n " * 30 + "\n")
    assert prepare_texts(root, "--name", "mine", "--quiet") == 0
    shown = capsys.readouterr().out
    assert all(line.isprintable() for line in shown.splitlines())
    assert r"most frequent: \x1b[2J\x1b]0;x\x07 \x9b5n" in shown


def test_a_changed_byte_is_found(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prepare_texts(root, "--name", "mine", "--quiet")
    path = root / "cache" / "corpora" / "mine" / "ids.bin"
    content = bytearray(path.read_bytes())
    content[100] ^= 1
    path.write_bytes(content)
    assert main(["data", "show", str(path.parent)]) == 0
    assert main(["data", "show", str(path.parent), "--verify"]) == 1
    assert "ids.bin is damaged" in capsys.readouterr().err
    path.write_bytes(b"")
    assert main(["data", "list"]) == 0  # one damaged corpus does not hide the others
    assert "ids.bin is damaged" in capsys.readouterr().out


def test_the_code_of_the_page_runs(root: Path) -> None:
    """The page opens wikitext-2; a tiny corpus stands in for it here."""
    write(root / "data" / "wikitext-2", {f"wiki.{split}.tokens": (root / split).read_bytes() for split in SPLITS})
    prepare(plan(Official("wikitext-2", (20_005, 3, 32), 5)), processes=1, quiet=True)
    page = ROOT / "docs" / "corpora.md"
    (block,) = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    exec(compile(block, str(page), "exec"), {})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["wikitext-2", "--name", "../up"], "must be letters"),
        *(
            (["wikitext-2", "--name", name], "name no other corpus or experiment")
            for name in ("stdlib", "texts", "corpus", "zipf", "glyphs")
        ),
        (["reuters", "--train", "1987"], "must be two dates"),
        (["dated", "--file", "x.jsonl"], "required"),
        (["gigaword", "--eval-articles", "-1"], "whole number from 0"),
        (["nothing"], "invalid choice"),
    ],
)
def test_wrong_options(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["data", "prepare", *arguments])
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ["data", "show", "nothing"],
        ["data", "prepare", "reuters"],
        ["data", "prepare", "gutenberg", "--books", "nowhere"],
        ["data", "prepare", "gigaword"],
        ["data", "prepare", "reuters", "--train", "1987-02-01..1987-12-31"],
    ],
)
def test_errors_are_one_line(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 1
    error = capsys.readouterr().err
    assert error.startswith("hebbian: error: ")
    assert error.count("\n") == 1
