"""Several processes give the results of one, stop when they must, and leave no process behind."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from hebbian_softmax.lab.base.errors import LabError
from hebbian_softmax.lab.data.workers import AHEAD, cores, in_order


def square(number: int) -> int:
    time.sleep(0.02 * (number % 3))  # so that results come out of order
    return number * number


def fail_at_five(number: int) -> int:
    if number == 5:
        raise LabError("five is damaged")
    return number


def die(number: int) -> int:
    if number == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return number


def wait_long(number: int) -> int:
    time.sleep(60 * (number > 0))
    return number


@pytest.mark.parametrize("processes", [1, 2, 5])
def test_results_come_in_order(processes: int) -> None:
    assert list(in_order(square, range(20), processes)) == [number * number for number in range(20)]


def test_few_inputs_are_taken_ahead() -> None:
    taken = []

    def inputs() -> Iterator[int]:
        for number in range(1000):
            taken.append(number)
            yield number

    results = in_order(square, inputs(), 2)
    assert [next(results), next(results)] == [0, 1]
    assert len(taken) <= 2 * AHEAD + 2
    results.close()  # type: ignore[attr-defined]


def test_who_stops_does_not_wait_for_work_under_way() -> None:
    began, others = time.monotonic(), set(multiprocessing.active_children())  # started by other tests
    results = in_order(wait_long, range(10), 2)
    assert next(results) == 0
    results.close()  # type: ignore[attr-defined]
    assert time.monotonic() - began < 30
    assert set(multiprocessing.active_children()) <= others


@pytest.mark.parametrize("processes", [1, 2])
def test_an_error_is_raised_as_it_was(processes: int) -> None:
    results = in_order(fail_at_five, range(10), processes)
    assert [next(results) for _ in range(5)] == [0, 1, 2, 3, 4]
    with pytest.raises(LabError, match=r"^five is damaged$"):
        next(results)


def test_a_killed_worker_is_told() -> None:
    with pytest.raises(LabError, match=r"worker process died.*--processes"):
        list(in_order(die, range(10), 2))


def test_workers_end_with_a_killed_parent() -> None:
    script = (
        "import os, time\n"
        "from hebbian_softmax.lab.data.workers import in_order\n"
        "def work(number):\n"
        "    os.write(1, b'working\\n')\n"  # in one piece, because two workers print at the same time
        "    time.sleep(25)\n"
        "    os._exit(1)\n"  # a worker that outlives its parent ends here, so that the test ends
        "list(in_order(work, range(2), 2))\n"
    )
    began = time.monotonic()
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == parent.stdout.readline() == "working\n"
        parent.kill()
        assert parent.stdout.read() == ""  # returns once no worker holds the other end of the pipe
    assert time.monotonic() - began < 20


def test_cores_are_those_this_process_may_use() -> None:
    assert 1 <= cores() <= (os.cpu_count() or 1)
