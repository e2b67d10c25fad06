"""The server from outside: who may use it, what it refuses, and that nothing refused changes anything."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import statistics
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from hebbian_softmax.lab.play.server import (
    HEADERS,
    MOST_REQUESTS,
    MOST_SESSIONS,
    PAGE,
    Curriculum,
    Guard,
    Service,
)
from tests.lab.play.toy import Client, blank, serving

DRAWING = blank()


@pytest.fixture
def taught(server: Client) -> Iterator[str]:
    """A session with one character; whatever a test sends, it must be the same afterwards."""
    session = server.session()
    assert server.teach(session, "hook", DRAWING)[0] == 200
    before = server.act(session, "save")
    yield session
    assert server.act(session, "save") == before


def raw(port: int, request: bytes) -> bytes:
    """Send bytes and return the whole answer."""
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        connection.sendall(request)
        found = b""
        with contextlib.suppress(TimeoutError):
            while part := connection.recv(65536):
                found += part
        return found


def test_the_page_and_its_headers(server: Client) -> None:
    for path, (_, kind) in PAGE.items():
        answer = raw(
            server.port, f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\nConnection: close\r\n\r\n".encode()
        )
        head = answer.partition(b"\r\n\r\n")[0].decode().lower()
        assert head.startswith("http/1.1 200")
        assert kind in head
        for name, value in HEADERS.items():
            assert f"{name}: {value}".lower() in head
    page = server.request("GET", "/")[1].decode()
    assert "http://" not in page
    assert "https://" not in page


@pytest.mark.parametrize(
    "path",
    [
        "/../server.py",
        "/..%2fserver.py",
        "/%2e%2e/%2e%2e/etc/passwd",
        "/page/play.js",
        "//etc/passwd",
        "/api/nothing",
        "/play.js/../../server.py",
        "/....//....//etc/passwd",
        "/C:/windows/win.ini",
        "/api/pictures/../../../etc/passwd",
    ],
)
def test_no_other_file_is_served(server: Client, path: str) -> None:
    status, found = server.request("GET", path)
    assert status == 404
    assert "Not Found" in found["error"]


@pytest.mark.parametrize("method", ["PUT", "DELETE", "PATCH", "OPTIONS"])
def test_other_methods_are_refused(server: Client, method: str) -> None:
    status, found = server.request(method, "/api/lesson", b"{}")
    assert status == 405
    assert "error" in found


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1", "127.0.0.1:1", "localhost.evil.example:80", ""])
def test_another_host_is_refused(server: Client, host: str) -> None:
    status, found = server.request("GET", "/", headers={"Host": host})
    assert status in (400, 403)
    assert status == 400 or "answers only as 127.0.0.1" in found["error"]


def test_two_hosts_and_no_host_are_refused(server: Client) -> None:
    right = f"Host: 127.0.0.1:{server.port}\r\n"
    for hosts in ("", right + "Host: evil.example\r\n"):
        answer = raw(server.port, f"GET / HTTP/1.1\r\n{hosts}Connection: close\r\n\r\n".encode())
        assert answer.split()[1] in (b"400", b"403")


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "https://127.0.0.1", "http://127.0.0.1:1"])
def test_another_origin_is_refused(server: Client, taught: str, origin: str) -> None:
    request = json.dumps({"act": "forget", "session": taught, "name": "hook"}).encode()
    status, found = server.request("POST", "/api/lesson", request, {"Origin": origin})
    assert status == 403
    assert "only the page" in found["error"]
    assert server.request("GET", "/api/status", headers={"Origin": origin})[0] == 403


def test_a_change_needs_an_origin_and_json(server: Client, taught: str) -> None:
    request = json.dumps({"act": "forget", "session": taught, "name": "hook"}).encode()
    lines = ["POST /api/lesson HTTP/1.1", f"Host: localhost:{server.port}", "Connection: close", "", ""]
    lines.insert(1, f"Content-Length: {len(request)}")
    assert raw(server.port, "\r\n".join(lines).encode() + request).startswith(b"HTTP/1.1 403")
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"):
        status, found = server.request("POST", "/api/lesson", request, {"Content-Type": kind})
        assert status == 415
        assert "application/json" in found["error"]


@pytest.mark.parametrize("content", [b"{", b"", b"[1, 2", b"\x00" * 50, b'{"act": "teach"}', b"null", b"[" * 900_000])
def test_malformed_requests_change_nothing(server: Client, taught: str, content: bytes) -> None:
    for path in ("/api/lesson", "/api/curriculum", "/api/session"):
        status, found = server.request("POST", path, content)
        assert status == 400
        assert found["error"]


def test_a_name_with_html_changes_nothing(server: Client, taught: str) -> None:
    for act in ("teach", "rename"):
        extra: dict[str, Any] = (
            {"drawing": DRAWING, "steps": 1, "replay": False} if act == "teach" else {"new_name": "<i>"}
        )
        name = "<script>alert(1)</script>" if act == "teach" else "hook"
        status, found = server.act(taught, act, name=name, **extra)
        assert status == 400
        assert "must not contain <, > or &" in found["error"]


def test_a_large_upload_is_refused(server: Client, taught: str) -> None:
    content = b'{"act": "' + b"x" * 50_000_000 + b'"}'
    status, found = server.request("POST", "/api/lesson", content)
    assert status == 413
    assert "at most 1,048,576 bytes" in found["error"]
    length = {"Transfer-Encoding": "chunked"}
    chunks = b"".join(b"100000\r\n" + b"y" * 0x100000 + b"\r\n" for _ in range(3)) + b"0\r\n\r\n"
    status, found = server.request("POST", "/api/lesson", chunks, length)
    assert status == 413


def half_sent(port: int) -> socket.socket:
    """Return a connection that has sent half of a request."""
    connection = socket.create_connection(("127.0.0.1", port), timeout=60)
    head = f"POST /api/lesson HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nOrigin: http://127.0.0.1:{port}\r\n"
    connection.sendall(f"{head}Content-Type: application/json\r\nContent-Length: 100\r\n\r\n{{".encode())
    return connection


def test_a_hundred_connections(server: Client, taught: str) -> None:
    with contextlib.ExitStack() as stack:
        held = [stack.enter_context(half_sent(server.port)) for _ in range(100)]
        assert server.act(taught, "show")[0] == 200
        for connection in held:
            connection.sendall(b"x" * 99)
        for connection in held:
            assert connection.recv(65536).startswith(b"HTTP/1.1 400")
    with ThreadPoolExecutor(100) as pool:
        recognise = lambda _: server.act(taught, "recognise", drawing=DRAWING, taught_only=False)  # noqa: E731
        answers = list(pool.map(recognise, range(100)))
    assert all(status in (200, 503) for status, _ in answers)
    assert sum(status == 200 for status, _ in answers) >= 50


def test_too_many_connections_get_a_clear_error(server: Client, taught: str) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(MOST_REQUESTS):
            stack.enter_context(half_sent(server.port))
        deadline = time.monotonic() + 10
        while (answer := server.act(taught, "show"))[0] == 200:
            assert time.monotonic() < deadline
        assert answer[0] == 503
        assert "try again in a moment" in answer[1]["error"]
    deadline = time.monotonic() + 10
    while server.act(taught, "show")[0] != 200:
        assert time.monotonic() < deadline


def test_two_sessions_do_not_disturb_each_other(server: Client, taught: str) -> None:
    other = server.session()
    assert server.act(other, "show")[1] == {"taught": [], "undoable": 0}
    assert server.teach(other, "square", DRAWING)[1]["taught"][0]["name"] == "square"
    assert server.act(other, "rename", name="square", new_name="box")[0] == 200
    assert server.act(other, "forget", name="box")[0] == 200
    assert server.act(other, "forget", name="hook") == (
        409,
        {"error": "no character is called hook: it may have been forgotten already"},
    )


def test_a_session_that_is_not_held_is_refused(server: Client) -> None:
    status, found = server.act("z" * 22, "show")
    assert status == 404
    assert "reload the page" in found["error"]
    assert server.request("GET", f"/api/curriculum?session={'z' * 22}")[0] == 404
    assert server.request("GET", "/api/curriculum?session=../..")[0] == 400
    assert server.request("GET", "/api/curriculum")[0] == 400


def test_a_tab_keeps_its_session_and_the_oldest_ends(server: Client) -> None:
    first = server.session()
    assert server.post("/api/session", {"session": first})[1] == {"session": first, "curriculum": False}
    for _ in range(MOST_SESSIONS):
        server.session()
    assert server.act(first, "show")[0] == 404
    assert server.post("/api/session", {"session": first})[1]["session"] != first


def test_saving_and_loading(server: Client) -> None:
    session, other = server.session(), server.session()
    for number in range(3):
        server.teach(session, f"character {number}", blank(100 + 50 * number), replay=number > 0)
    saved = server.act(session, "save")[1]
    assert saved["format"] == "hebbian-play"
    status, found = server.act(other, "load", lesson=json.loads(json.dumps(saved)))
    assert status == 200
    assert [each["name"] for each in found["taught"]] == [f"character {number}" for number in range(3)]
    assert server.act(other, "save")[1] == saved
    answers = [server.act(each, "recognise", drawing=DRAWING, taught_only=False) for each in (session, other)]
    assert answers[0] == answers[1]
    assert server.act(other, "load", lesson={"format": "pickle"})[0] == 400
    assert server.act(other, "save")[1] == saved
    assert server.act(other, "undo")[1]["taught"] == []


def test_a_review_of_old_characters(server: Client, taught: str) -> None:
    status, found = server.act(taught, "review")
    assert status == 200
    assert found["of"] == 40
    assert all(0 <= found["right"][name] <= 40 for name in ("before", "plain", "hebbian"))


def test_an_abandoned_curriculum_ends_while_others_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        service = Service(["true"], lambda values: ["true"], lambda: False)
        monkeypatch.setattr("hebbian_softmax.lab.play.server.ALONE_SECONDS", 0.04)
        for name in "ab":
            service.curricula[name] = Curriculum(["sleep", "60"])
            service.curricula[name].alone_since -= 1
        stop = Curriculum.stop

        async def stop_slowly(curriculum: Curriculum) -> None:
            service.curricula[str(len(service.curricula))] = Curriculum(["true"])
            await stop(curriculum)

        monkeypatch.setattr(Curriculum, "stop", stop_slowly)
        cleaner = asyncio.create_task(service._clean())
        await asyncio.sleep(0.2)
        assert not cleaner.done()
        assert all(service.curricula[name].over for name in "ab")
        cleaner.cancel()

    asyncio.run(scenario())


@pytest.mark.parametrize(("port", "host", "taken"), [(80, "localhost", True), (8517, "localhost", False)])
def test_the_usual_port_may_be_left_out(port: int, host: str, taken: bool) -> None:
    scope = {"type": "http", "method": "GET", "headers": [(b"host", host.encode())]}

    async def nothing(scope: Any, receive: Any, send: Any) -> None: ...

    assert (Guard(nothing, port).refusal(scope) is None) == taken


def test_no_curriculum_is_a_clear_answer(server: Client) -> None:
    session = server.session()
    for act in ("pause", "resume", "stop"):
        status, found = server.post("/api/curriculum", {"act": act, "session": session})
        assert status == 409
        assert "start one first" in found["error"]
    assert server.request("GET", f"/api/curriculum?session={session}")[0] == 409


def children(pid: int) -> list[int]:
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(each) for each in found]


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc").exists(), reason="needs Linux's list of processes")
def test_the_server_answers_while_it_trains_and_when_its_worker_dies(tmp_path: Path) -> None:
    with serving(tmp_path) as client:
        spent = []
        while not client.request("GET", "/api/status")[1]["ready"]:
            began = time.perf_counter()
            status, _ = client.request("GET", "/play.css")
            spent.append(time.perf_counter() - began)
            assert status == 200
            time.sleep(0.02)
        assert len(spent) > 20
        assert statistics.median(spent) < 0.1
        session, watching = client.session(), client.session()
        start = {"act": "start", "session": watching, "gamma": 0.1, "limit": 50, "steps": 10_000, "seed": 0}
        assert client.post("/api/curriculum", start)[0] == 200
        with contextlib.closing(client.events(watching)) as events:
            while next(events)["event"] != "check":
                pass
            spent = []
            for _ in range(30):
                began = time.perf_counter()
                assert client.act(session, "recognise", drawing=DRAWING, taught_only=False)[0] == 200
                spent.append(time.perf_counter() - began)
            assert statistics.median(spent) < 0.1
            assert client.post("/api/curriculum", {"act": "pause", "session": watching})[0] == 200
            assert any(event["event"] == "pause" for event in events)
        # It sees nothing of the other tab's curriculum.
        assert client.request("GET", f"/api/curriculum?session={session}")[0] == 409
        listed = subprocess.run(["pgrep", "-f", f"toy serve {client.port}"], capture_output=True, text=True).stdout
        (server,) = (int(pid) for pid in listed.split())
        for pid in children(server):
            os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + 20
        while client.request("GET", "/api/status")[1]["error"] is None:
            assert time.monotonic() < deadline
        status, found = client.act(session, "show")
        assert status == 503
        assert "start hebbian play again" in found["error"]
