"""From tokens to ids: words are numbered as they come, and numbered again by frequency at the end.

Each piece of work (a book, a month of news) numbers its own words. The parent process joins the pieces in order, gives
each new word the next provisional number and appends the ids to one file for each split. Once all training words are
counted, the vocabulary is chosen, and the files are read again to give every word its final id.
"""

from array import array
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from hebbian_softmax.lab.data.corpus import SPLITS, UNK

CHUNK = 1 << 22  # ids renumbered at a time
NEVER = 0  # the day of a word that does not occur in training


class Encoded:
    """The documents of one piece of work as ids, and the words that the ids stand for in order of first occurrence."""

    def __init__(self, *documents: Iterable[str]) -> None:
        """Begin with documents that have no date."""
        self.numbers: dict[str, int] = {}  # the id of each word
        self._latest = NEVER
        self.ids = array("i")
        self.starts: list[int] = []  # where each document begins
        self.days: list[int] = []  # the date of each document as `datetime.date.toordinal`, NEVER if it has none
        self.first_days: list[int] = []  # for each word, the first day of a document that has it
        for tokens in documents:
            self.add(tokens)

    def add(self, tokens: Iterable[str], day: int = NEVER) -> None:
        """Append a document."""
        numbers = self.numbers
        ids = [numbers.setdefault(token, len(numbers)) for token in tokens]
        self.first_days += [day] * (len(numbers) - len(self.first_days))
        if day < self._latest:  # documents are not in chronological order
            for number in set(ids):
                self.first_days[number] = min(self.first_days[number], day)
        self._latest = max(self._latest, day)
        self.starts.append(len(self.ids))
        self.days.append(day)
        self.ids.extend(ids)


class Gathered:
    """All documents of a corpus as provisional ids, in one file of `folder` for each split."""

    def __init__(self, folder: Path) -> None:
        import numpy as np

        self.folder = folder
        self.tokens = dict.fromkeys(SPLITS, 0)
        self._numbers: dict[str, int] = {}
        self._counts = np.zeros(0, np.int64)
        self._first_days = np.zeros(0, np.int32)
        self._starts: dict[str, list[Any]] = {split: [] for split in SPLITS}
        self._days: dict[str, list[Any]] = {split: [] for split in SPLITS}
        self._files: dict[str, IO[bytes]] = {}

    def add(self, split: str, encoded: Encoded) -> None:
        """Append the documents of one piece of work."""
        import numpy as np

        numbers, words = self._numbers, encoded.numbers
        table = np.array([numbers.setdefault(word, len(numbers)) for word in words], np.int32)
        if (more := len(numbers) - len(self._counts)) > 0:
            # The arrays grow in large steps: copying them for each piece would take longer than all the rest.
            more = max(more, len(self._counts) // 2)
            self._counts = np.concatenate([self._counts, np.zeros(more, np.int64)])
            self._first_days = np.concatenate([self._first_days, np.zeros(more, np.int32)])
        local = np.frombuffer(encoded.ids, np.int32)
        if split == "train" and len(words):
            self._counts[table] += np.bincount(local, minlength=len(words))
            known, new = self._first_days[table], np.array(encoded.first_days, np.int32)
            self._first_days[table] = np.where(known == NEVER, new, np.minimum(known, new))
        if split not in self._files:
            self._files[split] = open(self.folder / split, "wb")  # noqa: SIM115
        self._files[split].write(table[local].tobytes() if len(words) else b"")
        self._starts[split].append(np.array(encoded.starts, np.int64) + self.tokens[split])
        self._days[split].append(np.array(encoded.days, np.int32))
        self.tokens[split] += len(local)

    def close(self) -> None:
        """Close the files, after the last document."""
        for file in self._files.values():
            file.close()

    def choose(self, minimum: int, size: int | None) -> "Vocabulary":
        """Choose the words that occur at least `minimum` times in training, and of these the `size` most frequent.

        They are sorted by frequency, then by string. `<unk>` stands for all other words and has the sum of their
        counts. It is sorted like any word and counts towards `size`; it is left out if it would stand for nothing.
        """
        import numpy as np

        self.close()
        names = list(self._numbers)
        counts = self._counts[: len(names)]
        others = [number for number, name in enumerate(names) if name != UNK]
        seen = [number for number in others if counts[number] >= max(1, minimum)]
        seen.sort(key=lambda number: (-int(counts[number]), names[number]))
        if size is not None and len(seen) + (len(seen) < len(names)) > size:
            del seen[size - 1 :]
        kept = {names[number]: int(counts[number]) for number in seen}
        if len(kept) < len(names):
            kept[UNK] = int(counts.sum()) - sum(kept.values())
        words = sorted(kept, key=lambda word: (-kept[word], word))
        final = {word: index for index, word in enumerate(words)}
        table = np.array([final.get(name, final.get(UNK, -1)) for name in names], np.int32)
        first_days = np.full(len(words), np.iinfo(np.int32).max, np.int32)
        in_training = counts > 0
        np.minimum.at(first_days, table[in_training], self._first_days[: len(names)][in_training])
        first_days[first_days == np.iinfo(np.int32).max] = NEVER
        return Vocabulary(self, words, [kept[word] for word in words], table, first_days)

    def documents(self) -> dict[str, int]:
        """Return the number of documents in each split."""
        return {split: sum(map(len, starts)) for split, starts in self._starts.items()}

    def arrays(self) -> dict[str, Any]:
        """Return, for each split, the positions where documents begin, and their days."""
        import numpy as np

        found = {}
        for split in SPLITS:
            found[f"{split}_starts"] = np.concatenate([np.zeros(0, np.int64), *self._starts[split]])
            found[f"{split}_days"] = np.concatenate([np.zeros(0, np.int32), *self._days[split]])
        return found


@dataclass(frozen=True)
class Vocabulary:
    """The chosen words, and a table from provisional numbers to final ids."""

    gathered: Gathered
    words: list[str]
    counts: list[int]
    table: Any
    first_days: Any  # for each word, the day of its first occurrence in training

    def splits(self) -> Mapping[str, Iterator[Any]]:
        """Return iterators over arrays of the final ids of each split."""
        return {split: self._renumbered(self.gathered.folder / split) for split in SPLITS}

    def _renumbered(self, path: Path) -> Iterator[Any]:
        import numpy as np

        if path.exists():
            with open(path, "rb") as file:
                while len(ids := np.fromfile(file, np.int32, CHUNK)):
                    yield self.table[ids]
