"""An HTML page of one or several runs: a single file without scripts that works offline."""

import base64
import struct
import zlib
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from hebbian_softmax.lab.base.console import printable, say
from hebbian_softmax.lab.base.errors import LabError
from hebbian_softmax.lab.base.files import write_atomic
from hebbian_softmax.lab.base.runs import Run
from hebbian_softmax.lab.report.result import Result, load_result
from hebbian_softmax.lab.report.tables import Table, format_cell

PNG = b"\x89PNG\r\n\x1a\n"
THE_RULE = (
    "A Hebbian softmax is the same layer as a plain one; after each optimizer step, it also writes the network's "
    "activations into the weight rows of classes that were seen few times."
)
STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #222; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h1, h2, h3 { line-height: 1.2; }
section + section { border-top: 1px solid #ccc; margin-top: 2.5rem; padding-top: 1rem; }
table { border-collapse: collapse; margin: 1rem 0; }
.wide { overflow-x: auto; }
caption { text-align: left; font-weight: 600; padding-bottom: .4rem; }
th, td { padding: .25rem .8rem; border-bottom: 1px solid #ddd; text-align: right; font-variant-numeric: tabular-nums; }
th:first-child, td:first-child { text-align: left; }
.prose { text-align: left; min-width: 16rem; }
thead th { border-bottom: 2px solid #888; }
figure { margin: 1.5rem 0; }
img { max-width: 100%; height: auto; }
figcaption, .quiet { color: #555; font-size: .9rem; }
.lead { font-size: 1.15rem; }
details { margin: 1rem 0; }
summary { cursor: pointer; font-weight: 600; }
code { background: #f3f3f3; padding: .1rem .3rem; }
@media (max-width: 40rem) {
  th, td { padding: .2rem .3rem; font-size: .8rem; }
  caption span { position: sticky; left: 0; display: inline-block; max-width: calc(100vw - 3rem); }
  th:first-child, td:first-child { position: sticky; left: 0; background: #fff; max-width: 9rem; }
  figure { overflow-x: auto; }
  figure img { max-width: none; width: max(100%, 38rem); }
  figcaption { position: sticky; left: 0; }
}
"""
LONG = 40  # characters of a cell from which on its column is set as prose


def write_page(
    runs: Sequence[Run], path: Path, tables: Sequence[Table] = (), images: Sequence[tuple[str, bytes]] = ()
) -> None:
    """Write the page of `runs` to `path`."""
    write_atomic(path, render_page(runs, tables, images).encode())


def refresh_page(run: Run) -> bool:
    """Write the page into the run folder; return whether that worked.

    The page only repeats what is saved already, so a failure is only worth a note.
    """
    try:
        write_page([run], run.path / "page.html")
    except LabError as error:
        say(f"note: no new page: {error}")
        return False
    return True


def render_page(runs: Sequence[Run], tables: Sequence[Table] = (), images: Sequence[tuple[str, bytes]] = ()) -> str:
    """Return the page as text. Everything that comes from a run is escaped.

    `tables` and `images` (pairs of a caption and a PNG) are about all runs together and come first.
    """
    results = [load_result(run) for run in runs]
    titles = [result.title if result else f"hebbian {run.typed}" for run, result in zip(runs, results, strict=True)]
    title = titles[0] if len(runs) == 1 else f"{len(runs)} runs"
    sections = [_section(run, result) for run, result in zip(runs, results, strict=True)]
    overview = [_overview(runs, results)] if len(runs) > 1 else []
    return "\n".join(
        [
            "<!doctype html>",
            f'<html lang="en"><head><meta charset="utf-8"><title>{_text(title)}</title>',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<style>{STYLE}</style></head><body>",
            f"<h1>{_text(title)}</h1>",
            *(f'<p class="lead">{_text(result.summary)}</p>' for result in results if result and len(runs) == 1),
            *([_summaries(runs, results)] if len(runs) > 1 else []),
            f'<p class="quiet">{_text(THE_RULE)}</p>',
            *overview,
            *(_image(image, caption) for caption, image in images),
            *(_table(table) for table in tables),
            *sections,
            "</body></html>\n",
        ]
    )


def _summaries(runs: Sequence[Run], results: Sequence[Result | None]) -> str:
    """Return what was seen in each run."""
    said = [result.summary if result else "Not finished." for result in results]
    items = [f"<li><b>{_text(run.path.name)}</b>: {_text(words)}</li>" for run, words in zip(runs, said, strict=True)]
    return "\n".join(["<ul>", *items, "</ul>"])


def _overview(runs: Sequence[Run], results: Sequence[Result | None]) -> str:
    """Return a table of the settings that differ between the runs.

    What a run left to a preset, such as its sizes, is known once it is finished, and nothing is said of it before.
    """
    settled = {name for result in results if result is not None for name in result.settled}
    settings = [_settings(run, result) for run, result in zip(runs, results, strict=True)]
    for each, result in zip(settings, results, strict=True):
        for name in settled if result is None else ():
            if not each.get(name):
                each.pop(name, None)
    names = sorted({name for each in settings for name in each})
    everywhere = [name for name in names if name not in settled]
    differing = [name for name in everywhere if len({str(each.get(name)) for each in settings}) > 1]
    differing += [name for name in settled if len({str(each[name]) for each in settings if name in each}) > 1]
    rows = []
    for run, each in zip(runs, settings, strict=True):
        rows.append([run.path.name, *(_as_text(each.get(name)) for name in sorted(differing))])
    return _table(Table("Settings in which the runs differ", ["run", *sorted(differing)], rows)) if differing else ""


def _settings(run: Run, result: Result | None) -> dict[str, Any]:
    """Return the settings of a run, and where they were left to a preset the preset's."""
    return {**run.settings, **(result.settled if result is not None else {})}


def _section(run: Run, result: Result | None) -> str:
    """Return what is shown of a run; summaries stand at the top of the page."""
    parts = [f"<section><h2>{_text(run.path.name)}</h2>"]
    if result is None:
        records = run.records()
        reached = f"step {records[-1]['step']:,}" if records else "the start"
        parts.append(f"<p>Not finished: the log ends at {reached}, and the last checkpoint may be later.</p>")
        if records:
            rows = [[name, value] for name, value in records[-1].items()]
            parts.append(_table(Table("Last record of the log", ["name", "value"], rows)))
    else:
        parts += [_table(table) for table in result.tables]
        for figure in result.figures:
            path = run.path / figure.file
            image = path.read_bytes() if path.is_file() else b""
            state = "damaged" if image else "missing"
            lost = f"<p>The figure {_text(path.name)} is {state}.</p>"
            parts.append(_image(image, figure.caption) if is_whole_png(image) else lost)
    parts += [
        "<details><summary>Settings, versions and hardware</summary>",
        _facts("Settings", _settings(run, result)),
        _facts("Versions", run.config["versions"]),
        _facts("Hardware", run.config["hardware"]),
        "</details>",
        f'<p class="quiet">Command <code>hebbian {_text(run.typed)}</code> with the settings above, '
        f"started {_text(run.config['started'])}.</p></section>",
    ]
    return "\n".join(parts)


def _table(table: Table) -> str:
    rows = [[format_cell(cell) for cell in row] for row in table.rows]
    prose = [any(len(row[column]) >= LONG for row in rows) for column in range(len(table.columns))]
    kinds = [' class="prose"' if long else "" for long in prose]
    head = "".join(f'<th scope="col"{kind}>{_text(name)}</th>' for name, kind in zip(table.columns, kinds, strict=True))
    body = [
        f"<tr>{''.join(f'<td{kind}>{_text(cell)}</td>' for cell, kind in zip(row, kinds, strict=True))}</tr>"
        for row in rows
    ]
    title = f'<div class="wide"><table><caption><span>{_text(table.title)}</span></caption>'
    return "\n".join([title, f"<thead><tr>{head}</tr></thead><tbody>", *body, "</tbody></table></div>"])


def _image(image: bytes, caption: str) -> str:
    data = base64.b64encode(image).decode()
    return (
        f'<figure><img src="data:image/png;base64,{data}" alt="{_text(caption)}">'
        f"<figcaption>{_text(caption)}</figcaption></figure>"
    )


def is_whole_png(image: bytes) -> bool:
    """Return whether a PNG file has all its parts, and each part its checksum."""
    start, kind = len(PNG), b""
    while image.startswith(PNG) and kind != b"IEND" and start + 12 <= len(image):
        (length,) = struct.unpack(">I", image[start : start + 4])
        kind, end = image[start + 4 : start + 8], start + 8 + length
        if zlib.crc32(image[start + 4 : end]).to_bytes(4, "big") != image[end : end + 4]:
            return False
        start = end + 4
    return kind == b"IEND"


def _facts(title: str, facts: Mapping[str, Any]) -> str:
    return _table(Table(title, ["name", "value"], [[name, _as_text(value)] for name, value in facts.items()]))


def _as_text(value: Any) -> str:
    """Return a setting or a fact as it would be typed, without separators of thousands."""
    if isinstance(value, list):
        return ", ".join(map(_as_text, value)) or "none"
    return format_cell(value) if value is None or isinstance(value, bool) else str(value)


def _text(text: str) -> str:
    """Return text as HTML that shows it, whatever characters it has."""
    return escape(printable(text))
