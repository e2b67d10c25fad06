"""The same bits every time, also on a GPU."""

import contextlib
import os
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def deterministic(wanted: bool) -> Iterator[None]:
    """Ask torch for algorithms whose results do not depend on timing; one that has none raises.

    The rule's own kernels and the fused loss are deterministic anyway.
    """
    if not wanted:
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS and cuDNN's LSTM read it when they start
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
