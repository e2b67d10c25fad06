"""`hebbian play` on a small set of images that is learned in seconds: a server for the tests, and its workers.

python -m tests.lab.play.toy serve PORT        python -m tests.lab.play.toy classroom | live SETTINGS
"""

import contextlib
import http.client
import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from hebbian_softmax.lab.images.curriculum import CurriculumSettings
from hebbian_softmax.lab.images.data import ImageSet
from hebbian_softmax.lab.play import classroom, live
from hebbian_softmax.lab.play.network import SIZE
from tests import ROOT
from tests.lab.images.toys import toy_set

STEPS = 60
CLASSES = 90  # of which 50 are left out of the network's training


def images() -> ImageSet:
    return toy_set(classes=CLASSES, noise=0.03)


def blank(ink: int = 255) -> str:
    """Return a drawing: a square in the middle."""
    drawing = torch.zeros(SIZE, SIZE, dtype=torch.uint8)
    drawing[9:19, 9:19] = ink
    return classroom.to_hex(drawing)


def refuse_the_network() -> None:
    """Let every connection of this process fail that does not stay on this computer."""

    def check(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "socket.connect" and isinstance(arguments[1], tuple) and arguments[1][0] != "127.0.0.1":
            raise OSError(f"the network is cut, but {arguments[1]} was wanted")
        if event == "socket.getaddrinfo" and arguments[0] not in (None, "127.0.0.1", b"127.0.0.1"):
            raise OSError(f"the network is cut, but {arguments[0]} was wanted")

    sys.addaudithook(check)


def worker(kind: str, **settings: Any) -> list[str]:
    return [sys.executable, "-m", "tests.lab.play.toy", kind, json.dumps(settings)]


def serve(port: int) -> None:
    import uvicorn

    from hebbian_softmax.lab.play.server import create_app

    app = create_app(port, worker("classroom"), lambda values: worker("live", **values), lambda: server.should_exit)
    config = uvicorn.Config(app, host="127.0.0.1", port=port, http="h11", ws="none", log_level="error")
    server = uvicorn.Server(config)
    server.run()


class Client:
    """Speaks to a server as the page does; every header can be replaced."""

    def __init__(self, port: int) -> None:
        self.port = port

    def request(
        self, method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None
    ) -> tuple[int, Any]:
        """Return the status and the content of the answer, decoded if it is JSON."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        usual = (
            {"Origin": f"http://127.0.0.1:{self.port}", "Content-Type": "application/json"} if body is not None else {}
        )
        with contextlib.closing(connection):
            connection.request(method, path, body, {**usual, **(headers or {})})
            answer = connection.getresponse()
            content = answer.read()
            is_json = answer.headers.get_content_type() == "application/json"
            return answer.status, json.loads(content) if is_json else content

    def post(self, path: str, value: Any) -> tuple[int, Any]:
        return self.request("POST", path, json.dumps(value).encode())

    def session(self) -> str:
        status, found = self.post("/api/session", {"session": None})
        assert status == 200
        return str(found["session"])

    def act(self, session: str, act: str, **values: Any) -> tuple[int, Any]:
        return self.post("/api/lesson", {"act": act, "session": session, **values})

    def teach(self, session: str, name: str, drawing: str, steps: int = 5, replay: bool = False) -> tuple[int, Any]:
        return self.act(session, "teach", name=name, drawing=drawing, steps=steps, replay=replay)

    def events(self, session: str) -> Iterator[dict[str, Any]]:
        """Yield what the curriculum of a session says, as it comes."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        with contextlib.closing(connection):
            connection.request("GET", f"/api/curriculum?session={session}")
            for line in connection.getresponse():
                if line.startswith(b"data: "):
                    yield json.loads(line.removeprefix(b"data: "))

    def until_ready(self) -> None:
        deadline = time.monotonic() + 120
        while not self.request("GET", "/api/status")[1]["ready"]:
            assert time.monotonic() < deadline
            time.sleep(0.05)


@contextlib.contextmanager
def serving(cache: Path, port: int = 0) -> Iterator[Client]:
    """Run a server in a process of its own, on any free port if none is given."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", port))
        port = probe.getsockname()[1]
    environment = {"HEBBIAN_CACHE": str(cache), "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    command = [sys.executable, "-m", "tests.lab.play.toy", "serve", str(port)]
    with subprocess.Popen(command, cwd=ROOT, env={**environment, "PATH": "/usr/bin:/bin"}) as process:
        try:
            deadline = time.monotonic() + 60
            while True:
                with contextlib.suppress(OSError):
                    socket.create_connection(("127.0.0.1", port), timeout=5).close()
                    break
                assert process.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.05)
            yield Client(port)
        finally:
            process.terminate()
            process.wait(20)


def main() -> None:
    refuse_the_network()
    kind, value = sys.argv[1:]
    if kind == "serve":
        serve(int(value))
    elif kind == "classroom":
        classroom.serve(images, STEPS, 0)
    else:
        given = json.loads(value)
        live.serve(images, CurriculumSettings(filters=8, device="cpu", **given))


if __name__ == "__main__":
    main()
