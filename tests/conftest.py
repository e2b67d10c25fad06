"""Set-up of every test: one thread, repeatable examples, and a reason to skip where there is no GPU."""

import os
import signal

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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no CUDA device on this machine"))


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
