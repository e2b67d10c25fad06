"""Ids are ordered by frequency, as in a slow version that counts the words themselves."""

from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hebbian_softmax.lab.data.corpus import SPLITS, UNK
from hebbian_softmax.lab.data.vocabulary import NEVER, Encoded, Gathered, Vocabulary

Documents = list[tuple[str, int, list[str]]]  # split, day, words

words = st.sampled_from(["a", "b", "c", "d", "e", "é", "z", UNK])
documents = st.lists(st.tuples(st.sampled_from(SPLITS), st.integers(1, 9), st.lists(words, max_size=12)), max_size=9)


def literal(
    texts: Documents, minimum: int, size: int | None
) -> tuple[list[str], list[int], dict[str, list[int]], list[int]]:
    counts = Counter(word for split, _, text in texts if split == "train" for word in text)
    every = {word for _, _, text in texts for word in text}
    kept = sorted((word for word in counts if word != UNK and counts[word] >= minimum), key=lambda w: (-counts[w], w))
    if size is not None and len(kept) + (set(kept) != every) > size:
        kept = kept[: size - 1]
    final = Counter({word: counts[word] for word in kept})
    if set(kept) != every:
        final[UNK] = counts.total() - final.total()
    order = sorted(final, key=lambda word: (-final[word], word))

    def stands_for(word: str) -> str:
        return word if word in kept else UNK

    ids = {
        split: [order.index(stands_for(word)) for where, _, text in texts if where == split for word in text]
        for split in SPLITS
    }
    days = [
        min((day for split, day, text in texts if split == "train" and entry in map(stands_for, text)), default=NEVER)
        for entry in order
    ]
    return order, [final[word] for word in order], ids, days


def gather(folder: Path, texts: Documents, together: int) -> Gathered:
    """Gather the documents in pieces of work of `together` documents each."""
    gathered = Gathered(folder)
    for start in range(0, len(texts), together):
        found: dict[str, Encoded] = {}
        for split, day, text in texts[start : start + together]:
            found.setdefault(split, Encoded()).add(text, day)
        for split, encoded in found.items():
            gathered.add(split, encoded)
    return gathered


def ids_of(vocabulary: Vocabulary) -> dict[str, list[int]]:
    empty: Any = np.zeros(0, np.int32)
    return {split: np.concatenate([empty, *chunks]).tolist() for split, chunks in vocabulary.splits().items()}


@given(documents, st.integers(1, 4), st.sampled_from([None, 2, 3, 5]))
def test_as_the_literal_version(texts: Documents, minimum: int, size: int | None) -> None:
    with TemporaryDirectory() as folder:
        vocabulary = gather(Path(folder), texts, 1).choose(minimum, size)
        order, counts, ids, days = literal(texts, minimum, size)
        assert vocabulary.words == order
        assert vocabulary.counts == counts
        assert ids_of(vocabulary) == ids
        assert vocabulary.first_days.tolist() == days


@given(documents, st.integers(2, 9))
def test_it_does_not_matter_how_the_work_is_cut(texts: Documents, together: int) -> None:
    with TemporaryDirectory() as first, TemporaryDirectory() as second:
        alone = gather(Path(first), texts, 1)
        joined = gather(Path(second), texts, together)
        one, other = alone.choose(2, 4), joined.choose(2, 4)
        assert (one.words, one.counts, ids_of(one)) == (other.words, other.counts, ids_of(other))
        assert one.first_days.tolist() == other.first_days.tolist()
        assert alone.tokens == joined.tokens
        assert alone.documents() == joined.documents()
        for name, values in alone.arrays().items():
            assert values.tolist() == joined.arrays()[name].tolist()


def test_documents_keep_their_beginnings_and_days(tmp_path: Path) -> None:
    texts = [("train", 3, ["a", "b"]), ("valid", 4, ["c"]), ("train", 5, []), ("train", 6, ["a"])]
    gathered = gather(tmp_path, texts, 2)
    gathered.close()
    arrays = gathered.arrays()
    assert arrays["train_starts"].tolist() == [0, 2, 2]
    assert arrays["train_days"].tolist() == [3, 5, 6]
    assert arrays["valid_days"].tolist() == [4]
    assert arrays["test_starts"].tolist() == []


def test_memory_grows_with_the_words_not_with_the_work(tmp_path: Path) -> None:
    gathered = Gathered(tmp_path)
    for words in (1000, 1010, *[1010] * 5):  # the second makes the arrays grow by half
        gathered.add("train", Encoded(str(number) for number in range(words)))
    gathered.close()
    assert len(gathered._counts) == 1500


@pytest.mark.parametrize("minimum", [0, 1])
def test_a_word_of_the_test_set_alone_is_never_kept(tmp_path: Path, minimum: int) -> None:
    vocabulary = gather(tmp_path, [("train", 1, ["a"]), ("test", 1, ["b"])], 1).choose(minimum, None)
    assert vocabulary.words == ["a", UNK]
    assert vocabulary.counts == [1, 0]
