"""Learners at work, alone or many together.

On a GPU a step of this network is about a hundred kernels of a few microseconds, so a Python loop leaves the device
idle most of the time. Each learner's step is therefore recorded once as a CUDA graph, and its check as well; the graphs
of many learners are replayed in turn, each on a stream of its own, so that their small kernels run side by side. That
needs no stacked version of network, optimizer and rule (every learner runs the very code that a user runs), lets
learners with different settings mix, start and end at any time, and one process holds the images once.

On a CPU each learner has a thread of its own, which computes on one core: learners scale better than operators, and
the numbers do not depend on how many cores there are.
"""

import copy
import os
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from hebbian_softmax.lab.base.console import say
from hebbian_softmax.lab.base.errors import reason
from hebbian_softmax.lab.images.curriculum import ADDED
from hebbian_softmax.lab.images.learner import Learner

WARM_UP = 3  # steps before a recording: libraries choose their algorithms, the optimizer makes its state
CAPACITIES = (64, 128, 192, 256, 384, 512, 768, 1024, 1536)  # classes that a recorded check is made for

T = TypeVar("T")


class Runner(Protocol):
    """Drives one learner. Nothing waits for the device but `read`, `loss` and `finish`."""

    learner: Learner

    def steps(self, count: int) -> None:
        """Take training steps."""

    def check(self) -> None:
        """Test, and go up a level if it is time to."""

    def read(self) -> tuple[float, int]:
        """The oldest check that was not read yet: its accuracy, and the classes after it."""

    def loss(self) -> Tensor:
        """Of the last step, to be used on the current stream."""

    def finish(self) -> None:
        """Wait until all of it is done."""

    def close(self) -> None:
        """Finish, and give back the device's memory: the learner stays, the runner is of no use any more."""


class Eager:
    """Plain PyTorch, operation by operation."""

    def __init__(self, learner: Learner) -> None:
        self.learner = learner
        self._classes = int(learner.active)
        self._unread: deque[tuple[float, int]] = deque()

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.learner.step()

    def check(self) -> None:
        self.learner.check(self._classes)
        accuracy, classes = self.learner.outcome.tolist()
        self._classes = int(classes)
        self._unread.append((accuracy, self._classes))

    def read(self) -> tuple[float, int]:
        return self._unread.popleft()

    def loss(self) -> Tensor:
        return self.learner.loss.clone()

    def finish(self) -> None:
        if self.learner.device.type == "cuda":
            torch.cuda.synchronize(self.learner.device)

    def close(self) -> None:
        self.finish()


class Graphed:
    """CUDA graphs of a step and of a check, on a stream of their own. The learner is as it was after recording them."""

    def __init__(self, learner: Learner) -> None:
        self.learner = learner
        self.stream = torch.cuda.Stream(learner.device)
        # Its graphs run one after the other and leave their outcome in the learner's own tensors: one memory will do.
        self._pool = torch.cuda.graph_pool_handle()
        self._classes = int(learner.active)
        self._checks: dict[int, torch.cuda.CUDAGraph] = {}
        self._unread: deque[tuple[torch.cuda.Event, Tensor]] = deque()
        self.stream.wait_stream(torch.cuda.current_stream(learner.device))
        draws = learner.generator.get_state()
        with torch.cuda.stream(self.stream):
            before = [tensor.clone() for tensor in learner.tensors()]
            optimizer = {
                parameter: {name: value.clone() for name, value in state.items()}
                for parameter, state in learner.optimizer.state.items()
            }
            for _ in range(WARM_UP):
                learner.step()
        self.stream.synchronize()
        self._step = self.record(learner.step)
        with torch.cuda.stream(self.stream), torch.no_grad():
            for tensor, value in zip(learner.tensors(), before, strict=True):
                tensor.copy_(value)
            for parameter, state in learner.optimizer.state.items():
                for name, value in state.items():
                    saved = optimizer.get(parameter, {}).get(name)
                    value.zero_() if saved is None else value.copy_(saved)  # RMSProp starts from zeros
        learner.generator.set_state(draws)
        self._check_for(self._classes)

    def record(self, work: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """A graph of `work`, to be replayed on this stream."""
        graph = torch.cuda.CUDAGraph()
        graph.register_generator_state(self.learner.generator)
        # Not torch.cuda.graph(): it waits for all streams and collects garbage, a tenth of a second for each recording.
        with torch.cuda.stream(self.stream):
            graph.capture_begin(self._pool, capture_error_mode="thread_local")
            try:
                work()
            finally:
                graph.capture_end()
        return graph

    def _check_for(self, classes: int) -> torch.cuda.CUDAGraph:
        """The graph of a check that holds so many classes; recorded when it is first needed."""
        total = self.learner.total
        capacity = next((size for size in CAPACITIES if classes <= size < total), total)
        if capacity not in self._checks:
            with torch.cuda.stream(self.stream):
                self.learner.right_answers(capacity)
            self._checks[capacity] = self.record(lambda: self.learner.check(capacity))
        return self._checks[capacity]

    def steps(self, count: int) -> None:
        with torch.cuda.stream(self.stream):
            for _ in range(count):
                self._step.replay()

    def check(self) -> None:
        # Checks not read yet may each have added a level.
        graph = self._check_for(min(self._classes + ADDED * len(self._unread), self.learner.total))
        with torch.cuda.stream(self.stream):
            graph.replay()
            outcome = torch.empty(2, pin_memory=True)
            outcome.copy_(self.learner.outcome, non_blocking=True)
            done = torch.cuda.Event()
            done.record()
        self._unread.append((done, outcome))

    def read(self) -> tuple[float, int]:
        done, outcome = self._unread.popleft()
        done.synchronize()
        accuracy, classes = outcome.tolist()
        self._classes = int(classes)
        return accuracy, self._classes

    def loss(self) -> Tensor:
        torch.cuda.current_stream(self.learner.device).wait_stream(self.stream)
        value = self.learner.loss.clone()
        self.stream.wait_stream(torch.cuda.current_stream(self.learner.device))
        return value

    def finish(self) -> None:
        self.stream.synchronize()

    def close(self) -> None:
        """The memory of graphs, about a gigabyte, would otherwise stay until Python happens to collect the learner."""
        self.finish()
        self.learner.optimizer.zero_grad(set_to_none=True)  # gradients lie in the memory of the graphs
        for graph in (self._step, *self._checks.values()):
            graph.reset()
        self._checks.clear()
        self._unread.clear()


def start(learner: Learner) -> Runner:
    """A runner of the learner: with graphs where it can be, else, with a note, without."""
    if learner.device.type != "cuda" or not learner.method.capturable:
        return Eager(learner)
    before = copy.deepcopy(learner.state_dict())
    try:
        return Graphed(learner)
    except RuntimeError as error:
        say(f"note: no CUDA graph, so training is slower ({reason(error)})")
        learner.load_state_dict(before)
        return Eager(learner)


class Threads:
    """Does the same with several runners: in threads on a CPU, one after the other on a GPU, which needs no more."""

    def __init__(self, device: torch.device | str, most: int) -> None:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self.size = max(1, min(cores, most)) if torch.device(device).type == "cpu" else 1
        self._pool: ThreadPoolExecutor | None = None

    def __enter__(self) -> "Threads":
        if self.size > 1:
            self._pool = ThreadPoolExecutor(self.size, initializer=torch.set_num_threads, initargs=(1,))
        return self

    def __exit__(self, *_: Any) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def each(self, work: Callable[[Any], T], items: Iterable[Any]) -> list[T]:
        """`work(item)` for each item, in their order."""
        return list(map(work, items) if self._pool is None else self._pool.map(work, items))


def finish_all(runners: Sequence[Runner]) -> None:
    for runner in runners:
        runner.finish()
