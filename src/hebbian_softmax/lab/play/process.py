"""A worker process and the pipe to it: one JSON object on each line, in both directions.

The server computes nothing itself, so that it always answers at once. Nothing is pickled.
"""

import asyncio
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from hebbian_softmax.lab.base.json_files import object_from_json, to_json
from hebbian_softmax.lab.play.requests import RefusedError

LONGEST = 1 << 24  # bytes of a line
PATIENCE = 120.0  # seconds that an answer may take
GRACE = 3.0  # seconds that a worker has to end by itself

Message = dict[str, Any]


class Worker:
    """The server's side: starts a worker, asks it, and hands on what it says unasked."""

    def __init__(self, command: Sequence[str], heard: Callable[[Message], None]) -> None:
        """`heard` gets every message that answers no question, and `{"event": "ended"}` when the worker has ended."""
        self.command, self.heard = command, heard
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None
        self._asked: dict[int, asyncio.Future[Message]] = {}
        self._number = 0

    async def start(self) -> None:
        pipes: dict[str, Any] = {"stdin": asyncio.subprocess.PIPE, "stdout": asyncio.subprocess.PIPE}
        self._process = await asyncio.create_subprocess_exec(*self.command, limit=LONGEST, **pipes)
        self._reader = asyncio.create_task(self._read())

    async def send(self, message: Message) -> None:
        """Send a message that needs no answer."""
        process = self._process
        if process is None or process.stdin is None or process.returncode is not None:
            raise RefusedError(503, "the process that does the work has ended: start hebbian play again")
        with contextlib.suppress(ConnectionError):  # the reader notices that the worker has ended
            process.stdin.write(to_json(message).encode() + b"\n")
            await process.stdin.drain()

    async def ask(self, message: Message) -> Message:
        """Return the answer to a message; raise a `RefusedError` if the worker refuses."""
        self._number += 1
        number, answer = self._number, asyncio.get_running_loop().create_future()
        self._asked[number] = answer
        try:
            await self.send({**message, "number": number})
            async with asyncio.timeout(PATIENCE):
                found: Message = await answer
        except TimeoutError:
            raise RefusedError(503, "this takes too long: try again in a moment") from None
        finally:
            self._asked.pop(number, None)
        if "error" in found:
            raise RefusedError(found["status"], found["error"])
        return found

    async def _read(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        while line := await self._process.stdout.readline():
            message = object_from_json(line)
            if "number" not in message:
                self.heard(message)
            elif (waiting := self._asked.get(message.pop("number"))) is not None and not waiting.done():
                waiting.set_result(message)
        await self._process.wait()
        for waiting in self._asked.values():
            if not waiting.done():
                waiting.set_result({"error": "the process that does the work has ended", "status": 503})
        self.heard({"event": "ended"})

    async def stop(self) -> None:
        """End the worker: politely by closing its input, and after some seconds by force."""
        process = self._process
        if process is None or process.stdin is None:
            return
        process.stdin.close()
        try:
            async with asyncio.timeout(GRACE):
                await process.wait()
        except TimeoutError:
            process.kill()
        if self._reader is not None:
            await self._reader


class Channel:
    """The worker's side: messages come on standard input and go to standard output.

    Ctrl-C in a terminal reaches all processes; a worker leaves it to the server, and ends when its input ends.
    """

    def __init__(self) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        self._output = os.fdopen(os.dup(1), "wb")
        os.dup2(2, 1)  # whatever prints something does not disturb the messages
        self._lock = threading.Lock()

    def send(self, message: Message) -> None:
        line = to_json(message).encode() + b"\n"
        with self._lock:
            self._output.write(line)
            self._output.flush()

    def messages(self) -> Iterator[Message]:
        """Yield each message until the server closes the pipe."""
        for line in sys.stdin.buffer:
            yield object_from_json(line)

    def end(self) -> None:
        """End this process at once, whatever its threads compute. Files are written whole or not at all."""
        with contextlib.suppress(OSError):
            self._output.flush()
        os._exit(0)
