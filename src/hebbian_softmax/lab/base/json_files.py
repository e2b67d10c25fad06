"""JSON that any reader accepts, and files of it in which damage is noticed.

A file that `write_json` wrote has a checksum of all its other entries as its last entry. A file without it, such as one
of an older version, is read, too.
"""

import hashlib
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hebbian_softmax.lab.base.errors import LabError, reason
from hebbian_softmax.lab.base.files import write_atomic

CHECKSUM = "checksum"
DEEPEST = 50  # values inside values; the laboratory's own files need about ten

# Terminals obey some of these characters; the others, halves of a surrogate pair, have no bytes in UTF-8. A name of a
# file that is not UTF-8 contains such halves.
_UNSAFE = re.compile("[\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def to_json(value: Any, indent: int | None = None) -> str:
    """Return JSON that any reader accepts: numbers that JSON does not have (nan, inf) become null."""

    def clean(item: Any) -> Any:
        if isinstance(item, float) and not math.isfinite(item):
            return None
        if isinstance(item, Mapping):
            return {key: clean(inner) for key, inner in item.items()}
        if isinstance(item, list | tuple):
            return [clean(inner) for inner in item]
        return item

    text = json.dumps(clean(value), indent=indent, ensure_ascii=False, allow_nan=False)
    return _UNSAFE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def from_json(text: bytes | str) -> Any:
    """Return the value that a text stands for; anything but JSON of moderate depth raises a ValueError."""
    try:
        value = json.loads(text)
    except RecursionError as error:
        raise ValueError("its values are nested too deeply") from error
    inside, depth = [value], 0
    while inside:
        depth += 1
        inside = [inner for each in inside if isinstance(each, dict | list) for inner in _values(each)]
        if depth > DEEPEST:
            raise ValueError("its values are nested too deeply")
    return value


def with_checksum(value: Mapping[str, Any]) -> dict[str, Any]:
    """Return an object with its checksum as a further entry."""
    return {**value, CHECKSUM: _checksum(from_json(to_json(value)))}


def object_from_json(text: bytes | str) -> dict[str, Any]:
    """Return the object that a text stands for, without its checksum; a ValueError says what is wrong."""
    value = from_json(text)
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    if CHECKSUM not in value and value and _is_checksum(*list(value.items())[-1]):
        raise ValueError("the name of its checksum is damaged")
    if value.pop(CHECKSUM, None) not in (None, _checksum(value)):
        raise ValueError(f'its checksum is wrong; if you changed it on purpose, take out the entry "{CHECKSUM}"')
    return value


def write_json(path: Path, value: Mapping[str, Any], indent: int | None = 2) -> None:
    """Write an object with its checksum to a file, whole or not at all."""
    write_atomic(path, (to_json(with_checksum(value), indent) + "\n").encode())


def read_json(path: Path, advice: str) -> dict[str, Any]:
    """Return the object in a file; `advice` says what to do if it cannot be read."""
    try:
        return object_from_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise LabError(f"{path} cannot be read ({reason(error)}): {advice}") from error


def _checksum(value: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def _is_checksum(name: str, value: Any) -> bool:
    """Return whether an entry looks like a checksum under a damaged name."""
    return len(name) == len(CHECKSUM) and isinstance(value, str) and bool(re.fullmatch("[0-9a-f]{16}", value))


def _values(value: dict[str, Any] | list[Any]) -> list[Any]:
    return list(value.values()) if isinstance(value, dict) else value
