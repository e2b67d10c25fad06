"""A process of the study, which trains what it finds in a queue."""

from __future__ import annotations

import queue
import time
import traceback
from pathlib import Path
from typing import Any

import torch

from benchmarks.rule_study import images
from benchmarks.rule_study.fleet import shape_of, train_fleet
from benchmarks.rule_study.train import Trial, train

Given = dict[str, Any]
"""A trial as it stands in the file of trials."""


def work(todo: Any, done: Any, device: str, data: Path | None, deadline: float, least: float) -> None:
    """Train the fleets of the queue ``todo`` until it is empty or the time is over; results go to ``done``."""
    while time.time() + least < deadline:
        try:
            some: list[Given] = todo.get(timeout=1)
        except queue.Empty:
            return
        try:
            if "task" in some[0]:
                results = [images.train(images.Trial.of(some[0]), deadline)]
            elif shape_of(Trial.of(some[0])) is None:
                results = [train(Trial.of(some[0]), device, data, deadline)]
            else:
                results = train_fleet([Trial.of(given) for given in some], device, data, deadline)
        except TimeoutError:
            continue
        except Exception:
            results = [{"error": traceback.format_exc()[-2000:]} for _ in some]
        for given, result in zip(some, results, strict=True):
            done.put({"given": given} | result)
        if device == "cuda":
            torch.cuda.empty_cache()
