"""A corpus is prepared once, whole or not at all, whatever happens to the process, the disk or the sources."""

import threading
from functools import partial
from pathlib import Path

import pytest

from hebbian_softmax.lab.data import prepare as module
from hebbian_softmax.lab.data.corpus import corpora_root, load_corpus, open_corpus
from hebbian_softmax.lab.data.prepare import Plan, Workshop, prepare
from hebbian_softmax.lab.data.vocabulary import Encoded
from hebbian_softmax.lab.errors import LabError
from tests.lab.test_files import file_size_limit, names

TEXTS = {"train": "a b a c <eos>", "valid": "a c <eos>", "test": "b d <eos>"}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HEBBIAN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "corpora"


def encode(part: tuple[str, str]) -> list[tuple[str, Encoded]]:
    split, text = part
    if text == "damaged":
        raise LabError("toy.txt is damaged")
    encoded = Encoded()
    encoded.add(text.split())
    return [(split, encoded)]


class Toy:
    """A plan that counts how often it was carried out."""

    def __init__(self, texts: dict[str, str] = TEXTS, **settings: object) -> None:
        self.made = 0
        self.plan = Plan("toy", settings, partial(self.gather, texts), usual=not settings)

    def gather(self, texts: dict[str, str], workshop: Workshop) -> None:
        self.made += 1
        workshop.tokenise(encode, texts.items(), len(texts))
        workshop.notes["seen"] = str(workshop.data_root)


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
    for left in (".writing-toy.parts", ".writing-123-toy"):
        (cache / left).mkdir(parents=True)
        (cache / left / "train").write_bytes(b"half")
    (cache / ".writing-123-mytoy").mkdir()  # of another corpus, which another process may be writing
    prepare(Toy().plan, quiet=True)
    assert names(cache) == {"toy", ".toy.lock", ".writing-123-mytoy"}


@pytest.mark.parametrize("processes", [1, 2])
def test_an_error_in_a_source_leaves_nothing(cache: Path, processes: int) -> None:
    with pytest.raises(LabError, match=r"^toy\.txt is damaged$"):
        prepare(Toy(TEXTS | {"valid": "damaged"}).plan, processes=processes, quiet=True)
    assert names(cache) == {".toy.lock"}


def test_an_empty_split_is_an_error(cache: Path) -> None:
    for empty in (TEXTS | {"test": ""}, {"train": "a", "valid": "a"}):
        with pytest.raises(LabError, match="the test split of toy is empty"):
            prepare(Toy(empty).plan, processes=1, quiet=True)
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


def test_callers_at_once_make_it_once(cache: Path) -> None:
    toy = Toy()
    threads = [
        threading.Thread(target=prepare, args=(toy.plan,), kwargs={"processes": 1, "quiet": True}) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert toy.made == 1
    open_corpus(cache / "toy", verify=True)


def test_a_missing_source_is_named(tmp_path: Path) -> None:
    with pytest.raises(LabError, match=r"gone\.txt is not there"), module.readable(tmp_path / "gone.txt"):
        (tmp_path / "gone.txt").read_bytes()
    with pytest.raises(LabError, match=r"cannot be read \(IsADirectoryError"), module.readable(tmp_path):
        tmp_path.read_bytes()


def test_the_root_of_prepared_corpora_is_the_cache(cache: Path) -> None:
    assert corpora_root() == cache
