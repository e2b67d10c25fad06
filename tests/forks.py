"""Processes that begin with torch and the laboratory imported: forks of one server, which start in milliseconds."""

import gc
import multiprocessing
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from typing import Any

import torch

CONTEXT = multiprocessing.get_context("forkserver")  # It only imports, so forks share no lock that a thread holds.
_PRELOADED: list[str] = []


def preload(*modules: str) -> None:
    """Let the server import these modules, too; call this before the first process is forked."""
    _PRELOADED.extend(modules)
    CONTEXT.set_forkserver_preload(_PRELOADED)


preload("torch._dynamo", "tests.distributed.training")  # The first optimizer imports the former, in seconds.
preload("matplotlib.backends.backend_agg", "matplotlib.figure", "PIL.PngImagePlugin")
preload("hebbian_softmax.lab.longtail.compare", "hebbian_softmax.lab.images.reproduce")
preload("hebbian_softmax.lab.language.experiments.train")


def fork(work: Callable[..., None], *arguments: Any, daemon: bool = False) -> BaseProcess:
    """Start a process that calls `work`."""
    process = CONTEXT.Process(target=_work, args=(work, *arguments), daemon=daemon)
    process.start()
    return process


def _work(work: Callable[..., None], *arguments: Any) -> None:
    torch.set_num_threads(1)
    gc.freeze()  # what the server has imported stays
    work(*arguments)
