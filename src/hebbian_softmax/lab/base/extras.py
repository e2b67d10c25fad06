"""Packages that the lab needs and the library does not."""

import importlib.util

from hebbian_softmax.lab.base.errors import LabError

PACKAGES = {"PIL": "Pillow"}  # modules whose package has another name


def require(*modules: str) -> None:
    """Raise an error that says what to install, before hours of work and not after."""
    for module in modules:
        if importlib.util.find_spec(module) is None:
            package = PACKAGES.get(module, module)
            raise LabError(f"this command needs {package}: pip install 'hebbian-softmax[lab]'")
