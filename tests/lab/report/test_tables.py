"""Tables for terminals and for Markdown pages."""

import io
import re
import sys

import pytest

from hebbian_softmax.lab.base.errors import LabError
from hebbian_softmax.lab.report.tables import Table, as_markdown, as_text, for_stream, side_by_side
from tests.lab.base.test_progress import Terminal

TABLE = Table("Loss", ["name", "count", "loss"], [["plain", 12345, 0.123456], ["a longer name", None, "1 ± 2"]])


def test_text_is_aligned() -> None:
    assert as_text(TABLE).splitlines() == [
        "Loss",
        "name            count    loss",
        "plain          12,345  0.1235",
        "a longer name       –   1 ± 2",
    ]
    assert as_text(Table("T", ["a", "b"], [])) == "T\na  b"


def test_markdown_whose_cells_cannot_break_the_table() -> None:
    assert as_markdown(Table("T", ["a"], [["x|y\nz"]])).splitlines()[-1] == "| x\\|y z |"
    assert as_markdown(TABLE).splitlines()[2:] == [
        "| name | count | loss |",
        "| --- | ---: | ---: |",
        "| plain | 12,345 | 0.1235 |",
        "| a longer name | – | 1 ± 2 |",
    ]


def test_markdown_shows_the_signs_of_markdown_and_html() -> None:
    table = Table("a*b", ["<unk>"], [["`_x_` $y$ [z](w) \\ &amp; ~~"]])
    title, _, head, _, row = as_markdown(table).splitlines()
    assert (title, head) == (r"**a\*b**", r"| \<unk> |")
    assert row == r"| \`\_x\_\` \$y\$ \[z\](w) \\ \&amp; \~\~ |"


def test_a_cell_cannot_move_the_cursor(terminal: Terminal) -> None:
    table = Table("t\x1b[2J", ["c\x9b1m"], [["\x1b]0;title\x07\r\udcff"]])
    drawn = re.sub(r"\x1b\[[0-9]*m", "", for_stream(table, terminal))  # without rich's own bold type
    for text in (as_text(table), as_markdown(table), drawn):
        assert all(character.isprintable() or character == "\n" for character in text)
        assert "x1b]0;title" in text.replace("\\\\", "\\").replace("\\]", "]")


def test_yes_and_no() -> None:
    assert as_text(Table("t", ["a"], [[True], [False], [1]])) == "t\na\nyes\nno\n1"


def test_a_row_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="3 columns, a row has 2"):
        Table("T", ["a", "b", "c"], [["x", 1]])


def test_tables_of_the_same_rows_stand_side_by_side() -> None:
    one, two = (Table("t", ["row", "a", "b"], [["x", 1, number], ["y", 2, None]]) for number in (3, 4))
    joined = side_by_side([one, two])
    assert joined == Table(
        "t", ["row", "a (1)", "b (1)", "a (2)", "b (2)"], [["x", 1, 3, 1, 4], ["y", 2, None, 2, None]]
    )
    assert side_by_side([one, Table("t", ["row", "a", "b"], [["x", 1, 3]])]) is None
    assert side_by_side([one, Table("t", ["row", "a", "c"], one.rows)]) is None
    assert side_by_side([one, Table("u", one.columns, one.rows)]) is None


def test_a_terminal_gets_a_drawn_table_that_cuts_nothing(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    title, head, rule, *rows = for_stream(TABLE, terminal).splitlines()
    assert "Loss" in title
    assert "loss" in head
    assert set(rule.strip()) == {"─"}
    assert [" ".join(row.split()) for row in rows] == ["plain 12,345 0.1235", "a longer name – 1 ± 2"]
    wide = side_by_side([TABLE] * 9)
    assert wide is not None
    assert for_stream(wide, terminal) == as_text(wide)
    assert for_stream(TABLE, io.StringIO()) == as_text(TABLE)
    monkeypatch.setitem(sys.modules, "rich", None)
    with pytest.raises(LabError, match="needs rich"):
        for_stream(TABLE, terminal)
