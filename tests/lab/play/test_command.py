"""`hebbian play` on the command line."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from hebbian_softmax.lab.cli import main
from hebbian_softmax.lab.play.command import HOST, bound, worker
from tests import ROOT


def test_a_port_in_use_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with bound(0) as listening:
        assert listening.getsockname()[0] == HOST == "127.0.0.1"
        port = listening.getsockname()[1]
        assert main(["play", "--no-open", "--port", str(port)]) == 1
    assert f"error: port {port} cannot be used" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["starlette", "uvicorn"])
def test_what_is_missing_is_named(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    assert main(["play", "--no-open"]) == 1
    assert "pip install 'hebbian-softmax[play]'" in capsys.readouterr().err


def test_a_worker_gets_its_settings_as_json() -> None:
    command = worker("classroom", {"images": "glyphs", "seed": 3})
    assert command[-2] == "hebbian_softmax.lab.play.classroom"
    assert json.loads(command[-1]) == {"images": "glyphs", "seed": 3}


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_the_command_serves_until_it_is_stopped(tmp_path: Path, signum: signal.Signals) -> None:
    environment = {**os.environ, "HEBBIAN_CACHE": str(tmp_path), "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-m", "hebbian_softmax.lab.cli", "play", "--no-open", "--port", "0", "--steps", "2"]
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        line = process.stderr.readline()
        found = re.fullmatch(r"The page is at http://127\.0\.0\.1:(\d+)/ \(Ctrl-C ends it\)\n", line)
        assert found, line
        with socket.create_connection(("127.0.0.1", int(found[1])), timeout=60) as connection:
            connection.sendall(f"GET / HTTP/1.1\r\nHost: localhost:{found[1]}\r\n\r\n".encode())
            assert connection.recv(100).startswith(b"HTTP/1.1 200")
        process.send_signal(signum)
        assert process.wait(30) == 128 + signum
        assert process.stderr.read().endswith("hebbian: stopped\n")
