"""The example of new tokens: which words it takes, what it measures, and the program."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed: pip install -e '.[dev]'")

from examples.new_tokens import load, main, measured, read, split_words, trained_tokenizer

pytestmark = pytest.mark.filterwarnings("default")


class Letters:
    """A tokenizer that splits words at their letters, but for some."""

    def __init__(self, *whole: str) -> None:
        self.whole = whole

    def __call__(self, text: str, **_: Any) -> Any:
        return SimpleNamespace(input_ids=[0] if text in self.whole else [ord(letter) for letter in text])


def test_words_that_others_begin_with_are_left_out() -> None:
    text = " when when when state statement state whole whole of a zebra"
    assert split_words(Letters(" when"), text, 10) == [" whole", " statement", " zebra"]
    assert split_words(Letters(), text, 2) == [" when", " whole"]


def test_bits_are_those_of_a_model_that_knows_nothing() -> None:
    def uniform(input_ids: torch.Tensor) -> Any:
        return SimpleNamespace(logits=torch.zeros(*input_ids.shape, 256))

    bits, nats = measured(uniform, Letters(), "abcdefghijklmnop", ord("o"), length=5)
    assert bits == pytest.approx(8 * 15 / 16)  # the first letter has nothing before it
    assert nats == pytest.approx(math.log(256))


def test_the_tokenizer_knows_every_byte_and_some_parts() -> None:
    tokenizer = trained_tokenizer("the cat and the cat " * 20, 270)
    assert tokenizer.decode(tokenizer("œ the cat").input_ids) == "œ the cat"
    assert len(tokenizer(" cat").input_ids) == 1


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="give another --text"):
        read(tmp_path / "missing.txt", 10)
    with pytest.raises(SystemExit, match="does not exist"):
        load(tmp_path / "missing.gguf")
    with pytest.raises(SystemExit, match="cannot load"):
        load(tmp_path)
    assert len(read(None, 1000)) == 1000
    (tmp_path / "short.txt").write_text("too short")
    with pytest.raises(SystemExit, match="at least 2,000"):
        main(["--text", str(tmp_path / "short.txt")])


def test_the_program_adds_tokens_and_compares_them(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--quick"])
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].startswith("10 new tokens, among them ' ")
    rows = {line[:30].strip(): line[30:].split() for line in shown[-4:-1]}
    assert shown[-1].startswith("This was a quick run")
    assert list(rows) == ["before, words split", "mean rows, of transformers", "rows that add_tokens wrote"]
    reported = next(line for line in shown if line.startswith("held-out text: "))
    assert float(rows["before, words split"][0]) == pytest.approx(float(reported.split()[2]), abs=0.002)
    assert float(rows["rows that add_tokens wrote"][0]) == pytest.approx(float(reported.split()[-2]), abs=0.002)


@pytest.mark.slow  # the test above guards the rest
def test_a_checkpoint_of_yours_is_loaded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from examples.new_tokens import trained_model

    text = read(None, 20_000)
    tokenizer = trained_tokenizer(text, 400)
    tokenizer.save_pretrained(tmp_path / "model")
    trained_model(tokenizer, text, steps=2, length=16).save_pretrained(tmp_path / "model")
    (tmp_path / "text.txt").write_text(text)
    main(["--model", str(tmp_path / "model"), "--text", str(tmp_path / "text.txt"), "--quick"])
    assert "rows that add_tokens wrote" in capsys.readouterr().out
