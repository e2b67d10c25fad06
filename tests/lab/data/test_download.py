"""Downloads from a local server that misbehaves on demand."""

import builtins
import errno
import hashlib
import io
import json
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from hebbian_softmax import __version__
from hebbian_softmax.lab.base.errors import LabError
from hebbian_softmax.lab.data.download import RECORD, check_download, download
from tests.lab.base.test_files import file_size_limit, names
from tests.lab.data.serving import FileServer, serve

FILE = "/data.bin"
CONTENT = bytes(range(256)) * 4000
SHA256 = hashlib.sha256(CONTENT).hexdigest()


@pytest.fixture
def server() -> Iterator[FileServer]:
    with serve({FILE: CONTENT}) as server:
        yield server


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "data" / "data.bin"


def fetch(server: FileServer, path: Path, *, sha256: str | None = SHA256, retries: int = 3) -> None:
    download(server.url + FILE, path, sha256=sha256, retries=retries, backoff=0.001, timeout=5, quiet=True)


def assert_whole(path: Path, content: bytes = CONTENT) -> None:
    assert path.read_bytes() == content
    assert names(path.parent) - {RECORD} == {path.name}


def leave_part(server: FileServer, path: Path, size: int) -> None:
    """Leave the files of a download that broke off after `size` bytes."""
    server.cuts = [size]
    with pytest.raises(LabError):
        fetch(server, path, retries=0)
    server.ranges.clear()
    assert not path.exists()
    assert path.with_name("data.bin.part").stat().st_size == size


def test_fetches_a_file(server: FileServer, path: Path) -> None:
    fetch(server, path)
    assert_whole(path)
    assert server.ranges == [None]
    assert server.agents == [f"hebbian-softmax/{__version__}"]


def test_fetches_without_checksum_length_or_version(server: FileServer, path: Path) -> None:
    server.tells_length, server.etag = False, ""
    fetch(server, path, sha256=None)
    assert_whole(path)


def test_without_a_checksum_that_of_the_first_download_counts(server: FileServer, path: Path) -> None:
    fetch(server, path, sha256=None)
    assert json.loads(path.with_name(RECORD).read_bytes())["sha256"] == {path.name: SHA256}
    fetch(server, path, sha256=None)
    path.write_bytes(b"x" + CONTENT[1:])
    for check in (lambda: fetch(server, path, sha256=None), lambda: check_download(path)):
        with pytest.raises(LabError, match=rf"expected {SHA256}: delete it, .*or take it out of checksums\.json"):
            check()
    path.unlink()
    server.files[FILE] = b"a new edition"
    fetch(server, path, sha256=None)
    check_download(path)
    for content in ("[]", '{"sha256": 7}', '{"sha256": {"a": 7}}', "[" * 100_000):
        path.with_name(RECORD).write_text(content)
        with pytest.raises(LabError, match=r"checksums\.json .*: delete it$"):
            check_download(path)


def test_a_right_file_is_left_alone(server: FileServer, path: Path) -> None:
    path.parent.mkdir()
    path.write_bytes(CONTENT)
    fetch(server, path, sha256=SHA256.upper())
    assert server.ranges == []


def test_a_wrong_file_that_was_there_is_named_and_kept(server: FileServer, path: Path) -> None:
    path.parent.mkdir()
    path.write_bytes(b"mine")
    with pytest.raises(LabError, match=f"expected {SHA256}: delete it"):
        fetch(server, path)
    assert_whole(path, b"mine")


def test_dropped_connections_are_taken_up_again(server: FileServer, path: Path) -> None:
    """Five fail and only three retries are allowed, but bytes that arrive reset the count."""
    server.cuts = [1000, 2000, 0, 0, 3000]
    fetch(server, path, retries=3)
    assert_whole(path)
    assert server.ranges == [None, "bytes=1000-", "bytes=3000-", "bytes=3000-", "bytes=3000-", "bytes=6000-"]


def test_gives_up_after_the_last_retry_and_says_what_to_do(server: FileServer, path: Path) -> None:
    server.statuses[FILE] = [503] * 10
    with pytest.raises(LabError, match=r"HTTP 503.*--data-root or HEBBIAN_DATA") as caught:
        fetch(server, path, retries=2)
    assert len(server.ranges) == 3
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_waits_grow(server: FileServer, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr(time, "sleep", waits.append)
    server.statuses[FILE] = [503, 429, 500]
    download(server.url + FILE, path, sha256=SHA256, backoff=1.0, quiet=True)
    assert waits == [1.0, 2.0, 4.0]


@pytest.mark.parametrize(
    ("behaviour", "ranges", "partial_answers"),
    [
        pytest.param({}, ["bytes=1234-"], 1, id="as it should be"),
        pytest.param({"etag": 'W/"v1"', "modified": "Wed, 21 Oct 2015 07:28:00 GMT"}, ["bytes=1234-"], 1, id="date"),
        pytest.param({"etag": ""}, [None], 0, id="no version"),
        pytest.param({"knows_range": False}, ["bytes=1234-"], 0, id="whole answers only"),
        pytest.param({"range_shift": 7}, ["bytes=1234-", None], 1, id="an answer that begins elsewhere"),
    ],
)
def test_a_later_call_goes_on_where_an_earlier_one_broke_off(
    server: FileServer, path: Path, behaviour: dict[str, Any], ranges: list[str | None], partial_answers: int
) -> None:
    """A date serves where the ETag is weak; without any version, or with a wrong answer, it starts over."""
    vars(server).update(behaviour)
    leave_part(server, path, 1234)
    fetch(server, path)
    assert_whole(path)
    assert (server.ranges, server.partial_answers) == (ranges, partial_answers)


@pytest.mark.parametrize("knows_if_range", [True, False])
@pytest.mark.parametrize("length", [len(CONTENT), 500])
def test_a_file_that_changed_starts_over(server: FileServer, path: Path, knows_if_range: bool, length: int) -> None:
    leave_part(server, path, 1234)
    server.files[FILE], server.etag, server.knows_if_range = b"n" * length, '"v2"', knows_if_range
    fetch(server, path, sha256=None)
    assert_whole(path, b"n" * length)


def test_a_part_of_another_address_is_not_used(server: FileServer, path: Path) -> None:
    leave_part(server, path, 1234)
    download(server.url + FILE + "?other", path, sha256=SHA256, quiet=True)
    assert_whole(path)
    assert server.ranges == [None]


def test_all_bytes_but_no_name_yet(server: FileServer, path: Path) -> None:
    leave_part(server, path, 1234)
    path.with_name("data.bin.part").write_bytes(CONTENT)
    fetch(server, path)
    assert_whole(path)
    assert len(server.ranges) == 1


def test_a_missing_file_is_not_tried_again(server: FileServer, path: Path) -> None:
    server.statuses[FILE] = [404]
    with pytest.raises(LabError, match=r"HTTP 404 .*put the file at"):
        fetch(server, path)
    assert len(server.ranges) == 1
    assert names(path.parent) == set()


def test_a_wrong_checksum_names_both_and_leaves_nothing(server: FileServer, path: Path) -> None:
    with pytest.raises(LabError, match=f"SHA-256 {SHA256}, expected {'0' * 64}"):
        fetch(server, path, sha256="0" * 64)
    assert names(path.parent) == set()


def test_no_server(path: Path) -> None:
    with serve({}) as gone:
        url = gone.url
    with pytest.raises(LabError, match="is there a network"):
        download(url, path, retries=1, backoff=0.001, quiet=True)


@pytest.mark.parametrize("url", ["data.bin", "file:///dev/null", "http://127.0.0.1:bad/x", "http://a b/"])
def test_not_an_address(url: str, path: Path) -> None:
    with pytest.raises(LabError, match="cannot download"):
        download(url, path, retries=0, quiet=True)


def test_no_space_is_told_before_anything_is_written(
    server: FileServer, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(path.parents[1])._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage)
    with pytest.raises(LabError, match=r"1\.0 MB to come, 1\.0 kB free"):
        fetch(server, path)
    assert not path.with_name("data.bin.part").exists()


def test_a_disk_that_fills_up_is_one_clear_line(server: FileServer, path: Path) -> None:
    with file_size_limit(100_000), pytest.raises(LabError, match="cannot write"):
        fetch(server, path)
    assert not path.exists()
    fetch(server, path)
    assert_whole(path)


def test_a_full_disk_gets_its_space_back(server: FileServer, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leave_part(server, path, 1234)

    class Full(io.FileIO):
        def write(self, content: Any) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    def open_full(path: Path, mode: str) -> Any:
        return Full(path, mode) if mode == "ab" else open(path, mode)

    monkeypatch.setattr(builtins, "open", open_full)
    with pytest.raises(LabError, match="no space left"):
        fetch(server, path)
    assert names(path.parent) == set()


def test_two_callers_at_once_fetch_once(server: FileServer, path: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: fetch(server, path), range(4)))
    assert_whole(path)
    assert server.ranges == [None]


def test_progress_tells_of_retries(server: FileServer, path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    server.cuts = [1000]
    download(server.url + FILE, path, backoff=0.001)
    lines = capsys.readouterr().err.splitlines()
    assert "data.bin: the connection ended after 1,000 of 1,024,000 bytes; trying again in 0 s" in lines
    assert lines[-1] == "data.bin: 1.0 MB/1.0 MB"
