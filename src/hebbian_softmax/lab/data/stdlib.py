"""The source of Python's standard library as a corpus: every machine has it, so nothing is downloaded.

Names are split into their parts: `get_nameList` gives `get`, `_`, `name`, `List`. Comments and strings become words and
signs. `<eos>` ends a line, `<indent>` and `<dedent>` stand for a block's beginning and end. The text depends on the
version of Python, so the version is part of the corpus's settings.
"""

import hashlib
import io
import platform
import re
import sysconfig
import tokenize
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from hebbian_softmax.lab.base.errors import LabError
from hebbian_softmax.lab.data.corpus import EOS
from hebbian_softmax.lab.data.prepare import CorpusKind, NoOptions, Plan, Workshop, readable
from hebbian_softmax.lab.data.vocabulary import Encoded

MINIMUM = 3  # occurrences in training that keep a word in the vocabulary, as in WikiText
INDENT, DEDENT = "<indent>", "<dedent>"
HELD_OUT = 16  # about one module in so many is for validation, and one for testing
# Tests hold code that is wrong on purpose, packages are not part of the library, and tables were written by programs.
LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "pydoc_data", "encodings"}
OF_THE_BUILD = ("_sysconfigdata", "config-")  # these files hold paths of the machine that built this Python

_WORD = re.compile(r"[A-Z]+(?![^\W\d_A-Z])|[A-Z]?[^\W\d_A-Z]+|\d+|_+|\S")


def plan() -> Plan:
    """Return the plan for the library of the running Python."""
    python, folder = platform.python_version(), Path(sysconfig.get_path("stdlib"))
    return Plan(
        f"stdlib-{python}",
        {"python": python, "minimum": MINIMUM},
        partial(_gather, folder),
        lambda root: _modules(folder),  # the library is in no data root
        MINIMUM,
        documents=True,
    )


STDLIB = CorpusKind(
    "stdlib", "the source of this Python's standard library; no download", NoOptions, lambda options: plan()
)


def _gather(folder: Path, workshop: Workshop) -> None:
    modules = _modules(folder)
    if not modules:
        raise LabError(f"{folder} has no modules: this Python comes without its library's source; use another")
    workshop.note(modules)
    workshop.tokenise(_tokenise, modules.items(), len(modules))
    workshop.notes["modules"] = workshop.gathered.documents()


def _modules(folder: Path) -> dict[str, Path]:
    """Return the source files by their names in the library."""
    found = {}
    for path in sorted(folder.rglob("*.py")):
        name = path.relative_to(folder)
        if not any(part in LEFT_OUT or part.startswith(OF_THE_BUILD) for part in name.parts):
            found[name.as_posix()] = path
    return found


def split_of(module: str) -> str:
    """Return the split of a module, chosen by a checksum of its name so that other modules do not matter."""
    place = int.from_bytes(hashlib.sha256(module.encode()).digest()[:4], "little") % HELD_OUT
    return {0: "valid", 1: "test"}.get(place, "train")


def _tokenise(module: tuple[str, Path]) -> list[tuple[str, Encoded]]:
    name, path = module
    with readable(path):
        content = path.read_bytes()
    try:
        return [(split_of(name), Encoded(code_tokens(content)))]
    except (SyntaxError, UnicodeDecodeError, tokenize.TokenError) as error:
        raise LabError(f"{path} is not Python of this version ({error}): repair this Python's library") from error


def code_tokens(content: bytes) -> Iterator[str]:
    """Yield the tokens of a module.

    >>> " ".join(code_tokens(b"if fooBar: # why\\n  x_1 = 'no'\\n"))
    "if foo Bar : # why <eos> <indent> x _ 1 = ' no ' <eos> <dedent>"
    """
    signs = {tokenize.INDENT: INDENT, tokenize.DEDENT: DEDENT, tokenize.NEWLINE: EOS, tokenize.NL: EOS}
    for token in tokenize.tokenize(io.BytesIO(content).readline):
        if token.type in signs:
            yield signs[token.type]
        elif token.type not in (tokenize.ENCODING, tokenize.ENDMARKER):
            for line in token.string.splitlines(keepends=True):
                yield from _WORD.findall(line)
                if line.endswith("\n"):
                    yield EOS
