"""The outcome of a trial: what is allowed, and everything else under a name of its own."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.lab.faults.world import Ended

SAME = "same result"
ERROR = "clear error"
OTHER = "other input, recorded"
NOTED = "less, with a note"
ALLOWED = (SAME, ERROR, NOTED, OTHER)
"""NOTED: a report leaves out what it cannot read, and says so in a line that names the file and what to do.
OTHER: a text that was changed is another text. The corpus made from it says so by its name or its checksums."""

START = "hebbian: error: "
ADVICE = re.compile(
    r"\b(choose|copy|correct|delete|evaluate|free|get|give|go on|install|look|make|move|name|prepare|put|remove|repair"
    r"|replace|restore|resume|show|start|stop|take|train|try|use|wait)\b"
)


@dataclass(frozen=True)
class Verdict:
    """An outcome, and where it needs one, an explanation."""

    outcome: str
    detail: str = ""

    @property
    def allowed(self) -> bool:
        return self.outcome in ALLOWED


def fault_of(ended: Ended, mentions: Path | None = None) -> Verdict | None:
    """Return what is wrong with the way in which a command ended; None if it succeeded or gave a clear error.

    A clear error is one line at the end that says what to do, and names `mentions` or a folder that holds it.
    """
    if ended.code is None:
        return Verdict("hangs", ended.errors)
    if ended.left:
        return Verdict("leaves a process", ended.errors)
    if "Traceback" in ended.errors or "Traceback" in ended.output:
        return Verdict("traceback", (ended.errors or ended.output).strip()[-600:])
    if ended.code == 0:
        return None
    lines = ended.errors.strip().splitlines()
    message = lines[-1] if lines else ""
    if ended.code != 1 or not message.startswith(START) or sum(line.startswith(START) for line in lines) != 1:
        return Verdict("unclear error", f"code {ended.code}: {ended.errors.strip()[-600:]}")
    if not ADVICE.search(message):
        return Verdict("error without advice", message)
    if mentions is not None and not any(str(place) in message for place in (mentions, mentions.parent)):
        return Verdict("error that names no file", message)
    return None


def said(ended: Ended, file: Path) -> bool:
    """Return whether a note says that this file cannot be used, and what to do."""
    notes = [line for line in ended.errors.splitlines() if line.startswith("note: ") and str(file) in line]
    return bool(notes) and all(ADVICE.search(note) for note in notes)


def differences(found: Mapping[str, str], expected: Mapping[str, str]) -> list[str]:
    """Return the files in which two worlds differ."""
    return sorted(name for name in {*found, *expected} if found.get(name) != expected.get(name))
