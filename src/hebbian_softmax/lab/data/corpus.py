"""A prepared corpus: a folder with the ids of all words in the text, the vocabulary and a manifest.

manifest.json    name, settings, sources with their checksums, token counts, checksums of the files below
ids.bin          all splits one after the other, little-endian int32, memory-mapped when read
vocabulary.tsv   one word a line with its count in training, most frequent first: the line's number is the word's id
*.bin            further arrays, if the corpus has any

The folder gets its name once it is whole, so a folder with a manifest is complete.
"""

import contextlib
import hashlib
import json
import mmap
import os
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hebbian_softmax.lab.base.errors import LabError, reason
from hebbian_softmax.lab.base.files import TEMPORARY, cannot_write, sync_folder
from hebbian_softmax.lab.base.json_files import read_json, write_json
from hebbian_softmax.lab.data.root import cache_root

FORMAT = 1
MANIFEST, IDS, VOCABULARY = "manifest.json", "ids.bin", "vocabulary.tsv"
SPLITS = ("train", "valid", "test")
EOS, UNK = "<eos>", "<unk>"
# The entries that every manifest has, besides the format.
ENTRIES = {"name": str, "settings": dict, "sources": list, "notes": dict, "vocabulary": int} | dict.fromkeys(
    ("splits", "arrays", "files"), dict
)
DTYPES = {"int32": torch.int32, "int64": torch.int64}


@dataclass(frozen=True, eq=False)
class Corpus:
    """A prepared corpus, made by `open_corpus`. Ids are memory-mapped: opening a corpus reads only its vocabulary."""

    name: str
    path: Path
    words: Sequence[str]  # by id: the most frequent in training first, equally frequent ones in the order of strings
    counts: Tensor  # int64 (V,): occurrences in training
    splits: Mapping[str, Tensor]  # by name of the split: int32 (tokens,), for reading only
    fingerprint: str  # other ids, another vocabulary or other settings have another fingerprint
    manifest: Mapping[str, Any]
    arrays: Mapping[str, Tensor] = field(default_factory=dict)  # further arrays, by name

    @property
    def settings(self) -> Mapping[str, Any]:
        settings: Mapping[str, Any] = self.manifest["settings"]
        return settings


def write_corpus(
    folder: Path,
    name: str,
    splits: Mapping[str, Iterable[Any]],
    words: Sequence[str],
    counts: Sequence[int],
    settings: Mapping[str, Any],
    sources: Sequence[Mapping[str, Any]],
    arrays: Mapping[str, Any] | None = None,
    notes: Mapping[str, Any] | None = None,
) -> Corpus:
    """Write the folder of a corpus, whole or not at all, and open it.

    A split is an array of ids or an iterable of such arrays. `settings` and `sources` (name, bytes and sha256 of each
    file) determine the corpus; `notes` are further facts about it for readers of the manifest.
    """
    if set(splits) != set(SPLITS):
        raise ValueError(f"splits must be {', '.join(SPLITS)}, not {', '.join(splits)}")
    if len(words) != len(counts) or len(set(words)) != len(words):
        raise ValueError("words must be distinct and have one count each")
    if any(not word or "\n" in word for word in words):
        raise ValueError("words must not be empty or hold a line break")
    temporary, old = (folder.with_name(f"{TEMPORARY}{kind}-{folder.name}") for kind in (os.getpid(), "old"))
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        try:
            manifest = {
                "format": FORMAT,
                "name": name,
                "settings": dict(settings),
                "sources": [dict(source) for source in sources],
                "notes": dict(notes or {}),
                "vocabulary": len(words),
                "splits": _write_ids(temporary / IDS, name, splits, len(words)),
                "arrays": _write_arrays(temporary, arrays or {}),
            }
            lines = "".join(f"{word}\t{int(count)}\n" for word, count in zip(words, counts, strict=True))
            _write(temporary / VOCABULARY, [lines.encode()])
            manifest["files"] = {path.name: describe(path) for path in sorted(temporary.iterdir())}
            write_json(temporary / MANIFEST, manifest)
            sync_folder(temporary)
            if folder.exists():  # is moved away first, since deleting takes a while
                folder.replace(old)
            temporary.replace(folder)
            shutil.rmtree(old, ignore_errors=True)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        sync_folder(folder.parent)
    except OSError as error:
        raise LabError(f"{cannot_write(folder, error)}, with HEBBIAN_CACHE") from error
    return open_corpus(folder)


def describe(path: Path) -> dict[str, Any]:
    """Return length and checksum of a file, as manifests hold them."""
    with open(path, "rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def open_corpus(folder: Path, verify: bool = False) -> Corpus:
    """Open the corpus in `folder`.

    Files of the wrong length and damaged vocabularies are always found; `verify` reads and checks every byte.
    """
    manifest = _read_manifest(folder)
    with _damage(folder / MANIFEST):
        _check_manifest(manifest)
        settings, files = manifest["settings"], manifest["files"]
        spans = {split: (span["start"], span["tokens"]) for split, span in manifest["splits"].items()}
        dtypes = {array: DTYPES[dtype] for array, dtype in manifest["arrays"].items()}
    for file, description in files.items():
        with _damage(path := folder / file):
            if (size := path.stat().st_size) != description["bytes"]:
                raise ValueError(f"{size:,} bytes where {description['bytes']:,} are expected")
            if (verify or file == VOCABULARY) and describe(path)["sha256"] != description["sha256"]:
                raise ValueError("its checksum is not the manifest's")
    with _damage(folder / VOCABULARY):
        pairs = [line.rpartition("\t") for line in (folder / VOCABULARY).read_bytes().decode().split("\n")[:-1]]
        words = [word for word, _, _ in pairs]
        counts = torch.tensor([int(count) for _, _, count in pairs], dtype=torch.int64)
    ids = _map(folder / IDS, torch.int32)
    with _damage(folder / MANIFEST):
        if len(words) != manifest["vocabulary"] or sum(spans[SPLITS[-1]]) != len(ids):
            raise ValueError("its counts are not those of the files")
    identity = json.dumps([settings, files, spans], sort_keys=True)
    return Corpus(
        name=manifest["name"],
        path=folder,
        words=words,
        counts=counts,
        splits={split: ids[start : start + tokens] for split, (start, tokens) in spans.items()},
        fingerprint=hashlib.sha256(identity.encode()).hexdigest()[:16],
        manifest=manifest,
        arrays={array: _map(folder / f"{array}.bin", dtype) for array, dtype in dtypes.items()},
    )


def corpora_root() -> Path:
    """Return the folder that holds the folders of prepared corpora."""
    return cache_root() / "corpora"


def prepared() -> list[Path]:
    """Return the folders of all prepared corpora, sorted by name."""
    return sorted(path.parent for path in corpora_root().glob(f"[!.]*/{MANIFEST}"))


def _write_ids(path: Path, name: str, splits: Mapping[str, Iterable[Any]], vocabulary: int) -> dict[str, Any]:
    spans: dict[str, Any] = {}
    start = 0
    for split in SPLITS:
        chunks = splits[split]
        _write(path, _checked([chunks] if hasattr(chunks, "shape") else chunks, split, vocabulary))
        end = path.stat().st_size // 4
        if end == start:
            raise LabError(f"the {split} split of {name} is empty: look at what its sources hold")
        spans[split] = {"start": start, "tokens": end - start}
        start = end
    return spans


def _checked(chunks: Iterable[Any], split: str, vocabulary: int) -> Iterator[bytes]:
    import numpy as np

    for chunk in chunks:
        ids = np.asarray(chunk)
        if ids.size and not (ids.min() >= 0 and ids.max() < vocabulary):
            raise ValueError(f"ids of {split} must be from 0 to {vocabulary - 1}")
        yield ids.astype("<i4", copy=False).tobytes()


def _write_arrays(folder: Path, arrays: Mapping[str, Any]) -> dict[str, str]:
    import numpy as np

    dtypes = {}
    for array, values in arrays.items():
        values = np.asarray(values)
        dtypes[array] = str(values.dtype)
        if dtypes[array] not in DTYPES:
            raise ValueError(f"{array} must be one of {', '.join(DTYPES)}, not {dtypes[array]}")
        _write(folder / f"{array}.bin", [values.astype(values.dtype.newbyteorder("<")).tobytes()])
    return dtypes


def _write(path: Path, chunks: Iterable[bytes]) -> None:
    """Append to a file and return when the bytes are on the disk."""
    with open(path, "ab") as file:
        for chunk in chunks:
            file.write(chunk)
        file.flush()
        os.fsync(file.fileno())


def _read_manifest(folder: Path) -> dict[str, Any]:
    if not folder.is_dir():
        raise LabError(f"{folder} is not a folder: name a prepared corpus (see hebbian data list)")
    if not (folder / MANIFEST).exists():
        raise LabError(f"{folder} is not a prepared corpus: it has no {MANIFEST}; see hebbian data prepare --help")
    manifest = read_json(folder / MANIFEST, f"delete the folder {folder} and prepare the corpus again")
    if manifest.get("format") != FORMAT:
        raise LabError(
            f"{folder} has corpus format {manifest.get('format')!r}, this version reads {FORMAT}: prepare it again"
        )
    return manifest


def _check_manifest(manifest: Mapping[str, Any]) -> None:
    """Raise an error for a manifest that `write_corpus` cannot have written."""
    for entry, kind in ENTRIES.items():
        if not isinstance(manifest.get(entry), kind):
            raise ValueError(f"{entry!r} is missing or of another type")
    for source in (*manifest["sources"], *manifest["files"].values()):
        if type(source["bytes"]) is not int or not isinstance(source["sha256"], str):
            raise ValueError("it does not describe its sources and files by their length and checksum")
    if not all(isinstance(source["name"], str) for source in manifest["sources"]):
        raise ValueError("a source has no name")
    for name in manifest["files"]:
        if name != Path(name).name or name in ("", ".."):
            raise ValueError(f"it names {name!r}, which is not a file in its folder")
    if {IDS, VOCABULARY, *(f"{array}.bin" for array in manifest["arrays"])} - set(manifest["files"]):
        raise ValueError("it lacks a file")
    if set(manifest["splits"]) != set(SPLITS):
        raise ValueError("it lacks a split")
    end = 0
    for split in SPLITS:
        start, tokens = manifest["splits"][split]["start"], manifest["splits"][split]["tokens"]
        if not (type(start) is type(tokens) is int and start == end and tokens > 0):
            raise ValueError(f"the {split} split does not begin where the split before it ends, or is empty")
        end = start + tokens


@contextlib.contextmanager
def _damage(path: Path) -> Iterator[None]:
    """Turn the exceptions that a damaged file causes into an error that names the file."""
    try:
        yield
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        advice = f"delete the folder {path.parent} and prepare the corpus again"
        raise LabError(f"{path} is damaged ({reason(error)}): {advice}") from error


def _map(path: Path, dtype: torch.dtype) -> Tensor:
    """Map the array in a file: pages are read when they are used, and writing to the array does not reach the file."""
    if sys.byteorder != "little":
        raise LabError(f"{path} holds little-endian numbers: use a machine of that byte order")
    if path.stat().st_size < dtype.itemsize:
        return torch.empty(0, dtype=dtype)
    with _damage(path), open(path, "rb") as file:  # torch.from_file takes no name that is not UTF-8
        return torch.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY), dtype=dtype)
