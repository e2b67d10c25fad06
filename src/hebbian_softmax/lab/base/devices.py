"""The choice of a device by its name in the settings."""

import torch

from hebbian_softmax.lab.base.errors import LabError


def choose_device(name: str) -> torch.device:
    """Return the device that `name` stands for; `auto` means a GPU where there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise LabError("device is cuda, but torch finds no CUDA device: use --device cpu")
    return torch.device(name)
