"""A local web server that can stand for the whole internet, keeps a record of requests, and misbehaves on demand."""

import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

import pytest


class FileServer(ThreadingHTTPServer):
    """Serves `files` by path, such as `/a.txt`."""

    daemon_threads = True

    def __init__(self, files: dict[str, bytes]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files = files
        self.statuses: dict[str, list[int]] = {}  # by path: the statuses of the next answers
        self.cuts: list[int] = []  # the numbers of bytes after which the next answers break off
        self.hanging: set[str] = set()  # the paths whose answers stop half-way and never end
        self.hung = threading.Event()  # set once an answer hangs
        self.etag, self.modified = '"v1"', ""
        self.knows_range = self.knows_if_range = self.tells_length = True
        self.range_shift = 0  # the number of bytes by which partial answers begin too late
        self.asked: list[str] = []  # the path of each request
        self.ranges: list[str | None] = []  # the Range header of each request
        self.agents: list[str] = []
        self.partial_answers = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: FileServer

    def do_GET(self) -> None:
        server, path = self.server, urlsplit(self.path).path
        server.asked.append(self.path)
        server.ranges.append(self.headers.get("Range"))
        server.agents.append(self.headers["User-Agent"])
        if server.statuses.get(path) or path not in server.files:
            self.send_error(server.statuses[path].pop(0) if server.statuses.get(path) else 404)
            return
        content, start = server.files[path], 0
        wanted, version = self.headers.get("Range"), self.headers.get("If-Range", "")
        current = version in (server.etag, server.modified) and not version.startswith("W/")
        if wanted and server.knows_range and (current or not server.knows_if_range):
            start = int(wanted.removeprefix("bytes=").removesuffix("-"))
            if start >= len(content):
                self.send_response(416)
                self.send_header("Content-Range", f"bytes */{len(content)}")
                self.end_headers()
                return
            start += server.range_shift
            server.partial_answers += 1
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        if server.tells_length:
            self.send_header("Content-Length", str(len(content) - start))
        for name, value in (("ETag", server.etag), ("Last-Modified", server.modified)):
            if value:
                self.send_header(name, value)
        self.end_headers()
        body = content[start:]
        if path in server.hanging:
            self.wfile.write(body[: len(content) // 2])
            self.wfile.flush()
            server.hung.set()
            self.connection.settimeout(60)
            self.connection.recv(1)  # returns when the client has gone
        else:
            self.wfile.write(body[: server.cuts.pop(0)] if server.cuts else body)

    def log_message(self, format: str, *arguments: object) -> None:
        pass


@contextmanager
def serve(files: dict[str, bytes]) -> Iterator[FileServer]:
    with FileServer(files) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def internet(files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> Iterator[FileServer]:
    """Serve `files`, and send every request of this process to that server, whatever host the address names.

    Each request must come after the response to the one before has been read and closed.
    """
    urlopen, responses = urllib.request.urlopen, []
    with serve(files) as server:

        def redirect(request: urllib.request.Request, timeout: float) -> Any:
            assert all(response.isclosed() for response in responses)
            headers = dict(request.header_items())
            url = server.url + urlsplit(request.full_url).path
            responses.append(urlopen(urllib.request.Request(url, headers=headers), timeout=timeout))
            return responses[-1]

        monkeypatch.setattr(urllib.request, "urlopen", redirect)
        yield server
