"""A corpus is prepared once, whole or not at all, whatever happens to the process, the disk or the sources."""

import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from hebbian_softmax.lab.base.errors import LabError
from hebbian_softmax.lab.base.files import locked
from hebbian_softmax.lab.data.corpus import open_corpus
from hebbian_softmax.lab.data.prepare import Plan, Workshop, prepare
from hebbian_softmax.lab.data.registry import load_corpus
from hebbian_softmax.lab.data.vocabulary import Encoded
from tests.lab.base.test_files import file_size_limit, names

TEXTS = {"train": "a b a c <eos>", "valid": "a c <eos>", "test": "b d <eos>"}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path) -> Path:
    (tmp_path / "data").mkdir()
    return tmp_path / "cache" / "corpora"


def encode(part: tuple[str, str]) -> list[tuple[str, Encoded]]:
    split, text = part
    if text == "damaged":
        raise LabError("toy.txt is damaged")
    return [(split, Encoded(text.split()))]


class Toy:
    """A plan that counts how often it is carried out."""

    def __init__(self, texts: dict[str, str] = TEXTS, **settings: object) -> None:
        self.made = 0
        self.plan = Plan("toy", settings, partial(self.gather, texts), self.at_hand, usual=not settings)

    def gather(self, texts: dict[str, str], workshop: Workshop) -> None:
        self.made += 1
        workshop.note(self.at_hand(workshop.data_root))
        workshop.tokenise(encode, texts.items(), len(texts))

    def at_hand(self, root: Path) -> dict[str, Path]:
        return {path.name: path for path in sorted(root.glob("*.txt"))}


def test_twice_is_a_no_op(cache: Path) -> None:
    toy = Toy()
    corpus, made = prepare(toy.plan, quiet=True)
    assert made
    assert corpus.path == cache / "toy"
    assert corpus.words == ["a", "<eos>", "b", "c", "<unk>"]
    assert corpus.splits["test"].tolist() == [2, 4, 1]
    again, made = prepare(toy.plan, quiet=True)
    assert not made
    assert toy.made == 1
    assert again.fingerprint == corpus.fingerprint
    assert names(cache) == {"toy", ".toy.lock"}


def test_the_number_of_processes_changes_nothing(cache: Path) -> None:
    fingerprints = {
        prepare(Toy().plan, name=f"toy-{processes}", processes=processes, quiet=True)[0].fingerprint
        for processes in (1, 2, 4)
    }
    assert len(fingerprints) == 1


def test_other_settings_have_other_names_and_do_not_take_one_anothers(cache: Path) -> None:
    plain, other = prepare(Toy().plan, quiet=True)[0], prepare(Toy(minimum=2).plan, quiet=True)[0]
    assert plain.path != other.path
    assert other.path.name.startswith("toy-")
    prepare(Toy(minimum=2).plan, name="mine", quiet=True)
    assert load_corpus("mine").settings["minimum"] == 2
    with pytest.raises(LabError, match=r"mine was prepared with other settings \(minimum\): .*--name"):
        prepare(Toy(minimum=3).plan, name="mine", quiet=True)


def test_what_a_killed_run_left_goes(cache: Path) -> None:
    for left in (".writing-parts-toy", ".writing-old-toy", ".writing-123-toy"):
        (cache / left).mkdir(parents=True)
        (cache / left / "train").write_bytes(b"half")
    others = {".writing-123-mytoy", ".writing-123-2024-toy", ".writing-parts-1-toy"}
    for other in others:  # belongs to another corpus, which another process may be writing
        (cache / other).mkdir()
    prepare(Toy().plan, quiet=True)
    assert names(cache) == {"toy", ".toy.lock", *others}
    (cache / ".writing-5-2024-toy").mkdir()
    prepare(Toy().plan, name="2024-toy", quiet=True)
    assert not {".writing-5-2024-toy", ".writing-123-2024-toy"} & names(cache)


def test_a_run_killed_between_its_two_renames_does_not_lose_the_old_one(cache: Path) -> None:
    toy = Toy()
    prepare(toy.plan, quiet=True)
    (cache / "toy").rename(cache / ".writing-old-toy")
    corpus, made = prepare(toy.plan, quiet=True)
    assert (made, toy.made) == (False, 1)
    assert corpus.path == cache / "toy"
    assert not (cache / ".writing-old-toy").exists()


def test_what_a_run_left_that_was_killed_at_its_very_end_goes(cache: Path) -> None:
    toy = Toy()
    prepare(toy.plan, quiet=True)
    for left in (".writing-parts-toy", ".writing-old-toy"):
        (cache / left).mkdir()
        (cache / left / "train").write_bytes(b"half")
    with locked(cache / ".toy.lock", wait=False):  # another process writes the corpus, so these folders are its own
        prepare(toy.plan, quiet=True)
    assert names(cache) == {"toy", ".toy.lock", ".writing-parts-toy", ".writing-old-toy"}
    prepare(toy.plan, quiet=True)
    assert names(cache) == {"toy", ".toy.lock"}
    assert toy.made == 1


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (TEXTS | {"valid": "damaged"}, r"^toy\.txt is damaged$"),
        (TEXTS | {"test": ""}, "the test split of toy is empty"),
        ({"train": "a", "valid": "a"}, "the test split of toy is empty"),
    ],
)
def test_an_error_leaves_nothing(cache: Path, texts: dict[str, str], message: str, processes: int) -> None:
    with pytest.raises(LabError, match=message):
        prepare(Toy(texts).plan, processes=processes, quiet=True)
    assert names(cache) == {".toy.lock"}


def test_a_full_disk_says_what_to_do_and_leaves_nothing(cache: Path) -> None:
    with file_size_limit(10_000), pytest.raises(LabError, match=r"cannot write .*toy .*HEBBIAN_CACHE"):
        prepare(Toy(TEXTS | {"train": "word " * 100_000}).plan, processes=1, quiet=True)
    assert names(cache) == {".toy.lock"}


def test_a_cache_that_cannot_be_written(cache: Path) -> None:
    cache.parent.write_bytes(b"")  # a file where the folder should be
    toy = Toy()
    with pytest.raises(LabError, match=r"cannot write .*HEBBIAN_CACHE"):
        prepare(toy.plan, quiet=True)
    assert toy.made == 0


def test_a_damaged_corpus_is_named_and_not_used(cache: Path) -> None:
    prepare(Toy().plan, quiet=True)
    (cache / "toy" / "ids.bin").write_bytes(b"")
    with pytest.raises(LabError, match=r"ids\.bin is damaged .*delete the folder"):
        prepare(Toy().plan, quiet=True)


@pytest.mark.parametrize("change", ["length", "bytes", "another"])
def test_other_sources_make_it_again(
    cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], change: str
) -> None:
    source, toy = tmp_path / "data" / "a.txt", Toy()
    source.write_text("one")
    before = prepare(toy.plan, quiet=True)[0]
    assert [(found["name"], found["bytes"]) for found in before.manifest["sources"]] == [("a.txt", 3)]
    changed = source if change != "another" else source.with_name("b.txt")
    time = source.stat().st_mtime_ns if change == "length" else 0
    changed.write_text("longer" if change == "length" else "two")
    os.utime(changed, ns=(time, time))
    load = partial(prepare, toy.plan, quiet=True)
    assert not load(renew=False)[1]  # a run goes on with what is prepared
    again, made = load()
    assert made
    assert capsys.readouterr().err == f"{changed} is not the file that toy was made from: making it again\n"
    assert "sha256" in again.manifest["sources"][0]
    assert not load()[1]
    assert toy.made == 2
    assert names(cache) == {"toy", ".toy.lock"}


def test_the_same_sources_elsewhere_at_another_time_or_gone_are_no_change(cache: Path, tmp_path: Path) -> None:
    source, toy = tmp_path / "data" / "a.txt", Toy()
    source.write_text("one")
    prepare(toy.plan, quiet=True)
    time = source.stat().st_mtime_ns
    os.utime(source, ns=(0, 0))
    assert not prepare(toy.plan, quiet=True)[1]
    (tmp_path / "elsewhere").mkdir()
    shutil.copy(source, tmp_path / "elsewhere")
    assert not prepare(toy.plan, data_root=str(tmp_path / "elsewhere"), quiet=True)[1]
    source.write_text("two")
    os.utime(source, ns=(time, time))
    assert not prepare(toy.plan, quiet=True)[1]  # a source of the same length and time is not read
    source.unlink()
    assert not prepare(toy.plan, quiet=True)[1]


def test_an_error_while_making_it_again_keeps_the_old_one(cache: Path, tmp_path: Path) -> None:
    before = prepare(Toy().plan, quiet=True)[0].fingerprint
    (tmp_path / "data" / "a.txt").write_text("new")
    with pytest.raises(LabError, match=r"toy\.txt is damaged"):
        prepare(Toy(TEXTS | {"valid": "damaged"}).plan, processes=1, quiet=True)
    assert open_corpus(cache / "toy", verify=True).fingerprint == before
    assert names(cache) == {"toy", ".toy.lock"}


def test_a_source_that_cannot_be_read_is_not_called_a_full_disk(cache: Path, tmp_path: Path) -> None:
    def gather(workshop: Workshop) -> None:
        (workshop.data_root / "a.txt").read_bytes()

    (tmp_path / "data" / "a.txt").mkdir()
    with pytest.raises(LabError, match=r"data/a\.txt cannot be read \(IsADirectoryError"):
        prepare(Plan("toy", {}, gather, lambda root: {}), quiet=True)


def test_callers_at_once_make_it_once(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    toy = Toy()
    with ThreadPoolExecutor(4) as pool:
        results = pool.map(lambda _: prepare(toy.plan, processes=1, quiet=True), range(4))
    assert sum(made for _, made in results) == toy.made == 1
    assert set(capsys.readouterr().err.splitlines()) <= {"toy is being prepared by another process: waiting for it"}
    open_corpus(cache / "toy", verify=True)
