"""The library never imports the lab: whoever wants the layer alone gets the layer alone."""

import ast
from pathlib import Path

import hebbian_softmax

PACKAGE = Path(hebbian_softmax.__file__).parent


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{'.' * node.level}{node.module or ''}.{alias.name}" for alias in node.names}
    return found


def test_no_module_of_the_library_imports_the_lab() -> None:
    modules = [path for path in PACKAGE.rglob("*.py") if PACKAGE / "lab" not in path.parents]
    assert len(modules) > 5
    for path in modules:
        assert not [name for name in imports(path) if "lab" in name.split(".")], path
