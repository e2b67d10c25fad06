"""Every point of a sweep equals the literal loop, the best is chosen on the validation text, and results are kept."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hebbian_softmax.lab.base.files import TEMPORARY
from hebbian_softmax.lab.language.memories.cache import CacheSettings
from hebbian_softmax.lab.language.memories.mbpa import MbpaSettings, around
from hebbian_softmax.lab.language.memories.memory import ALONE, Memories, Point
from hebbian_softmax.lab.language.memories.settings import Grids, at_edges
from hebbian_softmax.lab.language.memories.store import Store, digest
from hebbian_softmax.lab.language.memories.sweep import MemoryRows, memory_rows
from tests.closeness import assert_as_close
from tests.lab.language.memories.oracle import activations, losses_of, model, parts_of, perplexity_of, tolerance
from tests.lab.language.toy import corpus, exactly

NETWORK, WORDS = model(), corpus()
VALID = WORDS.splits["valid"]
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


def sweep(grids: Grids = GRIDS, **options: Any) -> MemoryRows:
    return memory_rows(NETWORK, WORDS, grids=grids, quiet=True, **options)


def one_point(rate: float, theta: float = 0.05, **changes: Any) -> Grids:
    """Return grids of which only the shares are left to choose."""
    return replace(GRIDS, thetas=(theta,), sizes=(15,), rates=(rate,), neighbours=(9,), l2=(0.1,), **changes)


@pytest.fixture(scope="module")
def swept() -> MemoryRows:
    return sweep()


class Literal:
    """Exact perplexities of a text from loops, each part of which is computed once."""

    def __init__(self, ids: Tensor) -> None:
        self.network, self.ids, self.known = exactly(NETWORK), ids, {}
        steep = MbpaSettings(15, 9, 2, 1.0, 0.1)
        self.allowed = tolerance(NETWORK, ids[:40], Memories((CacheSettings(15, 0.5), steep)))

    def perplexity(self, memories: Memories, part: slice = slice(None)) -> float:
        parts: dict[str, Tensor] = {}
        for alone in (ALONE, *(Memories((each.with_share(0.0),)) for each in memories.used)):
            if alone not in self.known:
                self.known[alone] = parts_of(self.network, self.ids, alone)
            parts |= self.known[alone]
        return perplexity_of(losses_of(parts, memories)[part])

    def approx(self, memories: Memories, part: slice = slice(None)) -> Any:
        return pytest.approx(self.perplexity(memories, part), rel=self.allowed)

    def check(self, points: Sequence[Point], part: slice = slice(None)) -> None:
        for point in points:
            assert point.perplexity == self.approx(point.memories, part), point
        assert [point.perplexity for point in points] == sorted(point.perplexity for point in points)


@pytest.fixture(scope="module")
def literal() -> Literal:
    return Literal(VALID)


def test_every_cache_is_the_literal_loop(swept: MemoryRows, literal: Literal) -> None:
    points = swept.sweep.points["cache"]
    every = {CacheSettings(size, theta, share) for theta in (0.5, 0.05) for size in (6, 15) for share in (0.1, 0.3)}
    assert {point.memories.used for point in points} == {(each,) for each in every}
    assert len(points) == 8
    literal.check(points)


def test_every_mbpa_of_one_step_is_the_literal_loop(swept: MemoryRows, literal: Literal) -> None:
    points, (best,) = swept.sweep.points["mbpa"], swept.sweep.points["cache"][0].memories.used
    counts = {min(3, best.size), min(9, best.size)}  # K is at most n
    assert {point.memories.used for point in points} == {
        (best.with_share(c), MbpaSettings(best.size, k, 1, a, 0.0, m))
        for c, k, a, m in itertools.product((0.1, 0.3), counts, (0.5, 0.1), (0.05, 0.2))
    }
    assert len(points) == 16
    literal.check(points)


def test_every_mbpa_of_two_steps_is_the_literal_loop_on_its_stretch(swept: MemoryRows, literal: Literal) -> None:
    two, (best,) = swept.sweep.refined["mbpa"], swept.sweep.points["cache"][0].memories.used
    assert (two.first, two.last) == (best.size, best.size + 7)
    assert len(two.points) == 2 * 2 * 2 * 4
    mbpas = [point.memories.used[1] for point in two.points]
    assert {(each.steps, each.l2) for each in mbpas} == {(2, 0.1), (2, 2.0)}
    literal.check(two.points, slice(two.first, two.last))
    literal.check([two.one_step], slice(two.first, two.last))
    assert two.one_step.memories.used[1].steps == 1
    assert f"on predictions {two.first} to {two.last} of the validation text" in swept.sweep.notes[0]


def test_what_is_held_of_a_stretch_is_itself_and_what_its_memory_needs() -> None:
    h, targets = around(NETWORK, VALID, 10, 23, piece=7)
    (expected, labels), (exact, _) = (activations(each, VALID) for each in (NETWORK, exactly(NETWORK)))
    assert_as_close(h, expected[10:23], exact[10:23])
    assert targets.tolist() == labels[10:23].tolist()


@pytest.mark.parametrize("many", [90, 10_000])
def test_a_stretch_that_reaches_the_end(many: int, literal: Literal) -> None:
    found = sweep(one_point(0.5, theta=0.5, two_step_words=many), splits=("valid",)).sweep.refined["mbpa"]
    assert (found.first, found.last) == (max(0, 99 - many), 99)
    literal.check(found.points, slice(found.first, 99))


def test_what_was_chosen_is_measured_on_both_texts(swept: MemoryRows) -> None:
    memories = [row.memories for row in swept.rows]
    assert memories == [ALONE, swept.sweep.points["cache"][0].memories, swept.sweep.chosen.memories]
    for split in ("valid", "test"):
        loop = Literal(WORDS.splits[split])
        for row in swept.rows:
            assert row.scores[split].perplexity == loop.approx(row.memories)
    alone, cached, _ = (row.scores["valid"].perplexity for row in swept.rows)
    assert cached == pytest.approx(swept.sweep.points["cache"][0].perplexity)
    assert cached < alone


@pytest.mark.parametrize("in_time", [True, False])
def test_two_steps_are_chosen_where_better_and_there_is_time(
    in_time: bool, literal: Literal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock advances with every look at it: slowly, or so fast that whole texts would take too long."""
    ticks = itertools.count()
    monkeypatch.setattr("time.monotonic", lambda: next(ticks) * (0.1 if in_time else GRIDS.budget / 40))
    found = sweep(one_point(0.02))
    two, chosen = found.sweep.refined["mbpa"], found.rows[-1].memories
    assert two.points[0].perplexity < two.one_step.perplexity
    assert found.sweep.chosen.memories.used[1].steps == (2 if in_time else 1)
    assert any("two on the whole texts would take" in note for note in found.sweep.notes) is not in_time
    assert found.rows[-1].scores["valid"].perplexity == literal.approx(chosen)
    assert found.rows[-1].scores["test"].perplexity == Literal(WORDS.splits["test"]).approx(chosen)


@pytest.mark.parametrize("rate", [0.02, 1.0])
def test_the_whole_validation_text_decides_between_one_step_and_two(
    rate: float, literal: Literal, tmp_path: Path
) -> None:
    """A stretch that two steps predict perfectly decides neither the number of steps nor the shares."""
    by_heart = {"mbpa": torch.zeros(7), "seconds": torch.zeros((), dtype=torch.float64)}
    store = Store(tmp_path, "", f"{digest(NETWORK)} {WORDS.fingerprint}")
    identity = {**MbpaSettings(15, 9, 2, rate, 0.1, 0.0).as_plain(), "first": 15, "last": 22}
    store.get("valid-two-steps-0", identity, lambda: by_heart)
    found = sweep(one_point(rate), folder=tmp_path)
    assert found.sweep.refined["mbpa"].points[0].perplexity < 1 / 0.2  # every word has at least MbPA's share
    every = {}
    for (steps, l2), cache_share, share in itertools.product(((1, 0.0), (2, 0.1)), (0.1, 0.3), (0.05, 0.2)):
        pair = CacheSettings(15, 0.05, cache_share), MbpaSettings(15, 9, steps, rate, l2, share)
        every[pair] = literal.perplexity(Memories(pair))
    best = min(every, key=lambda pair: every[pair])
    assert best[1].steps == (2 if rate < 1 else 1)
    assert found.rows[-1].memories.used == best
    assert found.rows[-1].scores["valid"].perplexity == pytest.approx(every[best], rel=literal.allowed)
    assert any(note.startswith("On the whole validation text two steps reach") for note in found.sweep.notes)


def test_without_time_two_steps_are_left_out_and_named(literal: Literal) -> None:
    rows = sweep(NO_TIME)
    found, two = rows.sweep, rows.sweep.refined["mbpa"]
    assert rows.rows[-1].scores["valid"].perplexity == literal.approx(rows.rows[-1].memories)
    assert (len(two.points), len(two.left_out)) == (0, 8)
    assert "8 of 8 settings of two steps were left out" in " ".join(found.notes)
    assert found.chosen == found.points["mbpa"][0]


def test_the_choice_does_not_see_the_test_text(swept: MemoryRows) -> None:
    other = replace(WORDS, splits={**WORDS.splits, "test": WORDS.splits["test"].flip(0)})
    found = memory_rows(NETWORK, other, grids=GRIDS, quiet=True)
    assert [row.memories for row in found.rows] == [row.memories for row in swept.rows]
    assert found.rows[0].scores["test"] != swept.rows[0].scores["test"]
    assert set(sweep(NO_TIME, splits=("valid",)).parts) == {"valid"}


def test_the_cache_alone(swept: MemoryRows, literal: Literal) -> None:
    found = sweep(kinds=[CacheSettings])
    assert [row.memories for row in found.rows] == [row.memories for row in swept.rows[:2]]
    for split in ("valid", "test"):
        scores = [[row.scores[split].perplexity for row in rows] for rows in (found.rows, swept.rows[:2])]
        assert scores[0] == pytest.approx(scores[1], rel=literal.allowed)
    assert set(found.parts["test"]) == {"model", "cache"}


def watch(patch: pytest.MonkeyPatch, hook: Callable[[int], object]) -> None:
    """Call `hook` with the number of words each time the network reads some."""
    features = NETWORK.features

    def watched(inputs: Tensor, state: Any = None) -> Any:
        hook(len(inputs))
        return features(inputs, state)

    patch.setattr(NETWORK, "features", watched)


def stopped(*_: object) -> None:
    raise KeyboardInterrupt


def test_each_text_is_read_once_for_each_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    watch(monkeypatch, read.append)
    sweep(replace(GRIDS, two_step_words=0))
    test = len(WORDS.splits["test"]) - 1
    assert read == [99, 99, test]  # the grid of the cache, the grid of MbPA, and the memories chosen


def test_a_stopped_sweep_goes_on_and_a_repeated_one_reads_nothing(
    swept: MemoryRows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"folder": tmp_path / "parts", "prefix": "a-"}
    reads = itertools.count()
    with monkeypatch.context() as patch:
        watch(patch, lambda count: next(reads) and stopped())  # stops at the second grid
        with pytest.raises(KeyboardInterrupt):
            sweep(**options)
    assert [path.name for path in (tmp_path / "parts").iterdir()] == ["a-valid-cache-grid.npz"]
    assert sweep(**options).rows == swept.rows
    watch(monkeypatch, stopped)
    assert sweep(**options).rows == swept.rows
    # Other shares need no new products; another θ does.
    sweep(replace(GRIDS, cache_shares=(0.1, 0.2, 0.3)), **options)
    with pytest.raises(KeyboardInterrupt):
        sweep(replace(GRIDS, thetas=(0.5, 0.06)), **options)


def test_parts_of_another_model_or_damaged_ones_are_made_again(tmp_path: Path) -> None:
    options: dict[str, Any] = {"kinds": [CacheSettings], "folder": tmp_path}
    expected = sweep(kinds=[CacheSettings]).rows
    assert memory_rows(model(seed=5), WORDS, grids=GRIDS, quiet=True, **options).rows != expected
    assert sweep(**options).rows == expected
    for content in (b"", b"not an archive", (tmp_path / "test-parts.npz").read_bytes()[:200]):
        (tmp_path / "test-parts.npz").write_bytes(content)
        assert sweep(**options).rows == expected


def test_what_a_killed_sweep_left_goes_when_its_part_is_made(tmp_path: Path) -> None:
    """These files can be hundreds of megabytes. That of another model is left, because it may be being written."""
    for prefix in ("", "hebbian-"):
        (tmp_path / f"{TEMPORARY}1-{prefix}grid.npz").write_bytes(b"half of it")
    store = Store(tmp_path, "", "these weights")
    assert store.get("grid", {}, lambda: {"x": torch.ones(3)})["x"].tolist() == [1, 1, 1]
    assert {path.name for path in tmp_path.iterdir()} == {f"{TEMPORARY}1-hebbian-grid.npz", "grid.npz"}


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
