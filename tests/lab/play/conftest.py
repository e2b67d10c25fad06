"""A server with a small network for the tests of the page."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lab.play.toy import Client, serving


@pytest.fixture(scope="session")
def play_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which the small network is kept."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def server(play_cache: Path) -> Iterator[Client]:
    """A server whose network is ready."""
    with serving(play_cache) as client:
        client.until_ready()
        yield client
