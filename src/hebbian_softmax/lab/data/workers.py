"""Apply a function to many inputs on all cores: results come in order, and only a few of them are in memory."""

import multiprocessing
import os
import signal
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import TypeVar

from hebbian_softmax.lab.base.errors import LabError

Input = TypeVar("Input")
Output = TypeVar("Output")

AHEAD = 3  # inputs for each process that are submitted before their results are needed


def cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def in_order(function: Callable[[Input], Output], inputs: Iterable[Input], processes: int) -> Iterator[Output]:
    """Yield `map(function, inputs)` with the work spread over processes; their number does not change the results.

    `function` must be importable by name. Its errors are raised here, and the workers end with this process.
    """
    # Forked workers start at once and have the parent's caches; a fresh interpreter would have to import torch first.
    # Newer Pythons warn about forking because of the parent's threads, but the workers use neither these nor torch.
    if processes == 1 or "fork" not in multiprocessing.get_all_start_methods():
        yield from map(function, inputs)
        return
    others = multiprocessing.active_children()
    pool = ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("fork"), initializer=_begin)
    waiting: deque[Future[Output]] = deque()
    try:
        for item in inputs:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", category=DeprecationWarning, message=".*fork")
                waiting.append(pool.submit(function, item))
            if len(waiting) >= AHEAD * processes:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
        pool.shutdown()
    except BrokenProcessPool as error:
        raise LabError(
            "a worker process died, most likely because memory ran out: use fewer of them with --processes"
        ) from error
    except BaseException:
        # After an error or Ctrl-C, or when the caller stops early, work that may take minutes is not waited for.
        for process in multiprocessing.active_children():
            if process not in others:
                process.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _begin() -> None:
    """Let the parent handle signals, and end when the parent does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
