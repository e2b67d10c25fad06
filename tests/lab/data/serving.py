"""A web server on this machine that stands for the whole internet, counts requests and may leave an answer hanging."""

import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

import pytest


class FileServer(ThreadingHTTPServer):
    """`files` by path, `/a.txt`. One of `statuses` has that status the next time; one of `hanging` never ends."""

    daemon_threads = True

    def __init__(self, files: dict[str, bytes]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files = files
        self.statuses: dict[str, int] = {}
        self.hanging: set[str] = set()
        self.hung = threading.Event()  # an answer hangs after half its bytes
        self.asked: list[str] = []
        self.ranges: list[str | None] = []
        self.at_once = self.most_at_once = 0
        self.counting = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: FileServer

    def do_GET(self) -> None:
        server = self.server
        with server.counting:
            server.asked.append(self.path)
            server.ranges.append(self.headers.get("Range"))
            server.at_once += 1
            server.most_at_once = max(server.most_at_once, server.at_once)
        try:
            self._answer(server)
        finally:
            with server.counting:
                server.at_once -= 1

    def _answer(self, server: FileServer) -> None:
        if self.path in server.statuses or self.path not in server.files:
            self.send_error(server.statuses.pop(self.path, 404))
            return
        content = server.files[self.path]
        start = int((self.headers.get("Range") or "bytes=0-").removeprefix("bytes=").removesuffix("-"))
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        self.send_header("Content-Length", str(len(content) - start))
        self.send_header("ETag", f'"{hash(content)}"')
        self.end_headers()
        if self.path in server.hanging:
            self.wfile.write(content[start : len(content) // 2])
            self.wfile.flush()
            server.hung.set()
            self.connection.settimeout(60)
            self.connection.recv(1)  # until the other end is gone
        else:
            self.wfile.write(content[start:])

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
    """Serve `files`, and send every request of this process to that server, whatever host the address names."""
    urlopen = urllib.request.urlopen
    with serve(files) as server:

        def redirect(request: urllib.request.Request, timeout: float) -> Any:
            url = server.url + urlsplit(request.full_url).path
            return urlopen(urllib.request.Request(url, headers=dict(request.header_items())), timeout=timeout)

        monkeypatch.setattr(urllib.request, "urlopen", redirect)
        yield server
