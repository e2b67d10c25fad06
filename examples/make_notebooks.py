"""Makes the notebooks in examples/notebooks from three of the scripts, with nothing but the standard library.

    python examples/make_notebooks.py            # write them
    python examples/make_notebooks.py --check    # say whether they are what the scripts give, and write nothing

A line `# %%` in a script begins a cell of code, and `# %% [markdown]` a cell of text, whose lines are comments in the
script. The docstring is the first cell. The body of `main` comes without its indentation, so that the notebook goes
through it cell by cell; the options of the command line are then the list `arguments`.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
SCRIPTS = ("long_tail", "new_tokens", "language_model")
MARK = re.compile(r"# %%( \[markdown\])?$")
ARGUMENTS = 'arguments: list[str] = []  # what the script would be given, for instance ["--quick"]'


def notebook(source: str, name: str) -> dict[str, Any]:
    """Return the notebook of a script, in the format 4.5."""
    docstring = ast.get_docstring(ast.parse(source))
    if docstring is None:
        raise ValueError(f"examples/{name}.py needs a docstring, which becomes the first cell")
    title = name.replace("_", " ").capitalize()
    cells = [("markdown", f"# {title}\n\n{docstring}\n\nThis notebook is made from examples/{name}.py.")]
    cells += [(kind, text) for kind, text in _cells(source) if text]
    return {
        "cells": [_cell(kind, text, f"{name}-{number}") for number, (kind, text) in enumerate(cells)],
        "metadata": {
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
        },
        "nbformat": 4,
        "nbformat_minor": 5,
    }


def _cells(source: str) -> list[tuple[str, str]]:
    """Return the kind and the text of each cell; what comes before the first mark and after `main` is left out."""
    found: list[tuple[str, list[str]]] = []
    inside_main = False
    for line in source.splitlines():
        if line.startswith('if __name__ == "__main__":'):
            break
        if line.startswith("def main("):
            inside_main, line = True, ARGUMENTS
        elif inside_main:
            line = line.removeprefix("    ")
        mark = MARK.match(line)
        if mark:
            found.append(("markdown" if mark[1] else "code", []))
        elif found:
            kind, lines = found[-1]
            lines.append(re.sub(r"^# ?", "", line) if kind == "markdown" else line)
    return [(kind, "\n".join(lines).strip("\n")) for kind, lines in found]


def _cell(kind: str, text: str, name: str) -> dict[str, Any]:
    cell: dict[str, Any] = {"cell_type": kind, "id": name, "metadata": {}, "source": text.splitlines(keepends=True)}
    return cell if kind == "markdown" else cell | {"execution_count": None, "outputs": []}


def rendered(name: str) -> str:
    """Return the file of a notebook as text."""
    source = (HERE / f"{name}.py").read_text(encoding="utf-8")
    return json.dumps(notebook(source, name), indent=1, ensure_ascii=False) + "\n"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a notebook is not up to date")
    options = parser.parse_args(arguments)
    old = []
    for name in SCRIPTS:
        path = HERE / "notebooks" / f"{name}.ipynb"
        text = rendered(name)
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            old.append(f"examples/notebooks/{path.name}")
            if not options.check:
                path.parent.mkdir(exist_ok=True)
                path.write_text(text, encoding="utf-8")
    if options.check and old:
        raise SystemExit(f"not up to date: {', '.join(old)}; run: python examples/make_notebooks.py")
    print(f"wrote {', '.join(old)}" if old else "all notebooks are up to date", file=sys.stderr)


if __name__ == "__main__":
    main()
