"""Packages that the lab needs and the library does not."""

import importlib.util

from hebbian_softmax.lab.base.errors import LabError

PACKAGES = {
    "numpy": "numpy",
    "matplotlib": "matplotlib",
    "nltk": "nltk",
    "PIL": "Pillow",
    "rich": "rich",
    "sklearn": "scikit-learn",
    "starlette": "Starlette",
    "uvicorn": "uvicorn",
}
"""The packages by the name of their module. Most come with `pip install 'hebbian-softmax[lab]'`."""

OTHER_EXTRAS = {"sklearn": "lab,digits", "starlette": "play", "uvicorn": "play"}
"""The extras that bring the other packages."""


def require(*modules: str) -> None:
    """Raise an error if one of the modules is missing: before hours of work, not after."""
    for module in modules:
        if importlib.util.find_spec(module) is None:
            raise missing(module)


def missing(module: str) -> LabError:
    """Return the error that says what to install."""
    extra = OTHER_EXTRAS.get(module, "lab")
    return LabError(
        f"this command needs {PACKAGES[module]}: pip install 'hebbian-softmax[{extra}]', or in a checkout of the "
        f"project pip install '.[{extra}]'"
    )
