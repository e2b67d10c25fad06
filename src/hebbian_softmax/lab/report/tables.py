"""Tables as text, drawn on a terminal, and as Markdown for pages in a repository."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TextIO

from hebbian_softmax.lab.base.console import printable
from hebbian_softmax.lab.base.extras import require

Cell = str | int | float | None


@dataclass(frozen=True)
class Table:
    """Rows of cells under column names. The first column names the rows, the others hold numbers."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(f"table {self.title!r} has {len(self.columns)} columns, a row has {len(row)}")


def side_by_side(tables: Sequence[Table]) -> Table | None:
    """Join tables with the same rows and columns, numbering the columns by table; return None if they differ.

    >>> one = Table("Accuracy, %", ["classes", "plain"], [["all", 61]])
    >>> print(as_text(side_by_side([one, Table("Accuracy, %", ["classes", "plain"], [["all", 64]])])))
    Accuracy, %
    classes  plain (1)  plain (2)
    all             61         64
    """
    first = tables[0]
    names = [row[0] for row in first.rows]
    for table in tables:
        if (table.title, list(table.columns)) != (first.title, list(first.columns)):
            return None
        if [row[0] for row in table.rows] != names:
            return None
    columns = [f"{column} ({number})" for number, table in enumerate(tables, 1) for column in table.columns[1:]]
    rows = [[name, *(cell for table in tables for cell in table.rows[at][1:])] for at, name in enumerate(names)]
    return Table(first.title, [first.columns[0], *columns], rows)


def format_cell(cell: Cell) -> str:
    """Return a cell for people: thousands separated, four digits of a float, yes or no, a dash for None.

    Characters of a text that a terminal would obey are shown as escapes.
    """
    if cell is None:
        return "–"
    if isinstance(cell, bool):
        return "yes" if cell else "no"
    if isinstance(cell, int):
        return f"{cell:,}"
    return f"{cell:.4g}" if isinstance(cell, float) else printable(cell)


def as_text(table: Table) -> str:
    """Return the title and aligned columns as plain text.

    >>> print(as_text(Table("Accuracy, %", ["classes", "plain", "Hebbian"], [["all", 61.25, 63.5]])))
    Accuracy, %
    classes  plain  Hebbian
    all      61.25     63.5
    """
    lines = [[format_cell(cell) for cell in row] for row in (table.columns, *table.rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(table.columns))]

    def align(line: list[str]) -> str:
        cells = [line[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)]
        return "  ".join(cells).rstrip()

    return "\n".join([printable(table.title), *map(align, lines)])


def for_stream(table: Table, stream: TextIO) -> str:
    """Return a table for `stream`: drawn by rich on a terminal with room for all its words, plain text elsewhere."""
    if not stream.isatty():
        return as_text(table)
    require("rich")
    from rich import box
    from rich.console import Console
    from rich.measure import Measurement
    from rich.table import Table as Drawn
    from rich.text import Text

    console = Console(file=stream)
    title = Text(printable(table.title), style="bold")
    drawn = Drawn(title=title, title_justify="left", box=box.SIMPLE_HEAD, show_edge=False)
    for number, name in enumerate(table.columns):
        drawn.add_column(Text(printable(name)), justify="right" if number else "left", vertical="bottom")
    for row in table.rows:
        drawn.add_row(*(Text(format_cell(cell)) for cell in row))
    if Measurement.get(console, console.options.update(width=10_000), drawn).minimum > console.width:
        return as_text(table)  # rich would cut words and numbers
    with console.capture() as captured:
        console.print(drawn)
    return "\n".join(line.rstrip() for line in captured.get().splitlines())


def as_markdown(table: Table) -> str:
    r"""Return the title in bold and a Markdown table, in which signs of Markdown and HTML stand for themselves.

    >>> print(as_markdown(Table("Accuracy, %", ["classes", "plain"], [["all", 61.25]])))
    **Accuracy, %**
    <BLANKLINE>
    | classes | plain |
    | --- | ---: |
    | all | 61.25 |
    """

    def plain(cell: Cell) -> str:
        text = format_cell(cell.replace("\n", " ") if isinstance(cell, str) else cell)
        return re.sub(r"[\\`*_\[\]<&~$|]", r"\\\g<0>", text)

    def line(cells: Sequence[Cell]) -> str:
        return "| " + " | ".join(map(plain, cells)) + " |"

    rule = "| " + " | ".join(["---"] + ["---:"] * (len(table.columns) - 1)) + " |"
    return "\n".join([f"**{plain(table.title)}**", "", line(table.columns), rule, *map(line, table.rows)])
