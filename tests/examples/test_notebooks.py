"""The notebooks are what their scripts give, are valid, and run."""

import json
import re
from typing import Any

import pytest
from examples.make_notebooks import HERE, SCRIPTS, main, notebook

SCRIPT = '''"""What it shows."""

# %%
import sys

# %% [markdown]
# ## A title
# Some *words*.


# %%
def main(arguments: list[str] | None = None) -> None:
    found = len(arguments or sys.argv)
    if found:
        print(found)

    # %%
    print("the end")


if __name__ == "__main__":
    main()
'''


def sources(found: dict[str, Any]) -> list[tuple[str, str]]:
    return [(cell["cell_type"], "".join(cell["source"])) for cell in found["cells"]]


def test_cells_are_what_is_between_the_marks() -> None:
    first, *rest = sources(notebook(SCRIPT, "a_script"))
    assert first == ("markdown", "# A script\n\nWhat it shows.\n\nThis notebook is made from examples/a_script.py.")
    assert rest[:2] == [("code", "import sys"), ("markdown", "## A title\nSome *words*.")]
    assert rest[2][1].splitlines()[0].startswith("arguments: list[str] = []")
    assert rest[2][1].splitlines()[1:] == [
        "found = len(arguments or sys.argv)",
        "if found:",
        "    print(found)",
    ]
    assert rest[3:] == [("code", 'print("the end")')]


def test_a_script_needs_a_docstring() -> None:
    with pytest.raises(ValueError, match="needs a docstring"):
        notebook("import sys", "a_script")


def test_the_notebooks_are_up_to_date() -> None:
    main(["--check"])


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_notebook_is_valid(name: str) -> None:
    """Checks what the schema of nbformat 4.5 demands of these cells."""
    found = json.loads((HERE / "notebooks" / f"{name}.ipynb").read_text(encoding="utf-8"))
    assert (found["nbformat"], found["nbformat_minor"]) == (4, 5)
    assert set(found) == {"cells", "metadata", "nbformat", "nbformat_minor"}
    identities = [cell["id"] for cell in found["cells"]]
    assert len(set(identities)) == len(identities)
    for cell in found["cells"]:
        assert re.fullmatch(r"[a-zA-Z0-9_-]{1,64}", cell["id"])
        more = {"outputs", "execution_count"} if cell["cell_type"] == "code" else set()
        assert set(cell) == {"cell_type", "id", "metadata", "source"} | more
        assert cell.get("outputs", []) == []
        if cell["cell_type"] == "code":
            compile("".join(cell["source"]), cell["id"], "exec")


@pytest.mark.slow  # the scripts, whose code this is, run in the default suite
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_notebook_runs(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    if name == "new_tokens":
        pytest.importorskip("transformers")
    namespace: dict[str, Any] = {"__name__": "__main__", "__doc__": None}
    found = json.loads((HERE / "notebooks" / f"{name}.ipynb").read_text(encoding="utf-8"))
    cells = [text for kind, text in sources(found) if kind == "code"]
    assert sum("arguments: list[str] = []" in text for text in cells) == 1
    for text in cells:
        small = text.replace("arguments: list[str] = []", 'arguments: list[str] = ["--quick"]')
        exec(compile(small, name, "exec"), namespace)
    assert len(capsys.readouterr().out.splitlines()) > 5
