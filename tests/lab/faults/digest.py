"""What a world holds, in a form that two runs of the same command have in common.

Times, dates, versions and the names of run folders, which contain a date, are left out; weights, numbers and texts are
compared to the bit.
"""

import hashlib
import json
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hebbian_softmax.lab.base.files import TEMPORARY

CHANGING = {"checksum", "seconds", "words_per_second", "started", "versions", "hardware", "modified", "places"}
"""Keys of JSON objects and checkpoints whose values differ between equal runs."""
INPUTS = ("texts", "packed", "data")
"""Folders that commands only read."""
SPARE = "checkpoint-previous.pt"
"""A spare file: which step it is of depends on when checkpoints were saved."""
DATE = re.compile(r"-\d{8}-\d{6}(-\d+)?|(?<=omniglot)-[0-9a-f]{16}")  # a cache is named after its archives
TIMES = re.compile(r"\bin \d+ s\b|started [\dT:+-]+|in [\d.]+ seconds")


def contents(world: Path) -> dict[str, str]:
    """Return a checksum of each file that commands wrote, by its path."""
    found = {}
    for path in sorted(world.rglob("*")):
        name = path.relative_to(world)
        if path.is_file() and name.parts[0] not in INPUTS and path.name != SPARE and path.suffix != ".lock":
            found[plain(str(name), world)] = checksum(path, world)
    return found


def plain(text: str, world: Path) -> str:
    """Return a text without dates, durations and the place of the world."""
    return TIMES.sub("", DATE.sub("", text.replace(f"{world}/", "")))


def checksum(path: Path, world: Path) -> str:
    """Return a checksum of what a file means, or of its bytes if it cannot be read."""
    total = hashlib.sha256()
    content = path.read_bytes()
    try:
        if path.suffix == ".json":
            add(total, without_times(json.loads(content), world))
        elif path.suffix == ".jsonl":
            add(total, [without_times(json.loads(line), world) for line in content.splitlines()])
        elif path.suffix == ".html":
            total.update(plain(content.decode(), world).encode())
        elif path.suffix == ".npz":
            with zipfile.ZipFile(path) as archive:  # which checks every member
                for name in sorted(set(archive.namelist()) - {f"{key}.npy" for key in CHANGING}):
                    total.update(name.encode() + archive.read(name))
        elif path.suffix == ".pt":
            add(total, without_times(torch.load(path, map_location="cpu", weights_only=True), world))
        else:
            total.update(content)
    except Exception:  # damaged; the bytes are what there is
        total = hashlib.sha256(content)
    return total.hexdigest()[:16]


def without_times(value: Any, world: Path) -> Any:
    """Return a copy of nested values without what differs between equal runs."""
    if isinstance(value, Mapping):
        return {key: without_times(inner, world) for key, inner in value.items() if key not in CHANGING}
    if isinstance(value, list | tuple):
        return [without_times(inner, world) for inner in value]
    return plain(value, world) if isinstance(value, str) else value


def add(total: Any, value: Any) -> None:
    """Add a value to a checksum; each tensor counts with its type, its shape and all its bits."""
    if isinstance(value, Tensor):
        total.update(f"{value.dtype}{tuple(value.shape)}".encode())
        total.update(value.contiguous().flatten().view(torch.uint8).numpy())
    elif isinstance(value, Mapping):
        for key in value:
            total.update(f"{key}:".encode())
            add(total, value[key])
    elif isinstance(value, list):
        total.update(f"[{len(value)}]".encode())
        for inner in value:
            add(total, inner)
    else:
        total.update(f"{value!r};".encode())


def leavings(world: Path) -> list[str]:
    """Return what a killed process left and nobody removed: temporary files, and run folders without a config."""
    found = list(world.rglob(f"{TEMPORARY}*"))
    runs = [*world.glob("runs/*"), *world.glob("runs/*/trials/*")]
    found += [path for path in runs if path.is_dir() and not (path / "config.json").exists()]
    return sorted(plain(str(path.relative_to(world)), world) for path in found)
