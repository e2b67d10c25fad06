"""The example of a language model: its words, the choice of a cache, and the program."""

import zipfile
from pathlib import Path

import pytest
import torch
from examples.language_model import LanguageModel, alone, chosen, features_of, main, numbered, read

from hebbian_softmax.memory import mix


def test_words_seen_once_are_unknown() -> None:
    corpus = numbered((["a", "b", "a", "c", "b", "a"], ["c", "b"], ["d", "a"]))
    assert corpus.vocabulary == ["<unk>", "a", "b"]
    assert corpus.counts.tolist() == [1, 3, 2]
    assert corpus.train.tolist() == [1, 2, 1, 0, 2, 1]
    assert (corpus.validation.tolist(), corpus.test.tolist()) == ([0, 2], [0, 1])


def test_a_text_is_cut_into_three(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "text.txt"
    path.write_text(" ".join(map(str, range(5000))))
    train, validation, test = read(path, 2000)
    assert train + validation + test == [str(number) for number in range(2500)]
    assert (len(train), len(validation)) == (2000, 250)
    path.write_text("too short")
    with pytest.raises(SystemExit, match="at least 1,000"):
        read(path, 2000)
    with pytest.raises(SystemExit, match="give another file"):
        read(tmp_path / "missing.txt", 2000)
    monkeypatch.setenv("HEBBIAN_DATA", str(tmp_path))
    assert "statement" in read(None, 2000)[0]  # of Python's own help
    (tmp_path / "wikitext-2").mkdir()
    with zipfile.ZipFile(tmp_path / "wikitext-2" / "wikitext-2-v1.zip", "w") as archive:
        for split in ("train", "valid", "test"):
            archive.writestr(f"wikitext-2/wiki.{split}.tokens", f"{split} of\nlines\n" * 20)
    assert read(None, 20)[0][:5] == ["train", "of", "<eos>", "lines", "<eos>"]
    assert [len(text) for text in read(None, 20)] == [20, 2, 2]
    (tmp_path / "wikitext-2" / "wikitext-2-v1.zip").write_text("damaged")
    with pytest.raises(SystemExit, match="get it anew"):
        read(None, 20)


def test_the_chosen_cache_is_the_best_of_the_grid() -> None:
    torch.manual_seed(0)
    model = LanguageModel(20, 8, memorizing=True).eval()
    text = torch.randint(20, (30,)).repeat(10)  # repeats itself, so that a cache is of use
    h, words = features_of(model, text, length=37)
    assert h.shape == (299, 8)
    own = alone(model, h, words)
    torch.testing.assert_close(own, model.head(h).log_softmax(1).gather(1, words.unsqueeze(1)).squeeze(1))
    theta, size, share = chosen(own, h, words)
    assert size in (100, 500, 2000)
    assert share == 0.5  # the largest of the grid
    from hebbian_softmax import NeuralCache

    mixed = mix(own, cache=NeuralCache(size, theta).sequence_log_prob(h, words), cache_weight=share)
    assert mixed.mean() > own.mean()


@pytest.mark.parametrize("options", [[], ["--plain"]])
def test_the_program_prints_perplexities(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str]
) -> None:
    path = tmp_path / "text.txt"
    path.write_text("the cat sat on the mat , and the dog ran to the tree . " * 300)
    main([str(path), "--quick", *options])
    *shown, note = capsys.readouterr().out.splitlines()
    assert note.startswith("This was a quick run")
    rows = {line[:30].strip(): line[30:].split() for line in shown[-3:]}
    assert list(rows) == ["model alone", "model with the cache", "words of the test text"]
    assert float(rows["model with the cache"][0]) < float(rows["model alone"][0])
    assert rows["words of the test text"][1] == "0"
