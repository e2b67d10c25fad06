"""A world is a folder with everything that a command reads and writes; commands run in it with relative paths.

So a world can be copied, disturbed and compared with another one. Commands are forks of a process that has torch and
the laboratory imported, so that a trial takes a fraction of a second; a fault hits the process that does the work.
"""

import contextlib
import errno
import os
import random
import resource
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal

from hebbian_softmax.lab.cli import main
from tests.forks import preload
from tests.lab import processes

LONGEST = 120.0  # seconds after which a command counts as hanging
STREAMS = ("stdout", "stderr")
COUNT = "operations"
ONE_AT_A_TIME = threading.Lock()  # starting a process takes the exit codes of all others, which can be taken once
CHANGES = {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "shutil.rmtree", "shutil.move"}
"""Audit events of Python that change files, besides `open` for writing."""

preload("nltk", "hebbian_softmax.lab.data.command", "hebbian_softmax.lab.report.command")
preload("hebbian_softmax.lab.language.memories.command", "hebbian_softmax.lab.language.experiments.curves")
preload(*(f"hebbian_softmax.lab.language.experiments.{name}" for name in ("wikitext_table", "reuters")))
preload(__name__, "tests.lab.faults.small")


@dataclass(frozen=True)
class Disturbance:
    """What happens at the file operation of this number: a kill, or the disk becomes full from there on.

    kill    SIGKILL
    create  no file or folder can be created any more
    write   no file can be longer than `size` bytes any more: part of what is written arrives
    """

    kind: Literal["kill", "create", "write"]
    operation: int
    size: int = 0


@dataclass(frozen=True)
class Ended:
    """A command that has ended: its exit code, what it printed, and how long it took."""

    code: int | None
    output: str
    errors: str
    seconds: float
    operations: int
    """How many operations changed files."""
    left: bool
    """Whether the command left a process of its own behind."""


def go(words: Sequence[str], world: Path, disturbance: Disturbance | None = None, kill_after: float = -1) -> Ended:
    """Run `hebbian` in a world until it ends, or kill it after some seconds."""
    with started(words, world, disturbance) as command:
        if kill_after >= 0:
            command.read(kill_after)
            command.kill()
        return command.finish()


class Command:
    """A command that is running. Its output goes through pipes, which a full disk does not stop."""

    def __init__(self, words: Sequence[str], world: Path, disturbance: Disturbance | None, side: Path) -> None:
        self.side = side
        self.began = time.monotonic()
        for name in STREAMS:
            os.mkfifo(side / name)
        self.ends = [os.open(side / name, os.O_RDONLY | os.O_NONBLOCK) for name in STREAMS]
        self.texts = dict.fromkeys(self.ends, b"")
        with ONE_AT_A_TIME:
            self.process: BaseProcess = processes.start(perform, list(words), str(world), str(side), disturbance)

    def read(self, seconds: float) -> None:
        """Collect the output until the process ends or the time is over."""
        deadline = time.monotonic() + seconds
        open_ends = set(self.ends)
        while (left := deadline - time.monotonic()) > 0:
            ready = wait([self.process.sentinel, *open_ends], left)
            open_ends -= {end for end in open_ends if end in ready and not self._take(end)}
            if self.process.sentinel in ready:
                return

    def _take(self, end: int) -> bool:
        """Take what a pipe holds; return whether more may come."""
        try:
            taken = os.read(end, 1 << 16)
        except BlockingIOError:
            return True
        self.texts[end] += taken
        return bool(taken)

    def kill(self) -> None:
        """Kill the process that does the work, if it still runs, and none of its children."""
        assert self.process.pid is not None
        if not wait([self.process.sentinel], 0):
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process.pid, signal.SIGKILL)

    def end(self) -> None:
        """Kill the process if it still runs, and take its exit code."""
        self.kill()
        wait([self.process.sentinel])
        with ONE_AT_A_TIME:
            self.process.join()

    def finish(self) -> Ended:
        """Wait for the end of the process, and for the end of the processes that it started."""
        self.read(LONGEST)
        hanging = not wait([self.process.sentinel], 0)
        self.end()
        seconds = time.monotonic() - self.began
        for end in self.ends:
            before = -1
            while len(self.texts[end]) > before:
                before = len(self.texts[end])
                self._take(end)
        output, errors = (self.texts[end].decode(errors="replace") for end in self.ends)
        count = self.side / COUNT
        operations = int(count.read_text() or 0) if count.exists() else 0
        code = None if hanging else self.process.exitcode
        return Ended(code, output, errors, seconds, operations, not self._group_ends())

    def _group_ends(self) -> bool:
        """Return whether all processes of the command are gone within some seconds; end them if they are not."""
        assert self.process.pid is not None
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            try:
                os.killpg(self.process.pid, 0)
            except ProcessLookupError:
                return True
            time.sleep(0.01)
        os.killpg(self.process.pid, signal.SIGKILL)
        return False

    def close(self) -> None:
        for end in self.ends:
            os.close(end)
        for path in self.side.iterdir():
            path.unlink()
        self.side.rmdir()


@contextlib.contextmanager
def started(words: Sequence[str], world: Path, disturbance: Disturbance | None = None) -> Iterator[Command]:
    """Start `hebbian` in a world; at the end of the block it is killed if it still runs."""
    number = 0
    while (side := world.with_name(f"{world.name}-streams-{number}")).exists():
        number += 1
    side.mkdir()
    command = Command(words, world, disturbance, side)
    try:
        yield command
    finally:
        command.end()
        command.close()


def perform(words: list[str], world: str, side: str, disturbance: Disturbance | None) -> int:
    """Carry out a command. This runs in a process of its own."""
    from tests.lab.faults import small

    os.setpgid(0, 0)
    for number, name in enumerate(STREAMS, 1):
        os.dup2(os.open(Path(side) / name, os.O_WRONLY), number)
        setattr(sys, name, os.fdopen(number, "w", closefd=False))
    count = os.open(Path(side) / COUNT, os.O_WRONLY | os.O_CREAT, 0o600)
    os.chdir(world)
    os.environ |= {"HEBBIAN_CACHE": "cache", "HEBBIAN_DATA": "data", "COLUMNS": "200"}
    os.environ["PATH"] = ""  # without git, which would be asked for the commit at the start of every run
    random.seed(0)  # checkpoints hold the state of this generator, which nothing here draws from
    small.offer()
    watch(disturbance, count, Path(world))
    return main(words)


def watch(disturbance: Disturbance | None, count: int, world: Path) -> None:
    """Count the operations of this process that change files of the world, and do harm at one of them."""
    me, seen, folder = os.getpid(), 0, f"{world}{os.sep}"

    def changes(event: str, arguments: tuple[Any, ...]) -> bool:
        if event != "open" and event not in CHANGES:
            return False
        path = arguments[0]
        if not isinstance(path, str | bytes | os.PathLike):
            return False
        if event == "open" and not arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            return False
        name = os.fsdecode(path)
        return os.getpid() == me and (not os.path.isabs(name) or name.startswith(folder))

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal seen
        if not changes(event, arguments):
            return
        seen += 1
        os.pwrite(count, str(seen).encode(), 0)
        if disturbance is None or seen < disturbance.operation:
            return
        if disturbance.kind == "kill":
            os.kill(me, signal.SIGKILL)
        elif disturbance.kind == "create" and event in ("open", "os.mkdir"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), os.fsdecode(arguments[0]))
        elif disturbance.kind == "write":
            resource.setrlimit(resource.RLIMIT_FSIZE, (disturbance.size, resource.RLIM_INFINITY))

    sys.addaudithook(hook)
