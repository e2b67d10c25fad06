"""Try the installed package in an environment that has nothing else: `python -I tests/clean_install.py README.md`.

`make package` runs this with the wheel that it has built. It needs no pytest, which a clean environment does not have.
"""

import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

ALSO_THERE = {"hebbian-softmax", "pip", "setuptools"}


def needed(name: str, found: set[str]) -> set[str]:
    """Return the installed packages that a package needs, with those that they need, and so on."""
    for line in metadata.requires(name) or []:
        requirement = re.split(r"[^A-Za-z0-9._-]", line)[0].lower().replace("_", "-")
        if "extra ==" not in line and requirement not in found and requirement in installed():
            found.add(requirement)
            needed(requirement, found)
    return found


def installed() -> set[str]:
    """Return the names of all packages in this environment."""
    return {each.metadata["Name"].lower().replace("_", "-") for each in metadata.distributions()}


def check_environment() -> None:
    """Check that nothing is here but the package, torch and what torch needs."""
    more = installed() - ALSO_THERE - needed("torch", {"torch"})
    assert not more, f"the environment is not clean: {sorted(more)}"
    assert needed("hebbian-softmax", set()) == needed("torch", {"torch"}), "the library needs more than torch"


def check_metadata() -> None:
    """Check what a package index shows."""
    import hebbian_softmax

    about = metadata.metadata("hebbian-softmax")
    assert Path(hebbian_softmax.__file__).is_relative_to(sys.prefix), f"not the wheel: {hebbian_softmax.__file__}"
    assert about["Version"] == hebbian_softmax.__version__
    named = "Author", "Classifier", "Keywords", "License-Expression", "Project-URL", "Requires-Python", "Summary"
    for field in named:
        assert about[field], f"the metadata lacks {field}"
    assert about["Description-Content-Type"] == "text/markdown"
    text = about.get_payload()
    assert isinstance(text, str)
    assert "HebbianSoftmax" in text
    relative = re.findall(r"\]\((?![a-z]+:|#)[^)]*\)", text)
    assert not relative, f"links that a package index cannot follow: {relative}"


def check_readme(readme: Path) -> None:
    """Run the README's Python, as one program."""
    blocks = re.findall(r"```python\n(.*?)```", readme.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert len(blocks) >= 2
    namespace: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, str(readme), "exec"), namespace)


def check_command() -> None:
    """Check that the command without its extra says what is missing."""
    hebbian = str(Path(sys.executable).with_name("hebbian"))
    done = subprocess.run([hebbian, "--help"], capture_output=True, text=True, check=True)
    assert "compare" in done.stdout
    done = subprocess.run([hebbian, "compare", "glyphs"], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "[lab]" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr, done.stderr


if __name__ == "__main__":
    check_environment()
    check_metadata()
    check_readme(Path(sys.argv[1]))
    check_command()
    print(f"hebbian-softmax {metadata.version('hebbian-softmax')} works with torch {metadata.version('torch')} alone")
