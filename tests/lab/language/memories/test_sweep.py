"""Every point of a sweep is the literal loop's, the best is chosen on the validation text, parts are kept."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hebbian_softmax.lab.base.errors import LabError
from hebbian_softmax.lab.base.files import TEMPORARY
from hebbian_softmax.lab.data.corpus import Corpus
from hebbian_softmax.lab.language.memories import rows as rows_module
from hebbian_softmax.lab.language.memories import sweep as memory_sweep
from hebbian_softmax.lab.language.memories import two_steps
from hebbian_softmax.lab.language.memories.grid import Grids, Point, at_edges
from hebbian_softmax.lab.language.memories.reading import PIECES, CacheSettings, MbpaSettings, Memories
from hebbian_softmax.lab.language.memories.rows import MemoryRows, memory_rows
from hebbian_softmax.lab.language.memories.store import Store
from hebbian_softmax.lab.language.model import LanguageModel
from tests.lab.language.memories.oracle import activations, losses_of, model, parts_of, perplexity_of
from tests.lab.language.toy import corpus

GRIDS = Grids(
    thetas=(0.5, 0.05),
    sizes=(6, 15),
    cache_shares=(0.1, 0.3),
    neighbours=(3, 9),
    rates=(0.1, 0.5),
    l2=(0.1, 2.0),
    mbpa_shares=(0.05, 0.2),
    two_step_words=7,
)
NO_TIME = replace(GRIDS, budget=0.0)


@pytest.fixture(scope="module")
def words() -> Corpus:
    return corpus(tokens=800)


@pytest.fixture(scope="module")
def network() -> LanguageModel:
    return model()


@pytest.fixture(scope="module")
def swept(network: LanguageModel, words: Corpus) -> MemoryRows:
    return memory_rows(network, words, grids=GRIDS, quiet=True)


class Literal:
    """Perplexities of the validation text from loops, the parts of which are computed once."""

    def __init__(self, network: LanguageModel, ids: Tensor) -> None:
        self.network, self.ids, self.known = network, ids, {}

    def parts(self, cache: CacheSettings | None, mbpa: MbpaSettings | None) -> dict[str, Tensor]:
        keys = (replace(cache, share=0.0) if cache else None, None), (None, replace(mbpa, share=0.0) if mbpa else None)
        found: dict[str, Tensor] = {}
        for key in keys:
            if key not in self.known:
                self.known[key] = parts_of(self.network, self.ids, Memories(*key))
            found |= self.known[key]
        return found

    def perplexity(self, cache: CacheSettings | None, mbpa: MbpaSettings | None, part: slice = slice(None)) -> float:
        return perplexity_of(losses_of(self.parts(cache, mbpa), cache, mbpa)[part])


@pytest.fixture(scope="module")
def literal(network: LanguageModel, words: Corpus) -> Literal:
    return Literal(network, words.splits["valid"])


def check(points: list[Point], literal: Literal, part: slice = slice(None)) -> None:
    for point in points:
        expected = literal.perplexity(point.cache, point.mbpa, part)
        assert point.perplexity == pytest.approx(expected, rel=1e-5), point
    assert [point.perplexity for point in points] == sorted(point.perplexity for point in points)


def test_every_cache_is_the_literal_loop(swept: MemoryRows, literal: Literal) -> None:
    assert swept.sweep is not None
    points = list(swept.sweep.cache)
    assert {(p.cache.theta, p.cache.size, p.cache.share) for p in points} == {
        (theta, size, share) for theta in (0.5, 0.05) for size in (6, 15) for share in (0.1, 0.3)
    }
    assert len(points) == 8
    check(points, literal)


def test_every_mbpa_of_one_step_is_the_literal_loop(swept: MemoryRows, literal: Literal) -> None:
    assert swept.sweep is not None
    points, best = list(swept.sweep.mbpa), swept.sweep.cache[0].cache
    counts = {min(3, best.size), min(9, best.size)}  # K is at most n
    seen = {
        (p.cache.share, p.mbpa.neighbours, p.mbpa.rate, p.mbpa.share) for p in points if p.mbpa and p.mbpa.steps == 1
    }
    assert seen == {(c, k, a, m) for c in (0.1, 0.3) for k in counts for a in (0.5, 0.1) for m in (0.05, 0.2)}
    assert len(points) == 16
    assert {(p.cache.theta, p.cache.size, p.mbpa.size) for p in points if p.mbpa} == {
        (best.theta, best.size, best.size)
    }
    check(points, literal)


def test_every_mbpa_of_two_steps_is_the_literal_loop_on_its_stretch(swept: MemoryRows, literal: Literal) -> None:
    assert swept.sweep is not None
    two = swept.sweep.two_steps
    assert two is not None
    best = swept.sweep.cache[0].cache
    assert (two.first, two.last) == (best.size, best.size + 7)
    assert len(two.points) == 2 * 2 * 2 * 4
    assert {(p.mbpa.steps, p.mbpa.l2) for p in two.points if p.mbpa} == {(2, 0.1), (2, 2.0)}
    check(list(two.points), literal, slice(two.first, two.last))
    check([two.one_step], literal, slice(two.first, two.last))
    assert two.one_step.mbpa is not None
    assert two.one_step.mbpa.steps == 1
    assert f"on predictions {two.first} to {two.last} of the validation text" in swept.sweep.notes[0]


def test_what_is_held_of_a_stretch_is_itself_and_what_its_memory_needs(
    network: LanguageModel, words: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = words.splits["valid"]
    monkeypatch.setitem(PIECES, "cpu", 7)
    h, targets = two_steps.around(network, ids, 10, 23)
    expected, labels = activations(network, ids)
    torch.testing.assert_close(h.double(), expected[10:23], rtol=1e-5, atol=1e-5)
    assert targets.tolist() == labels[10:23].tolist()


@pytest.mark.parametrize("many", [90, 10_000])
def test_a_stretch_that_reaches_the_end(many: int, network: LanguageModel, words: Corpus, literal: Literal) -> None:
    one = replace(GRIDS, thetas=(0.5,), sizes=(15,), rates=(0.5,), neighbours=(9,), l2=(0.1,), two_step_words=many)
    found = memory_rows(network, words, grids=one, splits=("valid",), quiet=True).sweep
    assert found is not None
    assert found.two_steps is not None
    assert (found.two_steps.first, found.two_steps.last) == (max(0, 99 - many), 99)
    check(list(found.two_steps.points), literal, slice(found.two_steps.first, 99))


def test_what_was_chosen_is_measured_on_both_texts(swept: MemoryRows, network: LanguageModel, words: Corpus) -> None:
    assert swept.sweep is not None
    memories = [row.memories for row in swept.rows]
    assert memories[0] == Memories(None, None)
    assert memories[1] == Memories(swept.sweep.cache[0].cache, None)
    assert memories[2] == Memories(swept.sweep.chosen.cache, swept.sweep.chosen.mbpa)
    for split in ("valid", "test"):
        loop = Literal(network, words.splits[split])
        for row in swept.rows:
            expected = loop.perplexity(row.memories.cache, row.memories.mbpa)
            assert row.scores[split].perplexity == pytest.approx(expected, rel=1e-5)
    alone, cached, _ = (row.scores["valid"].perplexity for row in swept.rows)
    assert cached == pytest.approx(swept.sweep.cache[0].perplexity)
    assert cached < alone


@pytest.mark.parametrize("in_time", [True, False])
def test_two_steps_are_chosen_where_better_and_there_is_time(
    in_time: bool, network: LanguageModel, words: Corpus, literal: Literal, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = replace(GRIDS, thetas=(0.05,), sizes=(15,), rates=(0.02,), neighbours=(9,), l2=(0.1,))
    read = two_steps.read_stretch

    def taking(*arguments: Any, **options: Any) -> dict[str, Tensor]:
        seconds = torch.tensor(0.1 if in_time else 1e6, dtype=torch.float64)
        return {**read(*arguments, **options), "seconds": seconds}

    monkeypatch.setattr(two_steps, "read_stretch", taking)
    found = memory_rows(network, words, grids=slow, quiet=True)
    assert found.sweep is not None
    two, chosen = found.sweep.two_steps, found.rows[-1].memories
    assert two is not None
    assert chosen.mbpa is not None
    assert two.points[0].perplexity < two.one_step.perplexity
    assert chosen.mbpa.steps == (2 if in_time else 1)
    assert any("two on the whole texts would take" in note for note in found.sweep.notes) is not in_time
    expected = literal.perplexity(chosen.cache, chosen.mbpa)
    assert found.rows[-1].scores["valid"].perplexity == pytest.approx(expected, rel=1e-5)
    expected = Literal(network, words.splits["test"]).perplexity(chosen.cache, chosen.mbpa)
    assert found.rows[-1].scores["test"].perplexity == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("rate", [0.02, 1.0])
def test_the_whole_validation_text_decides_between_one_step_and_two(
    rate: float, network: LanguageModel, words: Corpus, literal: Literal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stretch that two steps know by heart says nothing of the rest: neither of the steps nor of their shares."""
    one = replace(GRIDS, thetas=(0.05,), sizes=(15,), rates=(rate,), neighbours=(9,), l2=(0.1,))

    def by_heart(*_: object) -> dict[str, Tensor]:
        return {"mbpa": torch.zeros(one.two_step_words), "seconds": torch.zeros((), dtype=torch.float64)}

    monkeypatch.setattr(two_steps, "read_stretch", by_heart)
    found = memory_rows(network, words, grids=one, quiet=True)
    every = {}
    for steps, l2 in ((1, 0.0), (2, 0.1)):
        for cache_share in one.cache_shares:
            for share in one.mbpa_shares:
                pair = CacheSettings(15, 0.05, cache_share), MbpaSettings(15, 9, steps, rate, l2, share)
                every[pair] = literal.perplexity(*pair)
    best = min(every, key=lambda pair: every[pair])
    assert best[1].steps == (2 if rate < 1 else 1)
    assert (found.rows[-1].memories.cache, found.rows[-1].memories.mbpa) == best
    assert found.rows[-1].scores["valid"].perplexity == pytest.approx(every[best], rel=1e-5)
    assert found.sweep is not None
    assert any(note.startswith("On the whole validation text two steps reach") for note in found.sweep.notes)


def test_without_time_two_steps_are_left_out_and_named(network: LanguageModel, words: Corpus, literal: Literal) -> None:
    rows = memory_rows(network, words, grids=NO_TIME, quiet=True)
    found, chosen = rows.sweep, rows.rows[-1].memories
    expected = literal.perplexity(chosen.cache, chosen.mbpa)
    assert rows.rows[-1].scores["valid"].perplexity == pytest.approx(expected, rel=1e-5)
    assert found is not None
    assert found.two_steps is not None
    assert not found.two_steps.points
    assert len(found.two_steps.left_out) == 8
    assert "8 of 8 settings of two steps were left out" in " ".join(found.notes)
    assert found.chosen == found.mbpa[0]


def test_the_choice_does_not_see_the_test_text(network: LanguageModel, words: Corpus, swept: MemoryRows) -> None:
    other = type(words)(**{**vars(words), "splits": {**words.splits, "test": words.splits["test"].flip(0)}})
    found = memory_rows(network, other, grids=GRIDS, quiet=True)
    assert [row.memories for row in found.rows] == [row.memories for row in swept.rows]
    assert found.rows[0].scores["test"] != swept.rows[0].scores["test"]
    assert set(memory_rows(network, words, grids=NO_TIME, splits=("valid",), quiet=True).parts) == {"valid"}


def test_the_cache_alone(network: LanguageModel, words: Corpus, swept: MemoryRows) -> None:
    found = memory_rows(network, words, grids=GRIDS, mbpa=False, quiet=True)
    assert [row.memories for row in found.rows] == [row.memories for row in swept.rows[:2]]
    for split in ("valid", "test"):
        scores = [[row.scores[split].perplexity for row in rows] for rows in (found.rows, swept.rows[:2])]
        assert scores[0] == pytest.approx(scores[1], rel=1e-6)
    assert set(found.parts["test"]) == {"model", "cache"}


def test_each_text_is_read_once_for_each_grid(
    network: LanguageModel, words: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []

    def count(module: Any, name: str) -> None:
        whole = getattr(module, name)

        def counting(*arguments: Any, **options: Any) -> Any:
            read.append(f"{name} {len(arguments[1])}")
            return whole(*arguments, **options)

        monkeypatch.setattr(module, name, counting)

    count(memory_sweep, "read_cache_grid")
    count(memory_sweep, "read_mbpa_grid")
    count(rows_module, "read_parts")
    memory_rows(network, words, grids=replace(GRIDS, two_step_words=0), quiet=True)
    valid, test = len(words.splits["valid"]), len(words.splits["test"])
    assert read == [f"read_cache_grid {valid}", f"read_mbpa_grid {valid}", f"read_parts {test}"]


def stopped(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


def test_a_stopped_sweep_goes_on_and_a_repeated_one_reads_nothing(
    network: LanguageModel, words: Corpus, swept: MemoryRows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"grids": GRIDS, "folder": tmp_path / "parts", "prefix": "a-", "quiet": True}
    with monkeypatch.context() as patch:
        patch.setattr(memory_sweep, "read_mbpa_grid", stopped)
        with pytest.raises(KeyboardInterrupt):
            memory_rows(network, words, **options)
    assert [path.name for path in (tmp_path / "parts").iterdir()] == ["a-valid-cache-grid.npz"]
    with monkeypatch.context() as patch:
        patch.setattr(memory_sweep, "read_cache_grid", stopped)
        first = memory_rows(network, words, **options)
    assert [row.as_plain() for row in first.rows] == [row.as_plain() for row in swept.rows]
    with monkeypatch.context() as patch:
        for module in (memory_sweep, two_steps):
            patch.setattr(module, "pieces", stopped)
        for module in (memory_sweep, rows_module):
            patch.setattr(module, "read_parts", stopped)
        again = memory_rows(network, words, **options)
        assert [row.as_plain() for row in again.rows] == [row.as_plain() for row in first.rows]
        # Other shares need no new products; another θ does.
        memory_rows(network, words, **{**options, "grids": replace(GRIDS, cache_shares=(0.1, 0.2, 0.3))})
        with pytest.raises(KeyboardInterrupt):
            memory_rows(network, words, **{**options, "grids": replace(GRIDS, thetas=(0.5, 0.06))})


def test_parts_of_another_model_or_damaged_ones_are_made_again(
    network: LanguageModel, words: Corpus, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"grids": GRIDS, "mbpa": False, "quiet": True}
    expected = memory_rows(network, words, **options).rows[1].as_plain()
    other = model(seed=5)
    kept = memory_rows(other, words, folder=tmp_path, **options).rows[1].as_plain()
    assert kept != expected
    assert memory_rows(network, words, folder=tmp_path, **options).rows[1].as_plain() == expected
    for content in (b"", b"not an archive", (tmp_path / "test-parts.npz").read_bytes()[:200]):
        (tmp_path / "test-parts.npz").write_bytes(content)
        assert memory_rows(network, words, folder=tmp_path, **options).rows[1].as_plain() == expected


def test_what_a_killed_sweep_left_goes_when_its_part_is_made(tmp_path: Path) -> None:
    """Hundreds of megabytes on a large text; that of another model in the folder may be being written."""
    for prefix in ("", "hebbian-"):
        (tmp_path / f"{TEMPORARY}1-{prefix}grid.npz").write_bytes(b"half of it")
    store = Store(tmp_path, "", "these weights")
    assert store.get("grid", {}, lambda: {"x": torch.ones(3)})["x"].tolist() == [1, 1, 1]
    assert {path.name for path in tmp_path.iterdir()} == {f"{TEMPORARY}1-hebbian-grid.npz", "grid.npz"}


def test_grids_that_cannot_be_mixed_are_refused() -> None:
    with pytest.raises(LabError, match=r"0\.8 and 0\.3, sum to 1\.1"):
        Grids(cache_shares=(0.1, 0.8), mbpa_shares=(0.3,))


def test_no_more_neighbours_than_the_memory_holds() -> None:
    assert Grids().counts(1000) == [512, 1000]
    assert Grids().counts(200) == [200]


def test_two_steps_take_the_rates_next_to_the_best() -> None:
    grids = Grids(rates=(1.0, 0.1, 0.3, 0.01), neighbours=(2,), l2=(0.5,))
    assert [each.rate for each in grids.two_steps(10, 0.1)] == [0.01, 0.1, 0.3]
    assert [each.rate for each in grids.two_steps(10, 1.0)] == [0.3, 1.0]


def test_the_ends_of_grids_are_named() -> None:
    point = Point(1.0, CacheSettings(5000, 0.3, 0.05), MbpaSettings(5000, 512, 1, 0.1, 0.0, 0.1))
    (sentence,) = at_edges(point, Grids())
    ends = "θ = 0.3 (highest), the cache's λ = 0.05 (lowest), K = 512 (lowest), MbPA's λ = 0.1 (highest)"
    assert sentence.endswith(f": {ends}.")
    assert at_edges(Point(1.0, CacheSettings(5000, 0.2, 0.1)), Grids()) == []
