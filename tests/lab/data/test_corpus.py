"""A corpus folder is whole or absent, damage to it is found, and reading gives what was written."""

import hashlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hebbian_softmax.lab.base.errors import LabError
from hebbian_softmax.lab.data.corpus import SPLITS, Corpus, corpora_root, open_corpus, write_corpus
from hebbian_softmax.lab.data.registry import load_corpus
from tests.lab.base.test_files import file_size_limit, names
from tests.lab.editing import edited

WORDS = ["the", "<eos>", "tab\tin it", "naïve"]


def splits(*ids: list[int]) -> dict[str, Any]:
    return {split: np.array(numbers) for split, numbers in zip(SPLITS, ids, strict=False)}


def write(folder: Path, **changes: Any) -> Corpus:
    arguments: dict[str, Any] = {
        "splits": {
            "train": iter([np.array([0, 1]), np.array([], np.int64), np.array([0, 2, 3])]),
            "valid": torch.tensor([3, 1]),
            "test": np.array([1], np.uint16),
        },
        "words": WORDS,
        "counts": [2, 1, 1, 1],
        "settings": {"minimum": 1},
        "sources": [{"name": "a.txt", "bytes": 3, "sha256": "00"}],
        "arrays": {"first_seen": np.array([5, 6, 7, 8], np.int32), "starts": np.array([], np.int64)},
    }
    return write_corpus(folder, "toy", **(arguments | changes))


def test_what_is_written_is_read(tmp_path: Path) -> None:
    write(tmp_path / "toy")
    found = open_corpus(tmp_path / "toy", verify=True)
    assert (found.name, found.path, found.words) == ("toy", tmp_path / "toy", WORDS)
    assert found.counts.tolist() == [2, 1, 1, 1]
    assert found.counts.dtype == torch.int64
    read = {split: ids.tolist() for split, ids in found.splits.items()}
    assert read == {"train": [0, 1, 0, 2, 3], "valid": [3, 1], "test": [1]}
    assert all(ids.dtype == torch.int32 for ids in found.splits.values())
    assert found.arrays["first_seen"].tolist() == [5, 6, 7, 8]
    assert found.arrays["starts"].tolist() == []
    assert found.settings == {"minimum": 1}
    assert names(tmp_path) == {"toy"}


def test_writing_to_a_split_does_not_reach_the_file(tmp_path: Path) -> None:
    write(tmp_path / "toy").splits["train"].zero_()
    assert open_corpus(tmp_path / "toy", verify=True).splits["train"].tolist() == [0, 1, 0, 2, 3]


def test_the_fingerprint_names_ids_vocabulary_and_settings(tmp_path: Path) -> None:
    first = write(tmp_path / "a").fingerprint
    assert write(tmp_path / "b").fingerprint == first  # the place does not matter
    others = [
        {"settings": {"minimum": 2}},
        {"words": ["the", "<eos>", "tab", "naïve"]},
        {"counts": [2, 1, 1, 0]},
        {"splits": splits([0], [1], [2])},
        {"splits": splits([0, 1, 0, 2, 3, 3], [1], [1])},
    ]
    found = {write(tmp_path / "c", **change).fingerprint for change in others}
    assert len(found | {first}) == 1 + len(others)


@pytest.mark.parametrize("file", ["ids.bin", "vocabulary.tsv", "first_seen.bin", "manifest.json"])
@pytest.mark.parametrize("damage", ["cut", "gone", "flipped"])
def test_a_damaged_file_is_named(tmp_path: Path, file: str, damage: str) -> None:
    write(tmp_path / "toy")
    path = tmp_path / "toy" / file
    content = path.read_bytes()
    if damage == "gone":
        path.unlink()
    elif damage == "cut":
        path.write_bytes(content[:-2])
    else:
        path.write_bytes(bytes([content[0] ^ 1]) + content[1:])
    with pytest.raises(LabError, match=file.replace(".", r"\.")):
        open_corpus(tmp_path / "toy", verify=True)
    if damage != "flipped" or file == "vocabulary.tsv":
        with pytest.raises(LabError, match=file.replace(".", r"\.")):
            open_corpus(tmp_path / "toy")


@pytest.mark.parametrize(
    "change",
    [{"vocabulary": 3}, {"splits": {}}, {"files": {}}, {"arrays": {"x": "int8"}}, {"sources": [{"name": "a.txt"}]},
     {"format": 99}],
)  # fmt: skip
def test_a_manifest_that_does_not_fit_is_named(tmp_path: Path, change: dict[str, Any]) -> None:
    write(tmp_path / "toy")
    path = tmp_path / "toy" / "manifest.json"
    with edited(path) as manifest:
        manifest.update(change)
    with pytest.raises(LabError, match="has corpus format 99" if "format" in change else r"manifest\.json is damaged"):
        open_corpus(tmp_path / "toy")


@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("by", [-1, 1, None])
def test_splits_follow_each_other(tmp_path: Path, split: str, by: int | None, verify: bool) -> None:
    """A test split that was moved onto the training text would give good scores."""
    write(tmp_path / "toy")
    with edited(tmp_path / "toy" / "manifest.json") as manifest:
        span = manifest["splits"][split]
        span["start"] = str(span["start"]) if by is None else span["start"] + by
    with pytest.raises(LabError, match=r"manifest\.json is damaged .*split does not begin where"):
        open_corpus(tmp_path / "toy", verify)


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "a/b", "..", ""])
def test_files_outside_the_folder_are_not_read(tmp_path: Path, name: str) -> None:
    write(tmp_path / "toy")
    (tmp_path / "secret").write_bytes(b"x")
    with edited(tmp_path / "toy" / "manifest.json") as manifest:
        manifest["files"][name] = {"bytes": 1, "sha256": hashlib.sha256(b"x").hexdigest()}
    with pytest.raises(LabError, match=r"is not a file in its folder"):
        open_corpus(tmp_path / "toy")


@pytest.mark.parametrize("content", ["[]", "7", "{", "[" * 100_000, '{"format": 1}', '{"format": []}'])
def test_a_manifest_of_another_kind_is_one_clear_line(tmp_path: Path, content: str) -> None:
    write(tmp_path / "toy")
    (tmp_path / "toy" / "manifest.json").write_text(content)
    with pytest.raises(LabError, match=r"prepare ") as caught:
        open_corpus(tmp_path / "toy")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("entry", ["name", "settings", "sources", "notes", "vocabulary", "splits", "arrays", "files"])
@pytest.mark.parametrize("value", [None, 7.5, "text", [[]], {"a": {}}])
def test_an_entry_of_another_kind_is_one_clear_line(tmp_path: Path, entry: str, value: object) -> None:
    write(tmp_path / "toy")
    with edited(tmp_path / "toy" / "manifest.json") as manifest:
        manifest[entry] = value
    if (entry, type(value)) not in (("name", str), ("settings", dict), ("notes", dict)):
        with pytest.raises(LabError, match=r"manifest\.json is damaged .*prepare the corpus again"):
            open_corpus(tmp_path / "toy")


def test_no_corpus_at_all(tmp_path: Path) -> None:
    with pytest.raises(LabError, match="has no manifest"):
        open_corpus(tmp_path)
    with pytest.raises(LabError, match="is not a folder"):
        open_corpus(tmp_path / "nothing")


@pytest.mark.parametrize("split", SPLITS)
def test_an_empty_split_is_refused_and_nothing_is_left(tmp_path: Path, split: str) -> None:
    with pytest.raises(LabError, match=f"the {split} split of toy is empty"):
        write(tmp_path / "toy", splits=splits([0], [0], [0]) | {split: np.array([], np.int32)})
    assert names(tmp_path) == set()


@pytest.mark.parametrize(
    "change",
    [
        {"splits": splits([0], [0])},
        {"splits": splits([4], [0], [0])},
        {"splits": splits([-1], [0], [0])},
        {"words": ["a", "b", "c", "c"]},
        {"words": ["a", "b", "c", ""]},
        {"words": ["a", "b", "c", "d\n"]},
        {"counts": [1, 2, 3]},
        {"arrays": {"x": np.zeros(3, np.float32)}},
    ],
)
def test_wrong_arguments_write_nothing(tmp_path: Path, change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must"):
        write(tmp_path / "toy", **change)
    assert names(tmp_path) == set()


def test_a_killed_run_leaves_nothing_that_looks_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stream() -> Iterator[Any]:
        yield np.array([0, 1])
        raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "rmtree", lambda *arguments, **options: None)  # a killed process does not clean up
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "toy", splits=splits([0], [0], [0]) | {"train": stream()})
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(".")
    with pytest.raises(LabError, match="not a prepared corpus"):
        open_corpus(left)
    with pytest.raises(LabError, match="not a folder"):
        open_corpus(tmp_path / "toy")


def test_a_full_disk_keeps_the_old_corpus(tmp_path: Path) -> None:
    write(tmp_path / "toy")
    with file_size_limit(50_000), pytest.raises(LabError, match=r"cannot write .*toy .*HEBBIAN_CACHE"):
        write(tmp_path / "toy", splits=splits([0] * 100_000, [0], [0]))
    assert names(tmp_path) == {"toy"}
    open_corpus(tmp_path / "toy", verify=True)


def test_a_file_where_the_folder_should_be(tmp_path: Path) -> None:
    (tmp_path / "corpora").write_bytes(b"")
    with pytest.raises(LabError, match=r"cannot write .*HEBBIAN_CACHE"):
        write(tmp_path / "corpora" / "toy")


def test_by_name_or_folder() -> None:
    made = write(corpora_root() / "mine")
    assert load_corpus("mine").fingerprint == made.fingerprint
    assert load_corpus(str(made.path)).fingerprint == made.fingerprint
    with pytest.raises(LabError, match=r"'other' is no corpus: name one of .*stdlib, mine"):
        load_corpus("other")
