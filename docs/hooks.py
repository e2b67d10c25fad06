"""What the documentation site needs besides mkdocs.yml: the repository's pages, readable docstrings and formulas.

MkDocs calls the functions ``on_...``; Griffe, which reads docstrings for mkdocstrings, uses the class ``Docstrings``.
"""

from __future__ import annotations

import html
import logging
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import griffe
from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
PAGES = ("README.md", "CHANGELOG.md", "CITATION.cff", "docs/**/*.md", "docs/site.css", "results/**/*")
PAGES += ("examples/*.md", "examples/*.py", "examples/notebooks/*.ipynb")
"""The files of the site. They keep their places, so that a link from one to another works as in the repository."""

_log = logging.getLogger("mkdocs.hooks.site")
_ROLE = re.compile(r":(\w+):`([^`]+)`")
_MATH = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', flags=re.DOTALL)
_FROM_OUTSIDE = re.compile(r'<(?:script|img|iframe|link (?!rel="canonical"))[^>]*(?:src|href)="(?:https?:)?//[^>]*>')


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """List the pages of ``results/`` under Results, which mkdocs.yml leaves empty."""
    (section,) = (each for each in config.nav or [] if "Results" in each)
    section["Results"] = [_entry(path) for path in sorted(ROOT.glob("results/**/*.md"))]
    return config


def _entry(path: Path) -> str | dict[str, str]:
    """Return a line of the navigation: a README has its own title, and other pages are named after their folder."""
    name = path.relative_to(ROOT).as_posix()
    return name if path.stem == "README" else {f"{path.stem.capitalize()} of {path.parent.name}": name}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Take the pages from where they lie in the repository, and leave the theme's own files as they are."""
    for file in list(files):
        if file.src_dir == config.docs_dir:
            files.remove(file)
    for pattern in PAGES:
        for path in sorted(ROOT.glob(pattern)):
            if path.is_file():
                name = path.relative_to(ROOT).as_posix()
                files.append(File(name, str(ROOT), config.site_dir, config.use_directory_urls))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Leave out the column of pages where a page is alone in its section, so that lines of code have room."""
    if page.parent is None:
        page.meta["hide"] = ["navigation"]
    return markdown


def on_page_content(html: str, **_: Any) -> str:
    """Return the page with its formulas in MathML, which browsers show without a script."""
    return _MATH.sub(_formula, html)


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """Warn about what a browser would load from another host; a strict build fails then."""
    for found in _FROM_OUTSIDE.findall(output):
        _log.warning("%s loads something from outside: %s", page.file.src_uri, found)
    return output


def _formula(found: re.Match[str]) -> str:
    display = "block" if found[1] == "div" else "inline"
    return f'<{found[1]} class="formula">{convert(html.unescape(found[2]), display=display)}</{found[1]}>'


def to_markdown(text: str, path_of: Callable[[str], str]) -> str:
    """Return a docstring in Markdown: its roles, formulas, literal blocks and examples are written as in reST.

    ``path_of`` returns the full path of a name that ``:class:`` or one of its like has. It becomes a link to the object
    if a page has it; with ``~`` before the name, only its last part is shown.
    """
    text = "\n".join(_blocks(text.splitlines()))

    def replaced(found: re.Match[str]) -> str:
        inner = re.sub(r"\s+", " ", found[2])
        if found[1] == "math":
            return f"${inner}$"
        name = inner.removeprefix("~")
        shown = name if name == inner else name.rpartition(".")[2]
        return f'<autoref optional identifier="{path_of(name)}"><code>{shown}</code></autoref>'

    return _ROLE.sub(replaced, text)


def _blocks(lines: list[str]) -> Iterator[str]:
    """Yield the lines with examples as fenced blocks, each ``.. math::`` as $$ … $$, and ``:`` in place of ``::``."""
    at = 0
    while at < len(lines):
        line = lines[at]
        indent = line[: len(line) - len(line.lstrip())]
        at += 1
        if line.lstrip().startswith(">>> "):
            start = at - 1
            while at < len(lines) and lines[at].strip():
                at += 1
            yield from (f"{indent}```pycon", *lines[start:at], f"{indent}```")
        elif line.strip() == ".. math::":
            start = at
            while at < len(lines) and (not lines[at].strip() or lines[at].startswith(f"{indent}  ")):
                at += 1
            formula = " ".join(each.strip() for each in lines[start:at] if each.strip())
            yield from ("", f"{indent}$$", f"{indent}{formula}", f"{indent}$$", "")
        else:
            yield f"{line[:-1]}" if line.endswith("::") else line


class Docstrings(griffe.Extension):
    """Turns the docstrings of the package into Markdown."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Convert every docstring, once all names are known."""
        _convert_all(pkg)


def _convert_all(part: griffe.Object) -> None:
    if part.docstring is not None:
        part.docstring.value = to_markdown(part.docstring.value, lambda name: _path(part, name))
    for member in part.members.values():
        if not member.is_alias:
            _convert_all(member)  # type: ignore[arg-type]


def _path(part: griffe.Object, name: str) -> str:
    """Return the full path of what ``part`` calls by that name."""
    try:
        return name if name.startswith(f"{part.package.name}.") else part.resolve(name)
    except griffe.NameResolutionError:
        return name
