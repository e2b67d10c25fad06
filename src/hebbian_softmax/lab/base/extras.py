"""Packages that the lab needs and the library does not."""

import importlib.util

from hebbian_softmax.lab.base.errors import LabError

PACKAGES = {"numpy": "numpy", "matplotlib": "matplotlib", "nltk": "nltk", "PIL": "Pillow", "rich": "rich"}
"""The packages of `pip install 'hebbian-softmax[lab]'` by the name of their module."""


def require(*modules: str) -> None:
    """Raise an error if one of the modules is missing: before hours of work, not after."""
    for module in modules:
        if importlib.util.find_spec(module) is None:
            raise missing(module)


def missing(module: str) -> LabError:
    """Return the error that says what to install."""
    return LabError(f"this command needs {PACKAGES[module]}: pip install 'hebbian-softmax[lab]'")
