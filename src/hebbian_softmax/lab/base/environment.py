"""The versions and the hardware that a result was measured with, as plain values for JSON."""

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path

import torch

import hebbian_softmax


def versions() -> dict[str, str]:
    """Return the versions that numbers depend on."""
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
    """Return the processor, its usable cores, torch's threads and the visible GPUs."""
    has_affinity = hasattr(os, "sched_getaffinity")
    return {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1,
        "threads": torch.get_num_threads(),
        "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        "system": f"{platform.system()} {platform.machine()}",
    }


def commit(file: Path = Path(__file__)) -> str:
    """Return the commit of this project's checkout, marked if changed since, or ``unknown`` if this is not one.

    If the package is installed inside another project's checkout, git does not track this `file` there.
    """

    def git(*arguments: str) -> str:
        try:
            command = ["git", *arguments]
            return subprocess.run(command, cwd=file.parent, capture_output=True, text=True).stdout.strip()
        except OSError:  # there is no git
            return ""

    return (git("describe", "--always", "--dirty", "--exclude", "*") if git("ls-files", file.name) else "") or "unknown"


def _cpu_name() -> str:
    """Return the name of the processor."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:  # not Linux
        pass
    return platform.processor() or platform.machine()
