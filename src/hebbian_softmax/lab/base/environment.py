"""What a result was measured with: versions and hardware, as plain values for JSON."""

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path

import torch

import hebbian_softmax


def versions() -> dict[str, str]:
    """The versions that numbers depend on."""
    found = {
        "hebbian-softmax": hebbian_softmax.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    if torch.version.cuda is not None:
        found["cuda"] = torch.version.cuda
    for name in ("numpy", "matplotlib"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def hardware() -> dict[str, str | int | list[str]]:
    """The processor, its usable cores, torch's threads and the GPUs in sight."""
    has_affinity = hasattr(os, "sched_getaffinity")
    return {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1,
        "threads": torch.get_num_threads(),
        "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        "system": f"{platform.system()} {platform.machine()}",
    }


def commit() -> str:
    """The checkout's commit, marked if changed since, or ``unknown`` where there is none.

    Installed into an environment that lies in somebody's checkout, it is not of that checkout.
    """
    return (_git("describe", "--always", "--dirty") if _git("ls-files", Path(__file__).name) else "") or "unknown"


def _git(*arguments: str) -> str:
    """What it says about where this file lies; nothing where there is no git or no checkout."""
    try:
        command = ["git", *arguments]
        asked = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    except OSError:  # no git
        return ""
    return asked.stdout.strip()


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:  # not Linux
        pass
    return platform.processor() or platform.machine()
