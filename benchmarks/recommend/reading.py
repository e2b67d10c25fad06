"""Files of interactions: their two formats, how these are told apart, and errors that name the file and the line.

Interactions have a header line; every further line is one interaction. Sequences have no header; every line is a user.
Times tell them apart: where the last field of the first line is no number and those of all others are, or where a user
has several lines below such a header, the lines are interactions. A file that could be either is refused.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import lzma
import math
import re
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn

import numpy as np

from benchmarks.recommend.data import Event, Items, sequences_of

EVENTS, SEQUENCES = "interactions with times", "one line a user"
"""The names of the two formats."""
FORMATS = (
    "a file must have either a header and then lines of user, item, anything and, last, the time in seconds, with tabs "
    "between; or, without a header, one line a user: the user, then the items in the order of time, with spaces or "
    "tabs between"
)
UNPACK: dict[str, Callable[[bytes], bytes]] = {".xz": lzma.decompress, ".gz": gzip.decompress}
HEADER = re.compile(r"(user|uid)([ _-]?id)?(:\w+)?", re.IGNORECASE)
"""How columns of users are called: in a header, and hardly in a list of users."""
MOMENT = 1e8
"""Times since 1973, in seconds since 1970, are larger; few catalogues have so many items."""

Line = tuple[int, str]
"""The number of a line, from 1, and its text."""


class Interactions(NamedTuple):
    """What a file has: the items of each user, in the order of time, and the events where there are times."""

    sequences: list[Items]
    events: list[Event] | None
    digest: str
    """A fingerprint of the content, unpacked."""

    def summary(self) -> str:
        """Return one line: the numbers of users, items and interactions, and the format."""
        items, count = 1 + max(int(each.max()) for each in self.sequences), sum(map(len, self.sequences))
        found = f"{len(self.sequences):,} users, {items:,} items, {count:,} interactions"
        return f"{found}; read as {SEQUENCES if self.events is None else EVENTS}"


def read(path: Path, timed: bool) -> Interactions:
    """Return the interactions of a file, which may be compressed (.xz, .gz) and may have empty lines.

    With ``timed`` it must have times; without, it has either of the two formats. Users and items are numbered as they
    are first seen, in the order of time. Raise ValueError with a line for the user where the file cannot be read.
    """
    content = content_of(path)
    lines = lines_of(path, content)
    digest = hashlib.sha256(content).hexdigest()[:16]
    if timed or _are_events(lines):
        events = _timed_events(path, lines) if timed else _events(path, lines)
        return Interactions(sequences_of(events), events, digest)
    return Interactions(_sequences(path, lines), None, digest)


def content_of(path: Path) -> bytes:
    """Return the bytes of a file, unpacked."""
    try:
        return UNPACK.get(path.suffix.lower(), bytes)(path.read_bytes())
    except (gzip.BadGzipFile, lzma.LZMAError, zlib.error, EOFError) as error:
        raise ValueError(f"{path} is damaged or cut off ({error}): replace it with a whole one") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror or error}): name another file") from None


def lines_of(path: Path, content: bytes) -> list[Line]:
    """Return the lines of a text that are not empty; there is at least one."""
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = 1 + content[: error.start].count(b"\n")
        raise ValueError(f"{path}, line {line}, is no text in UTF-8: convert the file, or name another one") from None
    lines = [(number, line.rstrip("\n")) for number, line in enumerate(io.StringIO(text, newline=None), 1)]
    lines = [(number, line) for number, line in lines if line.strip()]
    if not lines:
        raise ValueError(f"{path} is empty; {FORMATS}")
    return lines


def _are_events(lines: Sequence[Line]) -> bool:
    """Return whether the first line is a header, with interactions below it."""
    first, *others = [line.split("\t") for _, line in lines]
    if len(first) < 3 or not others or _number(first[-1]) is not None:
        return False
    several = len({row[0] for row in others}) < len(others)
    return several or all(len(row) == len(first) and _number(row[-1]) is not None for row in others)


def _events(path: Path, lines: Sequence[Line]) -> list[Event]:
    """Return the interactions, oldest first; those of the same time stay in the order of the file."""
    (at, text), *others = lines
    header = text.split("\t")
    if len(header) < 3:
        _refuse(path, at, f"{len(header)} of at least three fields with tabs between")
    if _number(header[-1]) is not None:
        _refuse(path, at, "no header but a number as its last field")
    if not others:
        _refuse(path, at, "a header, and no interaction follows it")
    timed = []
    for number, line in others:
        row = line.split("\t")
        if len(row) != len(header):
            _refuse(path, number, f"{len(row)} fields where the header has {len(header)}")
        time = _number(row[-1])
        if time is None:
            _refuse(path, number, f"{row[-1]!r} as its time, which is no finite number")
        if not (row[0].strip() and row[1].strip()):
            _refuse(path, number, "no user or no item")
        timed.append((time, row[0], row[1]))
    timed.sort(key=lambda each: each[0])
    users: dict[str, int] = {}
    items: dict[str, int] = {}
    return [
        Event(users.setdefault(user, len(users)), items.setdefault(item, len(items)), time)
        for time, user, item in timed
    ]


def _timed_events(path: Path, lines: Sequence[Line]) -> list[Event]:
    """Return the interactions; the error names the other split if the lines are sequences."""
    try:
        return _events(path, lines)
    except ValueError as error:
        try:
            _sequences(path, lines)
        except ValueError:
            raise error from None
        raise ValueError(f"{error}; without times give --split last") from None


def _sequences(path: Path, lines: Sequence[Line]) -> list[Items]:
    """Return the items of each line."""
    rows = [(number, line.split()) for number, line in lines]
    first, fields = rows[0]
    if HEADER.fullmatch(fields[0]):
        _refuse(path, first, f"{fields[0]!r} as its user, as a header has")
    if len(rows) > 1 and all(len(row) in (3, 4) and (_number(row[-1]) or 0) >= MOMENT for _, row in rows[1:]):
        _refuse(path, rows[1][0], f"what looks like a time at its end, {rows[1][1][-1]}, as further lines have")
    seen: dict[str, int] = {}
    numbers: dict[str, int] = {}
    found = []
    for number, (user, *items) in rows:
        if "," in user or any(item.endswith((",", ";")) for item in items):
            _refuse(path, number, "commas or semicolons between its fields")
        if not items:
            _refuse(path, number, f"the user {user!r} and no item")
        if user in seen:
            _refuse(path, number, f"the user {user!r}, as line {seen[user]} has, and may be one interaction of several")
        seen[user] = number
        found.append(np.array([numbers.setdefault(item, len(numbers)) for item in items], dtype=np.int64))
    return found


def _number(text: str) -> float | None:
    """Return the number that a text is, None where it is no finite one."""
    try:
        found = float(text)
    except ValueError:
        return None
    return found if math.isfinite(found) else None


def _refuse(path: Path, line: int, found: str) -> NoReturn:
    raise ValueError(f"{path}, line {line}, has {found}; {FORMATS}")
