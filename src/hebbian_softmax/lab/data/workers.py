"""A function over many inputs on all cores, results in order, with few inputs and results in memory at a time."""

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

AHEAD = 3  # inputs a process that wait or whose results wait


def cores() -> int:
    """The cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def in_order(function: Callable[[Input], Output], inputs: Iterable[Input], processes: int) -> Iterator[Output]:
    """`map(function, inputs)` with the work spread over processes. The results do not depend on their number.

    `function` must be importable by name. An error in it is raised here, and the processes end with this one.
    """
    # Forked, workers start at once and know what the parent has found out; a fresh interpreter would import torch
    # first. They touch neither torch nor threads of the parent, which is what newer Pythons warn about.
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
            "a worker process died, which mostly means that memory ran out: use fewer with --processes"
        ) from error
    except BaseException:  # an error, Ctrl-C, or nobody wants the rest: do not wait for work that may take minutes
        for process in multiprocessing.active_children():
            if process not in others:
                process.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _begin() -> None:
    """Leave signals to the parent, and do not outlive it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
