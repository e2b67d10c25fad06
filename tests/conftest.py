"""What every test needs: one thread, repeatable examples, and a reason where there is no GPU."""

import os

import pytest
import torch
from hypothesis import settings

from hebbian_softmax.write.gpu import sort as device_sort

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is imported: it then runs its kernels on the CPU

settings.register_profile("default", deadline=None, derandomize=True, max_examples=60, print_blob=True)
settings.load_profile("default")
torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="no CUDA device on this machine"))


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _torch_sorts_where_kernels_are_interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sort takes the interpreter a sixth of a second; test_device_sort.py runs its kernels."""
    if not torch.cuda.is_available():
        monkeypatch.setattr(device_sort, "_MOST", 0)
