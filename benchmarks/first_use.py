"""How long the first use of `hebbian play` takes, and how fast the page answers meanwhile.

Starts the command with an empty cache, so that it makes its images and trains its network, and asks for the page's
files every 50 ms until the network is ready. Then a curriculum is started, and a drawing is shown to the heads 200
times while it runs.

    python -m benchmarks.first_use [--images omniglot] [--json FILE]
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import http.client
import json
import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from hebbian_softmax.lab.base import environment
from hebbian_softmax.lab.base.files import write_atomic
from hebbian_softmax.lab.base.json_files import to_json

PAUSE = 0.05  # seconds between two requests
SHOWN = 200  # drawings


class Asking:
    """Sends requests to the page's server, and notes how long the answers took."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.seconds: list[float] = []

    def ask(self, path: str, value: Any = None) -> Any:
        """Return the answer, decoded if it is JSON."""
        began = time.perf_counter()
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)) as connection:
            if value is None:
                connection.request("GET", path)
            else:
                headers = {"Origin": f"http://127.0.0.1:{self.port}", "Content-Type": "application/json"}
                connection.request("POST", path, json.dumps(value), headers)
            answer = connection.getresponse()
            content = answer.read()
        self.seconds.append(time.perf_counter() - began)
        assert answer.status == 200, content
        return json.loads(content) if answer.headers.get_content_type() == "application/json" else content

    def milliseconds(self) -> dict[str, float]:
        """Return the median, the 95th percentile and the maximum so far, and begin anew."""
        found = sorted(1000 * each for each in self.seconds)
        self.seconds = []
        return {
            "answers": len(found),
            "median": statistics.median(found),
            "95 %": found[int(0.95 * len(found))],
            "maximum": found[-1],
        }


def measure(images: str, steps: int | None) -> dict[str, Any]:
    """Start the command, and measure it until its first curriculum."""
    with tempfile.TemporaryDirectory() as cache:
        words = ["play", "--no-open", "--port", "0", "--images", images]
        words += [] if steps is None else ["--steps", str(steps)]
        began = time.perf_counter()
        with subprocess.Popen(
            [sys.executable, "-m", "hebbian_softmax.lab.cli", *words],
            env={**os.environ, "HEBBIAN_CACHE": cache},
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            try:
                assert process.stderr is not None
                line = process.stderr.readline()
                found = re.search(r"127\.0\.0\.1:(\d+)", line)
                assert found, line
                asking = Asking(int(found[1]))
                asking.ask("/")
                page = time.perf_counter() - began
                while not (status := asking.ask("/api/status"))["ready"]:
                    assert status["error"] is None, status["error"]
                    asking.ask("/play.js")
                    time.sleep(PAUSE)
                ready, training = time.perf_counter() - began, asking.milliseconds()
                curriculum = beside_curriculum(asking)
            finally:
                process.terminate()
                process.wait()
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {
        "seconds_until_page": page,
        "seconds_until_ready": ready,
        "processor_seconds_of_everything": used.ru_utime + used.ru_stime,
        "load_average": os.getloadavg(),
        "milliseconds_while_training": training,
        "milliseconds_of_recognising_beside_a_curriculum": curriculum,
    }


def beside_curriculum(asking: Asking) -> dict[str, float]:
    """Start a curriculum, wait for its first check, and time the recognition of drawings in another session."""
    watching, session = (asking.ask("/api/session", {"session": None})["session"] for _ in range(2))
    start = {"act": "start", "session": watching, "gamma": 0.1, "limit": 50, "steps": 1000, "seed": 0}
    asking.ask("/api/curriculum", start)
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", asking.port, timeout=120)) as connection:
        connection.request("GET", f"/api/curriculum?session={watching}")
        for line in connection.getresponse():
            if line.startswith(b"event: check"):
                break
        drawing = asking.ask("/api/material")["ready_made"][0]["drawings"][0]
        asking.seconds = []
        for _ in range(SHOWN):
            asking.ask(
                "/api/lesson", {"act": "recognise", "session": session, "drawing": drawing, "taught_only": False}
            )
            time.sleep(PAUSE)
    return asking.milliseconds()


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", choices=["glyphs", "omniglot"], default="glyphs")
    parser.add_argument("--steps", type=int, help="training steps of the network (default: the command's)")
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    options = parser.parse_args(arguments)
    record = {
        "benchmark": "first_use",
        "images": options.images,
        "steps": options.steps,
        "date": datetime.date.today().isoformat(),
        "commit": environment.commit(),
        "versions": environment.versions(),
        "hardware": environment.hardware(),
        **measure(options.images, options.steps),
    }
    text = to_json(record, indent=1) + "\n"
    print(text, end="")
    if options.json:
        write_atomic(options.json, text.encode())


if __name__ == "__main__":
    main()
