"""Finding out whether the host waits for the device, and steps in a CUDA graph."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor


@contextmanager
def no_waiting() -> Iterator[None]:
    """Make every operation that waits for the GPU an error."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Synchronization debug mode is a prototype")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def make_steps(
    step: Callable[[], None], buffers: Sequence[Tensor], batches: Sequence[Sequence[Tensor]], graphed: bool
) -> None:
    """Copy each batch into the buffers and step; with ``graphed``, replay a graph from the fourth batch on."""
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    for number, batch in enumerate(batches):
        for buffer, values in zip(buffers, batch, strict=True):
            buffer.copy_(values)
        if number >= 3 and graphed:
            if number == 3:
                with torch.cuda.graph(graph):  # records, and runs nothing
                    step()
            graph.replay()
        else:
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                step()
            torch.cuda.current_stream().wait_stream(side)
