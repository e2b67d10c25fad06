"""A terminal for the tests of the lab."""

import pytest

from tests.lab.base.test_progress import Terminal


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """A stream that says that it is a terminal of 80 columns with cursor control and without colours."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "80")
    return Terminal()
