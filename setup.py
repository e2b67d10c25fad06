"""The part of the package's description that pyproject.toml cannot compute: the README as package indexes show it."""

import re
import tomllib
from pathlib import Path

from setuptools import setup


def describe(readme: str, address: str | None) -> str:
    """Return the README with links that work outside of the repository.

    With the ``Repository`` of ``[project.urls]`` as ``address``, links to files become links into it. Without one there
    is nothing to link to: texts stay without their links, pictures are left out, and a last line says so.
    """
    local = r"\[([^\[\]]*)\]\((?![a-z]+:|#)([^()\s]+)\)"
    if address is not None:
        readme = re.sub(f"!{local}", rf"![\1]({address}/raw/main/\2)", readme)
        return re.sub(f"(?<!!){local}", rf"[\1]({address}/blob/main/\2)", readme)
    caption = r"(?:\*[^*]+\*\n*)?"
    readme = re.sub(local, r"\1", re.sub(rf"!{local}\n*{caption}", "", readme))
    return f"{readme}\nLinks to pictures, documents and measurements in the repository are left out here.\n"


if __name__ == "__main__":
    root = Path(__file__).parent
    urls = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"].get("urls", {})
    setup(
        long_description=describe((root / "README.md").read_text(encoding="utf-8"), urls.get("Repository")),
        long_description_content_type="text/markdown",
    )
