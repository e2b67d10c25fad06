"""Image sets: what they have in common, that each is declared in full, and the cache of whole files."""

import errno
import importlib.util
import inspect
import os
import pkgutil
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from hebbian_softmax.lab import images
from hebbian_softmax.lab.base.errors import LabError
from hebbian_softmax.lab.base.files import TEMPORARY
from hebbian_softmax.lab.base.settings import as_options
from hebbian_softmax.lab.images.compare import RECIPES, SOURCES
from hebbian_softmax.lab.images.curriculum import CurriculumSettings
from hebbian_softmax.lab.images.data import ImageSet, ImageSource, cached
from hebbian_softmax.lab.images.glyphs import make_glyphs
from hebbian_softmax.lab.images.omniglot import load_omniglot
from tests.lab.base.test_files import file_size_limit, names


def some(name: str = "some") -> ImageSet:
    images = torch.randint(256, (3, 20, 28, 28), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    return ImageSet(name, images, ["a", "b", "c"])


def test_the_first_five_drawings_are_for_testing_and_both_parts_are_views() -> None:
    images = some()
    assert torch.equal(images.test, images.images[:, :5])
    assert torch.equal(torch.cat([images.test, images.train], dim=1), images.images)
    assert images.train.shape == (3, 15, 28, 28)
    assert images.train.untyped_storage().data_ptr() == images.images.untyped_storage().data_ptr()


def test_the_identity_follows_name_class_names_and_pixels() -> None:
    identity = some().identity
    assert identity == some().identity
    assert identity.startswith("some-3x20x28x28-")
    changed = some().images.clone()
    changed[2, 19, 27, 27] ^= 1
    repainted, renamed = ImageSet("some", changed, ["a", "b", "c"]), ImageSet("some", some().images, ["a", "c", "b"])
    assert len({identity, *(other.identity for other in (some("other"), repainted, renamed))}) == 4


def test_every_image_set_is_declared_in_full_and_offered() -> None:
    modules = [
        importlib.import_module(f"{images.__name__}.{each.name}") for each in pkgutil.iter_modules(images.__path__)
    ]
    declared = [module.SOURCE for module in modules if isinstance(getattr(module, "SOURCE", None), ImageSource)]
    assert sorted(source.name for source in declared) == sorted(source.name for source in SOURCES)
    assert [recipe.name for recipe in RECIPES] == [source.name for source in SOURCES]
    for source in declared:
        assert source.name.isidentifier()
        assert source.help
        assert issubclass(source.settings, CurriculumSettings)
        assert as_options(source.settings()) == []  # every setting has a default
        assert len(inspect.signature(source.load).parameters) == 2


@pytest.mark.parametrize(
    ("make", "module", "package"),
    [
        (make_glyphs, "matplotlib", "matplotlib"),
        (make_glyphs, "PIL", "Pillow"),
        (load_omniglot, "PIL", "Pillow"),
        (load_omniglot, "numpy", "numpy"),
    ],
)
def test_what_is_not_installed_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[..., ImageSet], module: str, package: str
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == module else find(name))
    with pytest.raises(LabError, match=rf"needs {package}: pip install 'hebbian-softmax\[lab\]'"):
        make(cache_dir=tmp_path, quiet=True)
    assert names(tmp_path) == set()


class Maker:
    """Makes a set and counts how often."""

    def __init__(self) -> None:
        self.made = 0
        self.set = ImageSet("toy", some().images, ["a", "β", "\U0001d54b"])

    def __call__(self) -> ImageSet:
        self.made += 1
        return self.set


@pytest.fixture
def maker() -> Maker:
    return Maker()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def assert_made_again(maker: Maker, folder: Path) -> None:
    before = maker.made
    for _ in range(2):
        assert cached("toy", "k", maker, folder).identity == maker.set.identity
        assert maker.made == before + 1


def test_made_once_for_each_key(maker: Maker, folder: Path) -> None:
    for key in "kllk":
        found = cached("toy", key, maker, folder)
        assert found.identity == maker.set.identity
        assert found.class_names == maker.set.class_names
    assert maker.made == 2
    assert names(folder) == {"toy-k.npz", "toy-l.npz"}


def test_one_thread_makes_it_and_failing_leaves_nothing_but_the_other_threads(folder: Path) -> None:
    seen = []

    def fails() -> ImageSet:
        seen.append(torch.get_num_threads())
        raise LabError("bad archive")

    torch.set_num_threads(2)
    try:
        with pytest.raises(LabError, match=r"^bad archive$"):
            cached("toy", "k", fails, folder)
        assert names(folder) == set()
        assert seen == [1]
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)


def test_the_folder_is_named_by_the_environment(maker: Maker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEBBIAN_CACHE", str(tmp_path / "mine"))
    cached("toy", "k", maker, None)
    assert (tmp_path / "mine" / "images" / "toy-k.npz").is_file()


@pytest.mark.parametrize("damage", ["cut", "pixel", "name", "empty", "text", "one array", "other arrays"])
def test_a_damaged_file_is_noticed_and_made_again(
    maker: Maker, folder: Path, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    cached("toy", "k", maker, folder)
    path = folder / "toy-k.npz"
    content = bytearray(path.read_bytes())
    if damage == "pixel":
        content[len(content) // 2] ^= 1
    elif damage == "name":
        content[-200] ^= 0xFF
    changed = {"cut": content[:-100], "empty": b"", "text": b"not an array"}
    path.write_bytes(changed.get(damage, content))
    if damage == "one array":
        with open(path, "wb") as file:
            np.save(file, np.zeros((4, 20, 28, 28), np.uint8))
    if damage == "other arrays":
        np.savez(path, images=np.zeros((3, 20, 28, 28), np.uint8), class_names=np.array('["a"]'))
    assert_made_again(maker, folder)
    assert f"{path} is damaged; making it again" in capsys.readouterr().err


def test_what_a_killed_process_left_is_not_taken_for_a_set_and_goes(maker: Maker, folder: Path) -> None:
    folder.mkdir()
    (folder / f"{TEMPORARY}1-toy-k.npz").write_bytes(b"half")
    assert_made_again(maker, folder)
    assert names(folder) == {"toy-k.npz"}


def test_a_full_disk_says_what_to_do_and_leaves_nothing(
    maker: Maker, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(file: object, **arrays: object) -> None:
        file.write(b"half")  # type: ignore[attr-defined]
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(np, "savez", full)
        with pytest.raises(LabError, match=r"no space left to write .*toy-k\.npz: .*HEBBIAN_CACHE"):
            cached("toy", "k", maker, folder)
    assert names(folder) == set()
    with file_size_limit(10_000), pytest.raises(LabError, match=r"cannot write .*toy-k\.npz .*HEBBIAN_CACHE"):
        cached("toy", "k", maker, folder)
    assert names(folder) == set()
    assert_made_again(maker, folder)


def test_a_folder_that_is_a_file_or_refuses_new_files(
    maker: Maker, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*arguments: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    folder.write_bytes(b"")
    with pytest.raises(LabError, match=r"cannot write .*HEBBIAN_CACHE"):
        cached("toy", "k", maker, folder)
    assert maker.made == 0
    folder.unlink()
    monkeypatch.setattr(os, "replace", refused)
    with pytest.raises(LabError, match=r"Read-only file system.*choose another, with HEBBIAN_CACHE"):
        cached("toy", "k", maker, folder)


def test_callers_at_once_make_it_once(maker: Maker, folder: Path) -> None:
    threads = [threading.Thread(target=cached, args=("toy", "k", maker, folder)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert maker.made == 1
