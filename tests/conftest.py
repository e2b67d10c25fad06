"""Set-up of every test: one thread, repeatable examples, and a reason to skip where there is no GPU."""

import gc
import os
import signal
from typing import Any

import pytest
import torch
from hypothesis import settings

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is imported: it then runs its kernels on the CPU

settings.register_profile("default", deadline=None, derandomize=True, max_examples=60, print_blob=True)
settings.load_profile("default")
torch.set_num_threads(1)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell sets it for what it runs in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)
gc.disable()  # until the tests are collected: what they import stays


def pytest_collection_finish() -> None:
    """Exempt torch and the test suite from garbage collection, which would take 0.3 s each time it goes over all."""
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no CUDA device on this machine"))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give all tests of several ranks to one worker, so that they share one pool of processes."""
    if config.getoption("dist") != "loadscope":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            ranks = "tests/distributed"
            return ranks if nodeid.startswith(f"{ranks}/") else super()._split_scope(nodeid)

    return Scheduling(config, log)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
