"""The log as TensorBoard files, where TensorBoard is installed."""

import contextlib
import importlib.util
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from hebbian_softmax.lab.base.errors import LabError
from hebbian_softmax.lab.base.runs import Run

FOLDER = "tensorboard"


@contextlib.contextmanager
def board(run: Run, wanted: str) -> Iterator[Callable[[Mapping[str, Any]], object] | None]:
    """What the training loop calls with each record; None where nothing is to be written."""
    installed = importlib.util.find_spec("tensorboard") is not None
    if wanted == "yes" and not installed:
        raise LabError("--tensorboard yes needs TensorBoard: pip install 'hebbian-softmax[tensorboard]'")
    if wanted == "no" or not installed:
        yield None
        return
    writer: Any = None

    def write(record: Mapping[str, Any]) -> None:
        nonlocal writer
        if writer is None:
            from torch.utils.tensorboard import SummaryWriter

            # A resumed run writes the records after its checkpoint again: the older ones are dropped.
            writer = SummaryWriter(str(run.path / FOLDER), purge_step=record["step"])
        for name, value in record.items():
            if name != "step":
                writer.add_scalar(name, value, record["step"])
        writer.flush()

    try:
        yield write
    finally:
        if writer is not None:
            writer.close()
