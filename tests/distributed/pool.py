"""Worker processes that run a function on every rank of a gloo group.

The processes are started once and kept; each run makes a process group of its own and destroys it. A rank that raises
fails the run with its traceback; ranks that hang are killed, and the next run starts new ones.
"""

from __future__ import annotations

import os
import pickle
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.forks import CONTEXT, fork

TIMEOUT = 180.0 if Path("/proc/driver/nvidia").exists() else 60.0
"""Seconds a run may take before it counts as hanging; on a GPU all ranks compile kernels first. To ask torch for a GPU
here would keep the ranks, which are forked, from using it."""

_GRACE = 2.0
"""Seconds that the other ranks get to finish once one has failed: most of them wait for it in vain."""


class WorkerError(AssertionError):
    """A rank raised, died or hung."""


class Pool:
    def __init__(self, timeout: float = TIMEOUT) -> None:
        self.timeout = timeout
        self._workers: list[tuple[Any, Connection]] = []
        self._stores = tempfile.TemporaryDirectory(prefix="hebbian-stores-")
        self._runs = 0

    def run(self, world_size: int, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Run ``function(*args, **kwargs)`` on every rank of a new group; return the results by rank.

        The function must be importable (module level), arguments and results plain data or CPU tensors.
        """
        while len(self._workers) < world_size:
            self._workers.append(_start())
        self._runs += 1
        store = str(Path(self._stores.name) / str(self._runs))
        connections = [connection for _process, connection in self._workers[:world_size]]
        for rank, connection in enumerate(connections):
            connection.send_bytes(pickle.dumps((rank, world_size, store, function, args, kwargs)))
        results, problems = self._collect(connections)
        if problems:
            self.close()
            raise WorkerError("\n".join(problems))
        return results

    def _collect(self, connections: list[Connection]) -> tuple[list[Any], list[str]]:
        results: list[Any] = [None] * len(connections)
        open_ranks = dict(zip(connections, range(len(connections)), strict=True))
        problems: list[str] = []
        deadline = time.monotonic() + self.timeout
        while open_ranks:
            ready = wait(list(open_ranks), max(0.0, deadline - time.monotonic()))
            if not ready:
                waited = "any longer" if problems else f"for {self.timeout:g} s"
                return results, [*problems, f"ranks {sorted(open_ranks.values())} did not answer {waited}"]
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = open_ranks.pop(connection)
                try:
                    ok, value = pickle.loads(connection.recv_bytes())
                except EOFError:
                    ok, value = False, "the process died"
                if ok:
                    results[rank] = value
                else:
                    problems.append(f"rank {rank} of {len(connections)}:\n{value}")
                    deadline = min(deadline, time.monotonic() + _GRACE)
        return results, problems

    def close(self) -> None:
        for process, connection in self._workers:
            connection.close()
            process.kill()
            process.join()
        self._workers = []

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
        self._stores.cleanup()


def _start() -> tuple[Any, Connection]:
    ours, theirs = CONTEXT.Pipe()
    process = fork(_serve, theirs, daemon=True)
    theirs.close()
    return process, ours


def _serve(connection: Connection) -> None:
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # the host's name may not resolve
    with suppress(EOFError, KeyboardInterrupt):
        while True:
            rank, world_size, store, function, args, kwargs = pickle.loads(connection.recv_bytes())
            connection.send_bytes(pickle.dumps(_run(rank, world_size, store, function, args, kwargs)))


def _run(
    rank: int, world_size: int, store: str, function: Callable[..., Any], args: Any, kwargs: Any
) -> tuple[bool, Any]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            # Ranks that start together may make torch's folder of kernels at the same moment.
            warnings.filterwarnings("ignore", message="Specified kernel cache directory could not be created")
            dist.init_process_group(
                "gloo",
                store=dist.FileStore(store, world_size),
                rank=rank,
                world_size=world_size,
                timeout=timedelta(seconds=TIMEOUT),
            )
            try:
                torch.manual_seed(0)
                result = function(*args, **kwargs)
                dist.barrier()  # nobody destroys the group while another still uses it
            finally:
                dist.destroy_process_group()
        return True, result
    except BaseException:
        return False, traceback.format_exc()
