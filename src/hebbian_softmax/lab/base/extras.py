"""Packages that the lab needs and the library does not."""

import importlib.util

from hebbian_softmax.lab.base.errors import LabError

PACKAGES = {"PIL": "Pillow"}  # where the name to import is not the name to install


def require(*modules: str) -> None:
    """Say what is missing before hours of work, not after."""
    for module in modules:
        if importlib.util.find_spec(module) is None:
            package = PACKAGES.get(module, module)
            raise LabError(f"this command needs {package}: pip install 'hebbian-softmax[lab]'")
