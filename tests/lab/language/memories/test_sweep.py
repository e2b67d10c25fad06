"""Every point of a sweep equals the literal loop, the best is chosen on the validation text, and results are kept."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hebbian_softmax.lab.base.errors import LabError
from hebbian_softmax.lab.base.files import TEMPORARY
from hebbian_softmax.lab.data.corpus import Corpus
from hebbian_softmax.lab.language.memories.cache import CacheSettings
from hebbian_softmax.lab.language.memories.mbpa import MbpaSettings, TwoSteps, around
from hebbian_softmax.lab.language.memories.memory import ALONE, Memories, Point
from hebbian_softmax.lab.language.memories.settings import Grids, at_edges
from hebbian_softmax.lab.language.memories.store import Store, digest
from hebbian_softmax.lab.language.memories.sweep import MemoryRows, memory_rows
from hebbian_softmax.lab.language.model import LanguageModel
from tests.closeness import assert_as_close
from tests.lab.language.memories.oracle import activations, losses_of, model, parts_of, perplexity_of, tolerance
from tests.lab.language.toy import corpus, exactly

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
    """Exact perplexities of a text from loops, each part of which is computed once."""

    def __init__(self, network: LanguageModel, ids: Tensor) -> None:
        self.network, self.ids, self.known = exactly(network), ids, {}
        steep = MbpaSettings(15, 9, 2, 1.0, 0.1)
        self.allowed = tolerance(network, ids[:40], Memories((CacheSettings(15, 0.5), steep)))

    def perplexity(self, memories: Memories, part: slice = slice(None)) -> float:
        parts: dict[str, Tensor] = {}
        for each in memories.used or (None,):
            key = None if each is None else each.with_share(0.0)
            if key not in self.known:
                self.known[key] = parts_of(self.network, self.ids, Memories(() if key is None else (key,)))
            parts |= self.known[key]
        return perplexity_of(losses_of(parts, memories)[part])

    def approx(self, memories: Memories, part: slice = slice(None)) -> Any:
        return pytest.approx(self.perplexity(memories, part), rel=self.allowed)


@pytest.fixture(scope="module")
def literal(network: LanguageModel, words: Corpus) -> Literal:
    return Literal(network, words.splits["valid"])


def check(points: list[Point], literal: Literal, part: slice = slice(None)) -> None:
    for point in points:
        assert point.perplexity == literal.approx(point.memories, part), point
    assert [point.perplexity for point in points] == sorted(point.perplexity for point in points)


def cache_of(point: Point) -> CacheSettings:
    found = point.memories.of(CacheSettings)
    assert found is not None
    return found


def mbpa_of(point: Point) -> MbpaSettings:
    found = point.memories.of(MbpaSettings)
    assert found is not None
    return found


def two_steps_of(found: MemoryRows) -> TwoSteps:
    assert found.sweep is not None
    two = found.sweep.refined["mbpa"]
    assert isinstance(two, TwoSteps)
    return two


def test_every_cache_is_the_literal_loop(swept: MemoryRows, literal: Literal) -> None:
    assert swept.sweep is not None
    points = list(swept.sweep.points["cache"])
    assert {(p.theta, p.size, p.share) for p in map(cache_of, points)} == {
        (theta, size, share) for theta in (0.5, 0.05) for size in (6, 15) for share in (0.1, 0.3)
    }
    assert len(points) == 8
    check(points, literal)


def test_every_mbpa_of_one_step_is_the_literal_loop(swept: MemoryRows, literal: Literal) -> None:
    assert swept.sweep is not None
    points, best = list(swept.sweep.points["mbpa"]), cache_of(swept.sweep.points["cache"][0])
    counts = {min(3, best.size), min(9, best.size)}  # K is at most n
    pairs = [(cache_of(point), mbpa_of(point)) for point in points]
    seen = {(c.share, m.neighbours, m.rate, m.share) for c, m in pairs if m.steps == 1}
    assert seen == {(c, k, a, m) for c in (0.1, 0.3) for k in counts for a in (0.5, 0.1) for m in (0.05, 0.2)}
    assert len(points) == 16
    assert {(c.theta, c.size, m.size) for c, m in pairs} == {(best.theta, best.size, best.size)}
    check(points, literal)


def test_every_mbpa_of_two_steps_is_the_literal_loop_on_its_stretch(swept: MemoryRows, literal: Literal) -> None:
    two = two_steps_of(swept)
    assert swept.sweep is not None
    best = cache_of(swept.sweep.points["cache"][0])
    assert (two.first, two.last) == (best.size, best.size + 7)
    assert len(two.points) == 2 * 2 * 2 * 4
    assert {(p.steps, p.l2) for p in map(mbpa_of, two.points)} == {(2, 0.1), (2, 2.0)}
    check(list(two.points), literal, slice(two.first, two.last))
    check([two.one_step], literal, slice(two.first, two.last))
    assert mbpa_of(two.one_step).steps == 1
    assert f"on predictions {two.first} to {two.last} of the validation text" in swept.sweep.notes[0]


def test_what_is_held_of_a_stretch_is_itself_and_what_its_memory_needs(network: LanguageModel, words: Corpus) -> None:
    ids = words.splits["valid"]
    h, targets = around(network, ids, 10, 23, piece=7)
    (expected, labels), (exact, _) = activations(network, ids), activations(exactly(network), ids)
    assert_as_close(h, expected[10:23], exact[10:23])
    assert targets.tolist() == labels[10:23].tolist()


@pytest.mark.parametrize("many", [90, 10_000])
def test_a_stretch_that_reaches_the_end(many: int, network: LanguageModel, words: Corpus, literal: Literal) -> None:
    one = replace(GRIDS, thetas=(0.5,), sizes=(15,), rates=(0.5,), neighbours=(9,), l2=(0.1,), two_step_words=many)
    found = two_steps_of(memory_rows(network, words, grids=one, splits=("valid",), quiet=True))
    assert (found.first, found.last) == (max(0, 99 - many), 99)
    check(list(found.points), literal, slice(found.first, 99))


def test_what_was_chosen_is_measured_on_both_texts(swept: MemoryRows, network: LanguageModel, words: Corpus) -> None:
    assert swept.sweep is not None
    memories = [row.memories for row in swept.rows]
    assert memories == [ALONE, swept.sweep.points["cache"][0].memories, swept.sweep.chosen.memories]
    for split in ("valid", "test"):
        loop = Literal(network, words.splits[split])
        for row in swept.rows:
            assert row.scores[split].perplexity == loop.approx(row.memories)
    alone, cached, _ = (row.scores["valid"].perplexity for row in swept.rows)
    assert cached == pytest.approx(swept.sweep.points["cache"][0].perplexity)
    assert cached < alone


@pytest.mark.parametrize("in_time", [True, False])
def test_two_steps_are_chosen_where_better_and_there_is_time(
    in_time: bool, network: LanguageModel, words: Corpus, literal: Literal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock advances with every look at it: slowly, or so fast that whole texts would take too long."""
    slow = replace(GRIDS, thetas=(0.05,), sizes=(15,), rates=(0.02,), neighbours=(9,), l2=(0.1,))
    ticks = itertools.count()
    monkeypatch.setattr("time.monotonic", lambda: next(ticks) * (0.1 if in_time else slow.budget / 40))
    found = memory_rows(network, words, grids=slow, quiet=True)
    assert found.sweep is not None
    two, chosen = two_steps_of(found), found.rows[-1].memories
    assert two.points[0].perplexity < two.one_step.perplexity
    assert mbpa_of(found.sweep.chosen).steps == (2 if in_time else 1)
    assert any("two on the whole texts would take" in note for note in found.sweep.notes) is not in_time
    assert found.rows[-1].scores["valid"].perplexity == literal.approx(chosen)
    assert found.rows[-1].scores["test"].perplexity == Literal(network, words.splits["test"]).approx(chosen)


@pytest.mark.parametrize("rate", [0.02, 1.0])
def test_the_whole_validation_text_decides_between_one_step_and_two(
    rate: float, network: LanguageModel, words: Corpus, literal: Literal, tmp_path: Path
) -> None:
    """A stretch that two steps predict perfectly decides neither the number of steps nor the shares."""
    one = replace(GRIDS, thetas=(0.05,), sizes=(15,), rates=(rate,), neighbours=(9,), l2=(0.1,))
    by_heart = {"mbpa": torch.zeros(one.two_step_words), "seconds": torch.zeros((), dtype=torch.float64)}
    store = Store(tmp_path, "", f"{digest(network)} {words.fingerprint}")
    identity = {**MbpaSettings(15, 9, 2, rate, 0.1, 0.0).as_plain(), "first": 15, "last": 15 + one.two_step_words}
    store.get("valid-two-steps-0", identity, lambda: by_heart)
    found = memory_rows(network, words, grids=one, folder=tmp_path, quiet=True)
    assert two_steps_of(found).points[0].perplexity < 1 / 0.2  # every word has at least MbPA's share
    every = {}
    for steps, l2 in ((1, 0.0), (2, 0.1)):
        for cache_share in one.cache_shares:
            for share in one.mbpa_shares:
                pair = CacheSettings(15, 0.05, cache_share), MbpaSettings(15, 9, steps, rate, l2, share)
                every[pair] = literal.perplexity(Memories(pair))
    best = min(every, key=lambda pair: every[pair])
    assert best[1].steps == (2 if rate < 1 else 1)
    assert found.rows[-1].memories.used == best
    assert found.rows[-1].scores["valid"].perplexity == pytest.approx(every[best], rel=literal.allowed)
    assert found.sweep is not None
    assert any(note.startswith("On the whole validation text two steps reach") for note in found.sweep.notes)


def test_without_time_two_steps_are_left_out_and_named(network: LanguageModel, words: Corpus, literal: Literal) -> None:
    rows = memory_rows(network, words, grids=NO_TIME, quiet=True)
    found, chosen = rows.sweep, rows.rows[-1].memories
    assert rows.rows[-1].scores["valid"].perplexity == literal.approx(chosen)
    assert found is not None
    assert not two_steps_of(rows).points
    assert len(two_steps_of(rows).left_out) == 8
    assert "8 of 8 settings of two steps were left out" in " ".join(found.notes)
    assert found.chosen == found.points["mbpa"][0]


def test_the_choice_does_not_see_the_test_text(network: LanguageModel, words: Corpus, swept: MemoryRows) -> None:
    other = type(words)(**{**vars(words), "splits": {**words.splits, "test": words.splits["test"].flip(0)}})
    found = memory_rows(network, other, grids=GRIDS, quiet=True)
    assert [row.memories for row in found.rows] == [row.memories for row in swept.rows]
    assert found.rows[0].scores["test"] != swept.rows[0].scores["test"]
    assert set(memory_rows(network, words, grids=NO_TIME, splits=("valid",), quiet=True).parts) == {"valid"}


def test_the_cache_alone(network: LanguageModel, words: Corpus, swept: MemoryRows, literal: Literal) -> None:
    found = memory_rows(network, words, grids=GRIDS, kinds=[CacheSettings], quiet=True)
    assert [row.memories for row in found.rows] == [row.memories for row in swept.rows[:2]]
    for split in ("valid", "test"):
        scores = [[row.scores[split].perplexity for row in rows] for rows in (found.rows, swept.rows[:2])]
        assert scores[0] == pytest.approx(scores[1], rel=literal.allowed)
    assert set(found.parts["test"]) == {"model", "cache"}


def watch(network: LanguageModel, patch: pytest.MonkeyPatch, hook: Callable[[int], object]) -> None:
    """Call `hook` with the number of words each time the network reads some."""
    features = network.features

    def watched(inputs: Tensor, state: Any = None) -> Any:
        hook(len(inputs))
        return features(inputs, state)

    patch.setattr(network, "features", watched)


def stopped(*_: object) -> None:
    raise KeyboardInterrupt


def test_each_text_is_read_once_for_each_grid(
    network: LanguageModel, words: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    watch(network, monkeypatch, read.append)
    memory_rows(network, words, grids=replace(GRIDS, two_step_words=0), quiet=True)
    valid, test = (len(words.splits[split]) - 1 for split in ("valid", "test"))
    assert read == [valid, valid, test]  # the grid of the cache, the grid of MbPA, and the memories chosen


def test_a_stopped_sweep_goes_on_and_a_repeated_one_reads_nothing(
    network: LanguageModel, words: Corpus, swept: MemoryRows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"grids": GRIDS, "folder": tmp_path / "parts", "prefix": "a-", "quiet": True}
    reads = itertools.count()
    with monkeypatch.context() as patch:
        watch(network, patch, lambda count: next(reads) and stopped())  # stops at the second grid
        with pytest.raises(KeyboardInterrupt):
            memory_rows(network, words, **options)
    assert [path.name for path in (tmp_path / "parts").iterdir()] == ["a-valid-cache-grid.npz"]
    first = memory_rows(network, words, **options)
    assert [row.as_plain() for row in first.rows] == [row.as_plain() for row in swept.rows]
    watch(network, monkeypatch, stopped)
    again = memory_rows(network, words, **options)
    assert [row.as_plain() for row in again.rows] == [row.as_plain() for row in first.rows]
    # Other shares need no new products; another θ does.
    memory_rows(network, words, **{**options, "grids": replace(GRIDS, cache_shares=(0.1, 0.2, 0.3))})
    with pytest.raises(KeyboardInterrupt):
        memory_rows(network, words, **{**options, "grids": replace(GRIDS, thetas=(0.5, 0.06))})


def test_parts_of_another_model_or_damaged_ones_are_made_again(
    network: LanguageModel, words: Corpus, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"grids": GRIDS, "kinds": [CacheSettings], "quiet": True}
    expected = memory_rows(network, words, **options).rows[1].as_plain()
    other = model(seed=5)
    kept = memory_rows(other, words, folder=tmp_path, **options).rows[1].as_plain()
    assert kept != expected
    assert memory_rows(network, words, folder=tmp_path, **options).rows[1].as_plain() == expected
    for content in (b"", b"not an archive", (tmp_path / "test-parts.npz").read_bytes()[:200]):
        (tmp_path / "test-parts.npz").write_bytes(content)
        assert memory_rows(network, words, folder=tmp_path, **options).rows[1].as_plain() == expected


def test_what_a_killed_sweep_left_goes_when_its_part_is_made(tmp_path: Path) -> None:
    """These files can be hundreds of megabytes. That of another model is left, because it may be being written."""
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
    point = Point(1.0, Memories((CacheSettings(5000, 0.3, 0.05), MbpaSettings(5000, 512, 1, 0.1, 0.0, 0.1))))
    (sentence,) = at_edges(point, Grids())
    ends = "θ = 0.3 (highest), the cache's λ = 0.05 (lowest), K = 512 (lowest), MbPA's λ = 0.1 (highest)"
    assert sentence.endswith(f": {ends}.")
    assert at_edges(Point(1.0, Memories((CacheSettings(5000, 0.2, 0.1),))), Grids()) == []
