"""Where and when a measurement was made."""

from __future__ import annotations

import platform
import sys
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.new_tokens.features import WHEEL


def described(module: str) -> dict[str, Any]:
    """Return the command that runs ``module``, the date, the versions and the machine."""
    import transformers

    processor = platform.machine()
    if Path("/proc/cpuinfo").exists():
        models = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
        processor = models[0].partition(": ")[2] if models else processor
    arguments = [each if not each.startswith("/") else f"…/{Path(each).name}" for each in sys.argv[1:]]
    return {
        "command": " ".join([f"python -m {module}", *arguments]),
        "date": time.strftime("%Y-%m-%d"),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__, "model": WHEEL},
        "machine": f"{processor}, {torch.get_num_threads()} threads",
    }
