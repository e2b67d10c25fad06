"""The standard library's source as tokens."""

import platform
import re
import sysconfig
from pathlib import Path

import pytest

from hebbian_softmax.lab.base.errors import LabError
from hebbian_softmax.lab.data import stdlib
from hebbian_softmax.lab.data.prepare import prepare
from hebbian_softmax.lab.data.registry import load_corpus
from hebbian_softmax.lab.data.stdlib import code_tokens, split_of
from tests.lab.data.english import write


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("get_nameList = HTTPServer2", "get _ name List = HTTP Server 2 <eos>"),
        ("__init__(x)\n", "__ init __ ( x ) <eos>"),
        ("if a:\n    b\n\nc\n", "if a : <eos> <indent> b <eos> <eos> <dedent> c <eos>"),
        ("a  # don't\n", "a # don ' t <eos>"),
        ("'''Doc\n  string.'''\n", "' ' ' Doc <eos> string . ' ' ' <eos>"),
        ("ünïcode = 'ß'", "ünïcode = ' ß ' <eos>"),
        ("x = 1_000.5e3", "x = 1 _ 000 . 5 e 3 <eos>"),
    ],
)
def test_names_are_split_and_lines_end(code: str, expected: str) -> None:
    assert " ".join(code_tokens(code.encode())) == expected


def test_nothing_but_space_is_lost() -> None:
    code = Path(stdlib.__file__).read_text(encoding="utf-8")
    found = list(code_tokens(code.encode()))
    kept = "".join(token for token in found if token not in ("<eos>", "<indent>", "<dedent>"))
    assert kept == re.sub(r"\s+", "", code)
    assert found.count("<eos>") == code.count("\n")


def test_splits_are_by_name_and_about_a_sixteenth() -> None:
    found = [split_of(f"module_{number}.py") for number in range(4000)]
    assert split_of("module_7.py") == found[7]
    for split in ("valid", "test"):
        assert 170 < found.count(split) < 330


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A library of a few modules, some of which must be left out."""
    left_out = ("test/bad.py", "site-packages/other.py", "config-3.11/built.py", "_sysconfigdata_linux.py")
    modules = {f"package{number % 3}/m{number}.py": f"common = {number}\n" * 2 for number in range(60)}
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path / "lib"))
    return write(tmp_path / "lib", modules | dict.fromkeys(left_out, "secret = ("))


def test_a_library(library: Path) -> None:
    corpus = load_corpus("stdlib", quiet=True)
    assert corpus.name == f"stdlib-{platform.python_version()}"
    assert corpus.settings["python"] == platform.python_version()
    assert sum(corpus.manifest["notes"]["modules"].values()) == 60
    assert sorted(corpus.words) == ["<eos>", "<unk>", "=", "common"]
    assert load_corpus("stdlib", quiet=True).fingerprint == corpus.fingerprint


@pytest.mark.parametrize("content", [b"x = (", b"\xff = 1", b"  a\n b\n"])
def test_a_module_that_is_no_python_is_named(library: Path, content: bytes) -> None:
    (library / "broken.py").write_bytes(content)
    with pytest.raises(LabError, match=r"broken\.py is not Python"):
        prepare(stdlib.plan(), processes=1, quiet=True)


def test_a_python_without_its_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(LabError, match="has no modules"):
        prepare(stdlib.plan(), processes=1, quiet=True)
