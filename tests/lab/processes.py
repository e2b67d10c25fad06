"""Processes that run `hebbian`, or some other work that ends in an exit code."""

import os
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from hebbian_softmax.lab.cli import main
from tests.forks import fork

STREAMS = ("stdout", "stderr")


def start(work: Callable[..., int], *arguments: Any) -> BaseProcess:
    """Start a process that exits with the code that `work` returns."""
    return fork(_exit, work, *arguments)


def _exit(work: Callable[..., int], *arguments: Any) -> None:
    sys.exit(work(*arguments))


def hebbian(words: Sequence[str], folder: Path, stdout: str = "file", stderr: str = "file") -> int:
    """Run `hebbian`. Each stream is a file of its name in `folder`, or it is closed, full, or unread."""
    for number, (name, kind) in enumerate(zip(STREAMS, (stdout, stderr), strict=True), 1):
        if kind == "closed":
            os.close(number)
            setattr(sys, name, None)
            continue
        if kind == "unread":
            reader, target = os.pipe()
            os.close(reader)
        else:
            target = os.open("/dev/full" if kind == "full" else folder / name, os.O_WRONLY | os.O_CREAT, 0o600)
        os.dup2(target, number)
        setattr(sys, name, os.fdopen(number, "w", closefd=False))
    return main(words)


def run_hebbian(words: Sequence[object], folder: Path, **streams: str) -> tuple[int | None, str, str]:
    """Run `hebbian` in a process; return its exit code and what it wrote to the streams that are files."""
    process = start(hebbian, [str(word) for word in words], folder, *(streams.get(name, "file") for name in STREAMS))
    process.join(120)
    output, errors = (path.read_text() if (path := folder / name).exists() else "" for name in STREAMS)
    return process.exitcode, output, errors


def wait_for(folder: Path, pattern: str, process: BaseProcess) -> None:
    """Wait until a file appears that the process writes."""
    deadline = time.monotonic() + 60
    while not list(folder.glob(pattern)):
        assert time.monotonic() < deadline, f"{pattern} did not appear"
        assert process.is_alive()
        time.sleep(0.005)
