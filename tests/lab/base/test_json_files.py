"""JSON files: what cannot be written as JSON, what damage is noticed, and what is said about it."""

import json
import math
from pathlib import Path

import pytest

from hebbian_softmax.lab.base.errors import LabError
from hebbian_softmax.lab.base.json_files import from_json, read_json, to_json, write_json

VALUE = {"name": "γ\udcff\x1b\x9b", "numbers": [1, 0.1, 1e-300, None, True], "inside": {"a": "b"}}


def test_a_file_gives_back_its_object(tmp_path: Path) -> None:
    """A name of a file that is not UTF-8 comes back, too, and no character moves a terminal's cursor."""
    write_json(tmp_path / "a", VALUE)
    assert read_json(tmp_path / "a", "") == VALUE
    text = (tmp_path / "a").read_text(encoding="utf-8")
    assert all(character.isprintable() or character == "\n" for character in text)
    assert list(json.loads(text)) == [*VALUE, "checksum"]


def test_numbers_that_json_does_not_have_become_null() -> None:
    assert from_json(to_json([math.nan, math.inf, {"x": -math.inf}, 1.5])) == [None, None, {"x": None}, 1.5]


def test_no_flipped_bit_changes_what_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a"
    write_json(path, VALUE)
    whole, refused = path.read_bytes(), 0
    for position in range(len(whole)):
        content = bytearray(whole)
        content[position] ^= 1 << position % 7
        path.write_bytes(content)
        try:
            found = read_json(path, "put it back")
        except LabError:
            refused += 1
        else:  # a space was changed to another one
            assert found == VALUE
    assert refused > len(whole) // 2


def test_a_file_without_a_checksum_is_read(tmp_path: Path) -> None:
    (tmp_path / "a").write_text('{"a": 1}')
    assert read_json(tmp_path / "a", "") == {"a": 1}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "Expecting value"),
        (b"[]", "not a JSON object"),
        (b"7", "not a JSON object"),
        (b"\xff", "decode"),
        (b'{"a": ' + b"[" * 100_000, "nested too deeply"),
        (b'{"a": ' + b"[" * 900 + b"]" * 900 + b"}", "nested too deeply"),
        (b'{"a": ' + b"9" * 10_000 + b"}", "digits"),
        (b'{"a": 1, "checksum": "0"}', "its checksum is wrong; if you changed it on purpose"),
        (b'{"a": 1, "checksum": []}', "its checksum is wrong"),
    ],
)
def test_what_is_no_object_is_one_clear_line(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "a").write_bytes(content)
    with pytest.raises(LabError, match=rf"a cannot be read \(.*{message}.*\): put it back$") as caught:
        read_json(tmp_path / "a", "put it back")
    assert "\n" not in str(caught.value)
    with pytest.raises(LabError, match=r"missing cannot be read"):
        read_json(tmp_path / "missing", "put it back")
