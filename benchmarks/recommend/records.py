"""Files of results: one JSON object a line, and before those of a run a line that says where they come from."""

from __future__ import annotations

import datetime
import json
import shlex
import sys
from pathlib import Path
from typing import Any

from hebbian_softmax.lab.base import environment

Record = dict[str, Any]
"""A result: ``given`` is what was asked for; beside it stands what was found, or an ``error``."""


def read_records(path: Path) -> list[Record]:
    """Return the results of a file, without the lines that tell where they come from."""
    if not path.exists():
        return []
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [record for record in records if "given" in record]


def append(path: Path, record: Record) -> None:
    """Append a line to a file of results."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")


def origin(program: str) -> Record:
    """Return what every file of results says: when, with which command, versions and hardware."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["python", "-m", program, *sys.argv[1:]]),
        "commit": environment.commit(),
        "versions": environment.versions(),
        "hardware": environment.hardware(),
    }
