"""What visitors may send: every field of every request has a check, and anything else is refused."""

import math
import re
import unicodedata
from collections.abc import Callable, Mapping
from typing import Any

from hebbian_softmax.lab.base.errors import reason
from hebbian_softmax.lab.base.json_files import from_json
from hebbian_softmax.lab.images.curriculum import CHECK_EVERY
from hebbian_softmax.lab.images.data import SIZE
from hebbian_softmax.lab.play.lesson import MOST_TAUGHT

LONGEST_NAME = 40  # characters
MOST_STEPS = 100  # gradient steps of the plain head for one drawing
MOST_CURRICULUM_STEPS = 10_000
FORMAT, VERSION = "hebbian-play", 1  # of a saved lesson
_SESSION = re.compile("[A-Za-z0-9_-]{22}")
_DRAWING = re.compile(f"[0-9a-f]{{{2 * SIZE * SIZE}}}")

Check = Callable[[str, Any], Any]
"""Takes the name of a field and its value; returns the value or raises a `RefusedError`."""


class RefusedError(Exception):
    """A request that is not carried out: the HTTP status, and a message that says what is wrong."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def parse(body: bytes, acts: Mapping[str, Mapping[str, Check]]) -> dict[str, Any]:
    """Return a request as plain checked values: the act, the session, and the fields of that act."""
    request = _from_json(body)
    if not isinstance(request, dict) or not isinstance(request.get("act"), str) or request["act"] not in acts:
        raise RefusedError(400, f"the request must be an object with one of these acts: {', '.join(acts)}")
    fields = {"session": session, **acts[request["act"]]}
    return {"act": request["act"], **_fields(f"the act {request['act']}", request, fields, {"act"})}


def parse_session(body: bytes) -> str:
    """Return the session that a tab had before, or an empty text if it is new."""
    kept = _fields("the request", _from_json(body), {"session": lambda field, value: value})["session"]
    return "" if kept is None else session("session", kept)


def _from_json(body: bytes) -> Any:
    try:
        return from_json(body)
    except ValueError as error:
        raise RefusedError(400, f"the request is not JSON ({reason(error)})") from error


def _fields(what: str, value: Any, checks: Mapping[str, Check], others: set[str] = frozenset()) -> dict[str, Any]:  # type: ignore[assignment]
    if not isinstance(value, dict) or set(value) != {*checks, *others}:
        raise RefusedError(400, f"{what} must have exactly these fields: {', '.join(sorted({*checks, *others}))}")
    return {name: check(name, value[name]) for name, check in checks.items()}


def session(field: str, value: Any) -> str:
    if not isinstance(value, str) or not _SESSION.fullmatch(value):
        raise RefusedError(400, f"{field} must be what POST /api/session has returned")
    return value


def name(field: str, value: Any) -> str:
    """Check the name of a character; spaces around it do not count."""
    if not isinstance(value, str) or not 1 <= len(value.strip()) <= LONGEST_NAME:
        raise RefusedError(400, f"{field} must be a text of 1 to {LONGEST_NAME} characters")
    if any(unicodedata.category(each) in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp") for each in value):
        raise RefusedError(400, f"{field} must not contain control characters")
    if set(value) & set("<>&"):
        raise RefusedError(400, f"{field} must not contain <, > or &")
    return value.strip()


def drawing(field: str, value: Any) -> str:
    if not isinstance(value, str) or not _DRAWING.fullmatch(value):
        raise RefusedError(400, f"{field} must be {SIZE}×{SIZE} pixels, each as two hexadecimal digits")
    if not value.strip("0"):
        raise RefusedError(400, f"{field} is empty: draw something first")
    return value


def flag(field: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise RefusedError(400, f"{field} must be true or false")
    return value


def whole(minimum: int, maximum: int, multiple: int = 1) -> Check:
    """Return a check of whole numbers."""

    def check(field: str, value: Any) -> int:
        if type(value) is not int or not minimum <= value <= maximum or value % multiple:
            words = f"a multiple of {multiple}" if multiple > 1 else "a whole number"
            raise RefusedError(400, f"{field} must be {words} from {minimum} to {maximum}")
        return value

    return check


def number(minimum: float, maximum: float) -> Check:
    """Return a check of numbers."""

    def check(field: str, value: Any) -> float:
        if type(value) not in (int, float) or not math.isfinite(value) or not minimum <= value <= maximum:
            raise RefusedError(400, f"{field} must be a number from {minimum:g} to {maximum:g}")
        return float(value)

    return check


EXAMPLE: Mapping[str, Check] = {"name": name, "drawing": drawing, "steps": whole(0, MOST_STEPS), "replay": flag}


def saved_lesson(field: str, value: Any) -> list[dict[str, Any]]:
    """Check a saved lesson, which is a file from anywhere; return the drawings in it."""
    advice = "choose a file that this page has saved"
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        raise RefusedError(400, f"this is not a saved lesson: {advice}")
    if value.get("version") != VERSION or set(value) != {"format", "version", "taught"}:
        raise RefusedError(400, f"this lesson was saved by another version: {advice}")
    taught = value["taught"]
    if not isinstance(taught, list) or len(taught) > MOST_TAUGHT:
        raise RefusedError(400, f"a saved lesson has a list of at most {MOST_TAUGHT} drawings: {advice}")
    return [_fields(f"drawing {place} of the saved lesson", each, EXAMPLE) for place, each in enumerate(taught, 1)]


RATE: Mapping[str, Check] = {"gamma": number(0, 1), "limit": whole(0, 100_000)}

LESSON: Mapping[str, Mapping[str, Check]] = {
    "show": {},
    "recognise": {"drawing": drawing, "taught_only": flag},
    "review": {},
    "teach": EXAMPLE,
    "forget": {"name": name},
    "rename": {"name": name, "new_name": name},
    "undo": {},
    "save": {},
    "load": {"lesson": saved_lesson},
}
"""The acts of a lesson and their fields."""

CURRICULUM: Mapping[str, Mapping[str, Check]] = {
    "start": {**RATE, "steps": whole(CHECK_EVERY, MOST_CURRICULUM_STEPS, CHECK_EVERY), "seed": whole(0, 2**32 - 1)},
    "pause": {},
    "resume": {},
    "change": RATE,
    "stop": {},
}
"""The acts of the curriculum and their fields."""
