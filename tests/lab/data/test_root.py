"""The folders where data are looked for and where prepared files go."""

from collections.abc import Callable
from pathlib import Path

import pytest

from hebbian_softmax.lab.base.errors import LabError
from hebbian_softmax.lab.data.root import cache_root, data_root


@pytest.mark.parametrize(("root", "variable"), [(data_root, "HEBBIAN_DATA"), (cache_root, "HEBBIAN_CACHE")])
def test_the_environment_wins_over_the_users_cache(
    root: Callable[[], Path], variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/from/cache")
    monkeypatch.setenv(variable, "/from/environment")
    assert root() == Path("/from/environment")
    monkeypatch.delenv(variable)
    assert root() == Path("/from/cache/hebbian-softmax")


def test_the_option_wins_over_the_environment(tmp_path: Path) -> None:
    assert data_root(str(tmp_path)) == tmp_path != data_root()


@pytest.mark.parametrize("cache", ["", "relative"])
def test_without_a_usable_cache_setting_it_is_the_home_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: str
) -> None:
    monkeypatch.setenv("HEBBIAN_DATA", "")
    monkeypatch.setenv("XDG_CACHE_HOME", cache)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert data_root() == tmp_path / ".cache" / "hebbian-softmax"
    (tmp_path / "data").mkdir()
    assert data_root("~/data") == tmp_path / "data"


def test_a_folder_that_was_named_must_be_there(tmp_path: Path) -> None:
    """A mistyped folder would otherwise become a place to download to."""
    with pytest.raises(LabError, match=r"there is no folder .*dta: correct the path, or make the folder first"):
        data_root(str(tmp_path / "dta"))
