"""Downloads from a server on this machine that misbehaves on demand."""

import errno
import hashlib
import shutil
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from hebbian_softmax import __version__
from hebbian_softmax.lab.base.errors import LabError
from hebbian_softmax.lab.data import download as module
from hebbian_softmax.lab.data.download import download
from tests.lab.base.test_files import file_size_limit, names

CONTENT = bytes(range(256)) * 4000
SHA256 = hashlib.sha256(CONTENT).hexdigest()


class Server(ThreadingHTTPServer):
    """Serves `content`. `cuts` are the bytes after which the coming answers break off."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.content, self.etag, self.modified = CONTENT, '"v1"', ""
        self.statuses: list[int] = []
        self.cuts: list[int] = []
        self.knows_range = self.knows_if_range = self.tells_length = True
        self.range_shift = 0
        self.requests: list[str | None] = []  # the Range header of each
        self.agents: list[str] = []
        self.partial_answers = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/data.bin"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        server, wanted = self.server, self.headers.get("Range")
        server.requests.append(wanted)
        server.agents.append(self.headers["User-Agent"])
        if server.statuses:
            self.send_error(server.statuses.pop(0))
            return
        start = 0
        version = self.headers.get("If-Range", "")
        current = version in (server.etag, server.modified) and not version.startswith("W/")
        current |= not server.knows_if_range
        if wanted and server.knows_range and current:
            start = int(wanted.removeprefix("bytes=").removesuffix("-"))
            if start >= len(server.content):
                self.send_response(416)
                self.send_header("Content-Range", f"bytes */{len(server.content)}")
                self.end_headers()
                return
            start += server.range_shift
            self.send_response(206)
            server.partial_answers += 1
            self.send_header("Content-Range", f"bytes {start}-{len(server.content) - 1}/{len(server.content)}")
        else:
            self.send_response(200)
        body = server.content[start:]
        if server.tells_length:
            self.send_header("Content-Length", str(len(body)))
        if server.etag:
            self.send_header("ETag", server.etag)
        if server.modified:
            self.send_header("Last-Modified", server.modified)
        self.end_headers()
        self.wfile.write(body[: server.cuts.pop(0)] if server.cuts else body)

    def log_message(self, format: str, *arguments: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "data" / "data.bin"


def fetch(server: Server, path: Path, *, sha256: str | None = SHA256, retries: int = 3) -> None:
    download(server.url, path, sha256=sha256, retries=retries, backoff=0.001, timeout=5, quiet=True)


def assert_whole(path: Path, content: bytes = CONTENT) -> None:
    assert path.read_bytes() == content
    assert names(path.parent) == {path.name}


def leave_part(server: Server, path: Path, size: int) -> None:
    """What a download that broke off after `size` bytes leaves."""
    server.cuts = [size]
    with pytest.raises(LabError):
        fetch(server, path, retries=0)
    server.requests.clear()
    assert not path.exists()
    assert path.with_name("data.bin.part").stat().st_size == size


def test_fetches_a_file(server: Server, path: Path) -> None:
    fetch(server, path)
    assert_whole(path)
    assert server.requests == [None]
    assert server.agents == [f"hebbian-softmax/{__version__}"]


def test_fetches_without_checksum_length_or_version(server: Server, path: Path) -> None:
    server.tells_length, server.etag = False, ""
    fetch(server, path, sha256=None)
    assert_whole(path)


def test_a_right_file_is_left_alone(server: Server, path: Path) -> None:
    path.parent.mkdir()
    path.write_bytes(CONTENT)
    fetch(server, path, sha256=SHA256.upper())
    assert server.requests == []


def test_a_wrong_file_that_was_there_is_named_and_kept(server: Server, path: Path) -> None:
    path.parent.mkdir()
    path.write_bytes(b"mine")
    with pytest.raises(LabError, match=f"expected {SHA256}: delete it"):
        fetch(server, path)
    assert_whole(path, b"mine")


def test_dropped_connections_are_taken_up_again(server: Server, path: Path) -> None:
    server.cuts = [1000, 2000, 0, 0, 3000]
    fetch(server, path, retries=3)
    assert_whole(path)
    assert server.requests == [None, "bytes=1000-", "bytes=3000-", "bytes=3000-", "bytes=3000-", "bytes=6000-"]


def test_bytes_that_arrive_reset_the_count_of_failures(server: Server, path: Path) -> None:
    server.cuts = [100] * 20
    fetch(server, path, retries=1)
    assert_whole(path)


def test_gives_up_after_the_last_retry_and_says_what_to_do(server: Server, path: Path) -> None:
    server.statuses = [503] * 10
    with pytest.raises(LabError, match=r"HTTP 503.*--data-root or HEBBIAN_DATA") as caught:
        fetch(server, path, retries=2)
    assert len(server.requests) == 3
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_waits_grow(server: Server, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr(module.time, "sleep", waits.append)
    server.statuses = [503, 429, 500]
    download(server.url, path, sha256=SHA256, backoff=1.0, quiet=True)
    assert waits == [1.0, 2.0, 4.0]


def test_a_later_call_goes_on_where_an_earlier_one_broke_off(server: Server, path: Path) -> None:
    leave_part(server, path, 1234)
    fetch(server, path)
    assert_whole(path)
    assert server.requests == ["bytes=1234-"]


def test_a_date_serves_where_the_etag_is_weak(server: Server, path: Path) -> None:
    server.etag, server.modified = 'W/"v1"', "Wed, 21 Oct 2015 07:28:00 GMT"
    leave_part(server, path, 1234)
    fetch(server, path)
    assert_whole(path)
    assert server.requests == ["bytes=1234-"]
    assert server.partial_answers == 1


def test_without_any_version_it_starts_over(server: Server, path: Path) -> None:
    server.etag = ""
    leave_part(server, path, 1234)
    fetch(server, path)
    assert_whole(path)
    assert server.requests == [None]


def test_a_server_without_range_starts_over(server: Server, path: Path) -> None:
    server.knows_range = False
    leave_part(server, path, 1234)
    fetch(server, path)
    assert_whole(path)


@pytest.mark.parametrize("knows_if_range", [True, False])
@pytest.mark.parametrize("length", [len(CONTENT), 500])
def test_a_file_that_changed_starts_over(server: Server, path: Path, knows_if_range: bool, length: int) -> None:
    leave_part(server, path, 1234)
    server.content, server.etag, server.knows_if_range = b"n" * length, '"v2"', knows_if_range
    fetch(server, path, sha256=None)
    assert_whole(path, b"n" * length)


def test_a_part_of_another_address_is_not_used(server: Server, path: Path) -> None:
    leave_part(server, path, 1234)
    download(server.url + "?other", path, sha256=SHA256, quiet=True)
    assert_whole(path)
    assert server.requests == [None]


def test_an_answer_that_begins_elsewhere_is_not_appended(server: Server, path: Path) -> None:
    leave_part(server, path, 1234)
    server.range_shift = 7
    fetch(server, path)
    assert_whole(path)


def test_all_bytes_but_no_name_yet(server: Server, path: Path) -> None:
    leave_part(server, path, 1234)
    path.with_name("data.bin.part").write_bytes(CONTENT)
    fetch(server, path)
    assert_whole(path)
    assert len(server.requests) == 1


def test_a_missing_file_is_not_tried_again(server: Server, path: Path) -> None:
    server.statuses = [404]
    with pytest.raises(LabError, match=r"HTTP 404 .*put the file at"):
        fetch(server, path)
    assert len(server.requests) == 1
    assert names(path.parent) == set()


def test_a_wrong_checksum_names_both_and_leaves_nothing(server: Server, path: Path) -> None:
    with pytest.raises(LabError, match=f"SHA-256 {SHA256}, expected {'0' * 64}"):
        fetch(server, path, sha256="0" * 64)
    assert names(path.parent) == set()


def test_no_server(path: Path) -> None:
    with Server() as gone:
        url = gone.url
    with pytest.raises(LabError, match="is there a network"):
        download(url, path, retries=1, backoff=0.001, quiet=True)


@pytest.mark.parametrize("url", ["data.bin", "file:///dev/null", "http://127.0.0.1:bad/x", "http://a b/"])
def test_not_an_address(url: str, path: Path) -> None:
    with pytest.raises(LabError, match="cannot download"):
        download(url, path, retries=0, quiet=True)


def test_no_space_is_told_before_anything_is_written(
    server: Server, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(path.parents[1])._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage)
    with pytest.raises(LabError, match=r"1\.0 MB to come, 1\.0 kB free"):
        fetch(server, path)
    assert not path.with_name("data.bin.part").exists()


def test_a_disk_that_fills_up_is_one_clear_line(server: Server, path: Path) -> None:
    with file_size_limit(100_000), pytest.raises(LabError, match="cannot write"):
        fetch(server, path)
    assert not path.exists()
    fetch(server, path)
    assert_whole(path)


def test_a_full_disk_gets_its_space_back(server: Server, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leave_part(server, path, 1234)

    def full(self: object, done: int, metrics: object = None) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(module.Progress, "update", full)
    with pytest.raises(LabError, match="no space left"):
        fetch(server, path)
    assert names(path.parent) == set()


def test_two_callers_at_once_fetch_once(server: Server, path: Path) -> None:
    threads = [threading.Thread(target=fetch, args=(server, path)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert_whole(path)
    assert server.requests == [None]


def test_progress_tells_of_retries(server: Server, path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    server.cuts = [1000]
    download(server.url, path, backoff=0.001)
    lines = capsys.readouterr().err.splitlines()
    assert "data.bin: the connection ended after 1,000 of 1,024,000 bytes; trying again in 0 s" in lines
    assert lines[-1] == "data.bin: 1.0 MB/1.0 MB"
