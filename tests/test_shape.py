"""The shape of the house: which room may import which, and how large a file may be."""

import ast
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import hebbian_softmax
from hebbian_softmax.lab.experiments import MODULES

PACKAGE = Path(hebbian_softmax.__file__).parent
NAME = "hebbian_softmax"
LAB = f"{NAME}.lab"
EXPERIMENTS = {f"{LAB}.{room}" for room in ("images", "longtail", "language", "data", "play", "experiments")}
FILES = sorted(PACKAGE.rglob("*.py"))


def module_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES_BY_NAME = {module_of(path): path for path in FILES}


@cache
def tree_of(module: str) -> ast.Module:
    return ast.parse(MODULES_BY_NAME[module].read_text(encoding="utf-8"))


def running_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield all nodes of a syntax tree but for what stands under `if TYPE_CHECKING:`."""
    for node in ast.iter_child_nodes(tree):
        if not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)):
            yield node
            yield from running_nodes(node)


def imported(module: str) -> Iterator[tuple[str, str, str]]:
    """Yield each of our modules that a module imports, the name taken from it if any, and its local name.

    Imports inside functions count; those for the type checker alone do not.
    """
    for node in running_nodes(tree_of(module)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name in MODULES_BY_NAME:
                    yield alias.name, "", alias.asname or alias.name
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{module} has a relative import"
            base = node.module or ""
            for alias in node.names:
                local = alias.asname or alias.name
                if f"{base}.{alias.name}" in MODULES_BY_NAME:
                    yield f"{base}.{alias.name}", "", local
                elif base in MODULES_BY_NAME:
                    yield base, alias.name, local


PACKAGES = {module for module, path in MODULES_BY_NAME.items() if path.name == "__init__.py"}
PARENTS = {package.rpartition(".")[0] for package in PACKAGES}


def room_of(module: str) -> str:
    """Return the package of a module. A module that lies beside packages, as `layer` or `lab.cli`, is its own room."""
    package = module if module in PACKAGES else module.rpartition(".")[0]
    return module if package in PARENTS else package


def test_no_rooms_import_each_other_in_a_circle() -> None:
    neighbours: dict[str, set[str]] = defaultdict(set)
    for module in MODULES_BY_NAME:
        neighbours[room_of(module)] |= {room_of(other) for other, _, _ in imported(module)}
    neighbours[f"{LAB}.experiments"] |= {room_of(f"{LAB}.{name}") for names in MODULES.values() for name in names}
    for room in neighbours:
        neighbours[room] -= {room}
    try:
        TopologicalSorter(neighbours).prepare()
    except CycleError as error:
        raise AssertionError(" imports ".join(reversed(error.args[1]))) from None


def test_the_base_and_the_report_know_no_experiment() -> None:
    for module in MODULES_BY_NAME:
        for room, allowed in ((f"{LAB}.base", {"base"}), (f"{LAB}.report", {"base", "report"})):
            if module.startswith(room):
                rooms = {other.split(".")[2] for other, _, _ in imported(module) if other.startswith(f"{LAB}.")}
                assert rooms <= allowed, module


def test_the_library_does_not_import_the_lab() -> None:
    """Whoever wants the layer alone gets the layer alone."""
    for module in MODULES_BY_NAME:
        if not f"{module}.".startswith(f"{LAB}."):
            assert not [other for other, _, _ in imported(module) if f"{other}.".startswith(f"{LAB}.")], module


OPTIONAL = {
    "triton": {"_triton", "gpu"},
    "faiss": {"mbpa"},
    "numpy": {"sklearn"},
    "sklearn": {"sklearn"},
    "transformers": {"hf"},
}
"""The packages that the library uses where they are installed, and the modules or folders that may import them."""


def test_the_library_imports_only_torch() -> None:
    found = set()
    for module in MODULES_BY_NAME:
        if f"{module}.".startswith(f"{LAB}."):
            continue
        for node in ast.walk(tree_of(module)):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
                packages = {name.partition(".")[0] for name in names} - sys.stdlib_module_names - {NAME, "torch"}
                found |= {(each, module) for each in packages if not OPTIONAL.get(each, set()) & set(module.split("."))}
    assert not found, found


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def test_no_module_uses_a_private_name_of_another() -> None:
    """Modules whose file name begins with _ may be imported inside the library: their contents have public names."""
    found = []
    for module in MODULES_BY_NAME:
        taken = list(imported(module))
        found += [f"{module} imports {name} of {other}" for other, name, _ in taken if is_private(name)]
        modules = {local: other for other, name, local in taken if not name}
        for node in ast.walk(tree_of(module)):
            if isinstance(node, ast.Attribute) and is_private(node.attr) and ast.unparse(node.value) in modules:
                found.append(f"{module} uses {ast.unparse(node)}")
    assert not found, found


def test_no_file_is_longer_than_500_lines() -> None:
    files = [*FILES, *Path(__file__).parent.rglob("*.py")]
    long = [path.name for path in files if len(path.read_text(encoding="utf-8").splitlines()) > 500]
    assert not long, long


def test_help_imports_no_experiment() -> None:
    script = "import sys; from hebbian_softmax.lab import cli; sys.argv[1:] = ['--help']; cli.main()"
    script = f"import sys, atexit; atexit.register(lambda: print(*sys.modules, file=sys.stderr)); {script}"
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True, check=True)
    loaded = set(done.stderr.split())
    assert f"{LAB}.cli" in loaded
    assert not loaded & {*EXPERIMENTS, f"{LAB}.report", "matplotlib", "nltk", "PIL", "rich", "starlette", "uvicorn"}
    assert "reproduce" in done.stdout


@pytest.mark.slow
def test_a_reader_of_a_training_step_meets_few_files() -> None:
    found = subprocess.run(
        [sys.executable, "-m", "benchmarks.files_entered"], capture_output=True, text=True, check=True
    ).stdout
    counts = {line[:40].strip(): int(line[40:].split()[0]) for line in found.splitlines() if " files: " in line}
    assert counts["a training step"] <= 15
    assert counts["hebbian --help"] <= 3
