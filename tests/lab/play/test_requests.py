"""Whatever a visitor sends is checked, field by field."""

import json
from typing import Any

import pytest

from hebbian_softmax.lab.play.lesson import MOST_TAUGHT
from hebbian_softmax.lab.play.requests import CURRICULUM, LESSON, RefusedError, parse, parse_session
from tests.lab.play.toy import blank

SESSION = "a" * 22
TEACH = {"act": "teach", "session": SESSION, "name": "hook", "drawing": blank(), "steps": 5, "replay": True}
START = {"act": "start", "session": SESSION, "gamma": 0.1, "limit": 50, "steps": 100, "seed": 0}
SAVED = {
    "format": "hebbian-play",
    "version": 1,
    "taught": [{k: TEACH[k] for k in ("name", "drawing", "steps", "replay")}],
}
LOAD = {"act": "load", "session": SESSION, "lesson": SAVED}


def body(value: Any) -> bytes:
    return value if isinstance(value, bytes) else json.dumps(value).encode()


def test_good_requests_pass() -> None:
    assert parse(body(TEACH), LESSON) == TEACH
    assert parse(body({**TEACH, "name": "  Ω 7 "}), LESSON)["name"] == "Ω 7"
    assert parse(body(START), CURRICULUM) == START
    assert parse(body(LOAD), LESSON)["lesson"] == SAVED["taught"]
    assert parse_session(b'{"session": null}') == ""
    assert parse_session(body({"session": SESSION})) == SESSION


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b'{"act": ' + b"9" * 10_000 + b"}", "not JSON"),
        ([], "one of these acts"),
        ({}, "one of these acts"),
        ({**TEACH, "act": "eval"}, "one of these acts"),
        ({**TEACH, "act": ["teach"]}, "one of these acts"),
        ({**TEACH, "more": 1}, "exactly these fields"),
        ({"act": "teach", "session": SESSION}, "exactly these fields"),
        ({**TEACH, "session": "../../etc/passwd"}, "session must be"),
        ({**TEACH, "session": 7}, "session must be"),
        ({**TEACH, "name": ""}, "1 to 40 characters"),
        ({**TEACH, "name": "   "}, "1 to 40 characters"),
        ({**TEACH, "name": "x" * 41}, "1 to 40 characters"),
        ({**TEACH, "name": {"a": 1}}, "1 to 40 characters"),
        ({**TEACH, "name": "<img src=x onerror=alert(1)>"}, "must not contain <"),
        ({**TEACH, "name": "&lt;"}, "must not contain <"),
        ({**TEACH, "name": "a\x00b"}, "control characters"),
        ({**TEACH, "name": "a\u202eb"}, "control characters"),
        ({**TEACH, "name": "\ud800"}, "control characters"),
        ({**TEACH, "drawing": "00"}, "28×28 pixels"),
        ({**TEACH, "drawing": "g" * 1568}, "28×28 pixels"),
        ({**TEACH, "drawing": blank() + "\n"}, "28×28 pixels"),
        ({**TEACH, "drawing": [0] * 784}, "28×28 pixels"),
        ({**TEACH, "drawing": "0" * 1568}, "is empty"),
        ({**TEACH, "steps": -1}, "whole number from 0 to 100"),
        ({**TEACH, "steps": 1e9}, "whole number from 0 to 100"),
        ({**TEACH, "steps": True}, "whole number from 0 to 100"),
        ({**TEACH, "steps": "5"}, "whole number from 0 to 100"),
        ({**TEACH, "replay": 1}, "true or false"),
        ({**LOAD, "lesson": []}, "not a saved lesson"),
        ({**LOAD, "lesson": {**SAVED, "version": 2}}, "another version"),
        ({**LOAD, "lesson": {**SAVED, "taught": SAVED["taught"] * (MOST_TAUGHT + 1)}}, "at most 200 drawings"),
        ({**LOAD, "lesson": {**SAVED, "taught": [{}]}}, "drawing 1 of the saved lesson"),
        ({**LOAD, "lesson": {**SAVED, "taught": [{**SAVED["taught"][0], "name": "<b>"}]}}, "must not contain <"),
    ],
)
def test_anything_else_is_refused(value: Any, message: str) -> None:
    with pytest.raises(RefusedError, match=message) as refused:
        parse(body(value), LESSON)
    assert refused.value.status == 400


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("gamma", wrong) for wrong in (1.5, "0.1", float("nan"), float("inf"))),
        *(("limit", wrong) for wrong in (0.5, -1)),
        *(("steps", wrong) for wrong in (30, 0, 10**7)),
        *(("seed", wrong) for wrong in (-1, None)),
    ],
)
def test_curricula_are_checked(field: str, value: Any) -> None:
    with pytest.raises(RefusedError, match=field):
        parse(body({**START, field: value}), CURRICULUM)
