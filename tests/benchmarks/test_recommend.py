"""The study of recommenders: nothing leaks, scores are those of naive loops, and both heads are tuned alike."""

import json
import lzma
import math
import subprocess
import sys
import time
from collections import Counter
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from benchmarks.recommend import million
from benchmarks.recommend.baselines import Neighbours, Popularity
from benchmarks.recommend.data import (
    Event,
    Items,
    Lesson,
    Period,
    by_time,
    leave_one_out,
)
from benchmarks.recommend.plan import FINAL_SEEDS, METHODS, TUNING_SEED, around, bases, due, grid, third_axis
from benchmarks.recommend.reading import content_of, lines_of, read
from benchmarks.recommend.records import Record, read_records
from benchmarks.recommend.scores import Tally, gains
from benchmarks.recommend.table import tables
from benchmarks.recommend.trials import (
    BEAUTY,
    LAST,
    MOVIELENS,
    TASKS,
    TIME,
    Network,
    Trial,
    course_of,
    run,
    split_of,
    task_of,
)
from hypothesis import given, reject
from hypothesis import strategies as st

from tests import ROOT, SHARED
from tests.examples.test_recommender import naive_ranking


def numbered(raw: list[tuple[int, int, int]]) -> list[Event]:
    """Return events in the order of time, users and items numbered as they are first seen."""
    raw = sorted(raw, key=lambda each: each[2])
    users: dict[int, int] = {}
    items: dict[int, int] = {}
    return [Event(users.setdefault(u, len(users)), items.setdefault(i, len(items)), t) for u, i, t in raw]


EVENTS = st.lists(
    st.tuples(st.integers(0, 5), st.integers(0, 12), st.integers(0, 40)), min_size=30, max_size=60, unique=True
).map(numbered)


@given(EVENTS, st.integers(2, 12))
def test_the_split_by_time_is_a_replay_of_the_events(events: list[Event], period: int) -> None:
    try:
        split = by_time(events, 0.4, 0.2, period)
    except ValueError:
        reject()  # too many events in one second
    histories: dict[int, list[int]] = {}
    counts: Counter[int] = Counter()
    start = sum(lesson.fresh for lesson in split.train)
    assert _learned(split.train, events[:start], histories)
    counts.update(event.item for event in events[:start])
    assert split.items == len(counts) == 1 + max(counts)
    for part in split.periods:
        end = start + sum(lesson.fresh for lesson in part.lessons)
        assert events[start].time > events[start - 1].time  # nothing that is learned is as late as what is asked
        asked, taken = [], {user: list(items) for user, items in histories.items()}
        for event in events[start:end]:
            history = taken.setdefault(event.user, [])
            if history:
                asked.append((list(history), event.item, counts[event.item]))
            history.append(event.item)
        found = zip(map(list, part.histories), part.targets.tolist(), part.seen.tolist(), strict=True)
        assert list(found) == asked
        assert _learned(part.lessons, events[start:end], histories)
        counts.update(event.item for event in events[start:end])
        assert part.items == len(counts) == 1 + max(counts)
        start = end
    assert start == len(events)
    kinds = [part.split for part in split.periods]
    assert kinds == sorted(kinds, key=["valid", "test"].index)
    assert set(kinds) == {"valid", "test"}


def _learned(lessons: list[Lesson], events: list[Event], histories: dict[int, list[int]]) -> bool:
    """Append events to histories; return whether the lessons are those histories, and no others."""
    fresh = Counter(event.user for event in events)
    for event in events:
        histories.setdefault(event.user, []).append(event.item)
    found = {lesson.user: (list(lesson.history), lesson.fresh) for lesson in lessons}
    return len(found) == len(lessons) and found == {user: (histories[user], n) for user, n in fresh.items()}


def test_a_later_event_changes_nothing_before_it() -> None:
    """Training and the questions of a period are the same whatever comes later."""
    chance = np.random.default_rng(0)
    raw = [(int(chance.integers(6)), int(chance.integers(30)), time) for time in range(200)]
    changed = [(user, item if time < 150 else int(chance.integers(1000)), time) for user, item, time in raw]
    first, second = (by_time(numbered(each), 0.5, 0.1, 10) for each in (raw, changed))
    assert repr(first.train) == repr(second.train)
    assert first.items == second.items
    for old, new in zip(first.periods[:5], second.periods[:5], strict=True):  # up to event 150
        assert repr(old) == repr(new)
    assert repr(first.periods[5:]) != repr(second.periods[5:])


def test_too_few_events_for_a_split_by_time() -> None:
    with pytest.raises(ValueError, match="3 interactions are too few"):
        by_time([Event(0, item, 5) for item in range(3)])


@given(st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=6), min_size=1, max_size=6))
def test_leave_one_out(lists: list[list[int]]) -> None:
    sequences = [np.array(items) for items in lists]
    if not any(len(items) >= 3 for items in lists):
        lists.append([1, 2, 3])
        sequences.append(np.array([1, 2, 3]))
    split = leave_one_out(sequences)
    trained = [list(lesson.history) for lesson in split.train]
    assert trained == [items[:-2] if len(items) >= 3 else items for items in lists]
    asked = [items for items in lists if len(items) >= 3]
    counts = Counter(item for items in trained for item in items)
    for part, last in zip(split.periods, (-2, -1), strict=True):
        assert [list(history) for history in part.histories] == [items[:last] for items in asked]
        assert part.targets.tolist() == [items[last] for items in asked]
        assert part.seen.tolist() == [counts[items[last]] for items in asked]
        assert part.lessons == []
        assert part.items == split.items == 1 + max(max(items) for items in lists)


@pytest.mark.skipif(not (SHARED / "data" / "recommend").exists(), reason="the real interactions are not here")
def test_the_real_interactions_have_their_known_sizes() -> None:
    found = read(SHARED / "data" / BEAUTY, timed=False)
    beauty = found.sequences
    assert (len(beauty), sum(map(len, beauty)), 1 + max(int(each.max()) for each in beauty)) == (
        22_363,
        198_502,
        12_101,
    )
    assert found.summary() == "22,363 users, 12,101 items, 198,502 interactions; read as one line a user"
    events = read(SHARED / "data" / MOVIELENS, timed=True).events
    assert events is not None
    assert (len(events), len({e.user for e in events}), len({e.item for e in events})) == (100_000, 943, 1_682)
    split = by_time(events)
    asked = [part for part in split.periods if part.split == "test"]
    assert sum(lesson.fresh for lesson in split.train) == pytest.approx(40_000, abs=50)
    assert len(asked) == 40
    assert split.periods[-1].items == 1_682


@given(
    st.lists(st.permutations(range(12)).map(lambda each: each[:10]), min_size=1, max_size=8),
    st.lists(st.integers(0, 13), min_size=8, max_size=8),
    st.lists(st.integers(0, 12), min_size=8, max_size=8),
)
def test_scores_are_those_of_a_loop(recommended: list[list[int]], targets: list[int], seen: list[int]) -> None:
    count = len(recommended)
    targets, seen = targets[:count], seen[:count]
    tally = Tally(trained_items=6)
    for some in (slice(0, 1), slice(1, None)):  # in two periods
        if targets[some]:
            period = Period("test", [], np.array(targets[some]), np.array(seen[some]), [], 12)
            tally.add(np.array(recommended[some]), period)
    groups: dict[str, list[tuple[float, float]]] = {name: [] for name in ("all", "<10", "<5", "cold", "new")}
    for row, target, times in zip(recommended, targets, seen, strict=True):
        gain = 1 / math.log2(row.index(target) + 2) if target in row else 0.0
        member = {"all": True, "<10": times < 10, "<5": times < 5, "cold": times == 0, "new": target >= 6 and times > 0}
        for name in (name for name, belongs in member.items() if belongs):
            groups[name].append((gain, float(target in row)))
    for name, found in tally.scores().items():
        assert found["questions"] == len(groups[name])
        for at, kind in enumerate(("ndcg", "hit_rate")):
            values = [each[at] for each in groups[name]]
            assert found[kind] == (pytest.approx(sum(values) / len(values)) if values else None)


def test_the_ndcg_of_known_places() -> None:
    ndcg, hits = gains(np.array([[4, 5, 6], [4, 5, 6], [4, 5, -1]]), np.array([4, 6, 6]))
    assert ndcg.tolist() == [1.0, 0.5, 0.0]
    assert hits.tolist() == [True, True, False]


HISTORIES = st.lists(
    st.lists(st.integers(0, 7), min_size=1, max_size=6, unique=True).map(np.array), min_size=1, max_size=6
)


@given(HISTORIES, HISTORIES)
def test_popularity_is_that_of_a_loop(taken: list[Items], asked: list[Items]) -> None:
    baseline = Popularity("cpu")
    baseline.learn([Lesson(user, items, len(items)) for user, items in enumerate(taken)], 8)
    counts = Counter(int(item) for items in taken for item in items)
    scores = [float(counts[item]) for item in range(8)]
    assert baseline.recommend(asked, 10, batch=2).tolist() == [naive_ranking(scores, list(each), 10) for each in asked]


@given(HISTORIES, HISTORIES, st.integers(1, 9), st.integers(1, 7))
def test_item_neighbours_are_those_of_a_loop(
    taken: list[Items], asked: list[Items], neighbours: int, recent: int
) -> None:
    baseline = Neighbours(neighbours, recent)
    baseline.learn([Lesson(user, items, len(items)) for user, items in enumerate(taken)], 8)
    users = [{user for user, items in enumerate(taken) if item in items} for item in range(8)]

    def cosine(a: int, b: int) -> float:
        both = len(users[a] & users[b])
        return both / math.sqrt(len(users[a]) * len(users[b])) if both and a != b else 0.0

    for history, found in zip(asked, baseline.scores([torch.as_tensor(each) for each in asked]), strict=True):
        expected = [0.0] * 8
        for own in map(int, history[-recent:]):
            all_of_it = sorted((cosine(own, other) for other in range(8)), reverse=True)
            least = all_of_it[min(neighbours, 8) - 1] * (1 - 1e-6)
            for other in range(8):
                expected[other] += cosine(own, other) if cosine(own, other) >= least else 0.0
        assert found.tolist() == pytest.approx(expected, abs=1e-5)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A folder with the two files, tiny, in which users walk through the items in circles."""
    chance = np.random.default_rng(0)
    lines, events = [], []
    for user in range(24):
        items = [(5 * user + 2 * step) % 40 for step in range(8)]
        lines.append(" ".join(map(str, [user, *items])))
        events += [f"{user}\t{item}\t4\t{60 * step + chance.integers(60)}" for step, item in enumerate(items)]
    (tmp_path / BEAUTY).parent.mkdir()
    for name, text in ((BEAUTY, lines), (MOVIELENS, ["user\titem\trating\ttime", *events])):
        with lzma.open(tmp_path / name, "wt") as file:
            file.write("\n".join(text) + "\n")
    return tmp_path


def late() -> float:
    return time.time() + 600


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("method", METHODS)
def test_the_same_trial_gives_the_same_scores_and_tuning_sees_no_test(data: Path, task: str, method: str) -> None:
    trial = Trial(task, method, seed=3, epochs=2, start=1, limit=5)
    first, second = (run(trial, data, "cpu", late()) for _ in range(2))
    final = run(replace(trial, final=True), data, "cpu", late())
    assert first["valid"] == second["valid"] == final["valid"]
    assert "test" not in first
    for split in ("valid", "test"):
        assert final[split]["all"]["questions"] > 0
        assert 0 <= final[split]["all"]["ndcg"] <= final[split]["all"]["hit_rate"] <= 1
    assert first["given"] == asdict(trial)
    json.dumps(final)


@pytest.mark.gpu
@pytest.mark.parametrize("method", METHODS)
def test_trials_run_on_a_gpu(data: Path, method: str) -> None:
    """Rounding may order equal scores in another way, so only counting gives the same scores."""
    trial = Trial("movielens by time", method, final=True, epochs=2, start=1, limit=5)
    here, there = (run(trial, data, device, late()) for device in ("cpu", "cuda"))
    for split in ("valid", "test"):
        assert there[split]["all"]["questions"] == here[split]["all"]["questions"]
        assert there[split] == here[split] or method != "popularity"


def test_a_network_learns_the_circles(data: Path) -> None:
    settings: dict[str, Any] = {"epochs": 30, "learning_rate": 5e-3, "dropout": 0.0, "final": True}
    plain = run(Trial("beauty", "plain", **settings), data, "cpu", late())
    guess = run(Trial("beauty", "popularity", final=True), data, "cpu", late())
    assert plain["test"]["all"]["ndcg"] > 2 * guess["test"]["all"]["ndcg"]
    assert plain["steps"] == 30


def test_the_heads_differ_by_the_write_alone(data: Path) -> None:
    def rows(method: str, limit: int, start: int) -> torch.Tensor:
        torch.manual_seed(0)
        trial = Trial("beauty", method, epochs=3, limit=limit, start=start)
        return Network(trial, split_of("beauty", data), "cpu", late()).model.head.weight.detach()

    plain = rows("plain", 50, 0)
    assert torch.equal(rows("rule", 0, 0), plain)
    assert torch.equal(rows("rule", 50, 3), plain)
    assert not torch.allclose(rows("rule", 50, 2), plain)


@pytest.mark.parametrize("split", [LAST, TIME])
def test_a_file_of_ones_own_is_a_task(data: Path, split: str) -> None:
    own = data / "mine.tsv"
    lines = lines_of(own, content_of(data / MOVIELENS))
    rows = [line.split("\t") for _, line in lines[1:]]
    own.write_text("\n".join(["user\titem\ttime", *("\t".join((row[0], row[1], row[3])) for row in rows)]))
    name = "movielens" if split == LAST else "movielens by time"
    assert repr(split_of(f"{split}{own}", data)) == repr(split_of(name, data))
    settings: dict[str, Any] = {"final": True, "epochs": 2, "start": 1}
    found = run(Trial(f"{split}{own}", "rule", **settings), data, "cpu", late())
    assert found["test"]["all"]["questions"] > 0
    assert any(str(own) in line for line in tables([found]))
    assert {trial.task for trial in due(bases(f"{split}{own}"), [])} == {f"{split}{own}"}


def test_a_trial_out_of_time_raises(data: Path) -> None:
    with pytest.raises(TimeoutError):
        run(Trial("beauty", "plain", epochs=1000), data, "cpu", time.time() + 0.2)


def results_of(trials: list[Trial]) -> list[Record]:
    """Return made-up results: plain softmax likes small dropout, long training and many passes, the rule does not."""
    found = []
    for trial in trials:
        sign = -1 if trial.method == "rule" else 1
        ndcg = 0.2 - sign * (0.1 * trial.dropout - 1e-3 * trial.epochs - 0.01 * trial.passes) + trial.learning_rate
        groups = {name: {"questions": 1, "ndcg": ndcg, "hit_rate": 0.5} for name in ("all", "<10", "<5", "cold", "new")}
        found.append({"given": asdict(trial), "valid": groups, "seconds": 1.0})
        if trial.final:
            found[-1]["test"] = groups | {"cold": {"questions": 0, "ndcg": None, "hit_rate": None}}
    return found


def best_of(trials: list[Trial]) -> Trial:
    return max(trials, key=lambda trial: results_of([trial])[0]["valid"]["all"]["ndcg"])


@pytest.mark.parametrize("task", TASKS)
def test_both_heads_are_tuned_in_the_same_way_and_have_the_same_seeds(task: str) -> None:
    """Each goes on around its own best point, and these points differ."""
    records: list[Record] = []
    done: list[Trial] = []
    while some := due(bases(task), records):
        assert not set(some) & set(done)
        done += some
        records += json.loads(json.dumps(results_of(some)))
    tried = {method: [trial for trial in done if trial.method == method and not trial.final] for method in METHODS}
    assert {each.seed for some in tried.values() for each in some} == {TUNING_SEED}
    final = {method: [trial for trial in done if trial.method == method and trial.final] for method in METHODS}
    for method in ("plain", "rule"):
        expected = [Trial(task, method, TUNING_SEED, **point) for point in grid(task)]
        for _ in range(2):
            expected += [trial for trial in around(best_of(expected)) if trial not in expected]
        assert set(tried[method]) == set(expected)
        assert len(tried[method]) == len(expected) >= len(third_axis(task)) * 4 + 6
        assert final[method] == [replace(best_of(tried[method]), seed=seed, final=True) for seed in FINAL_SEEDS]
    plain, rule = final["plain"][0], final["rule"][0]
    assert plain.dropout <= 0.2 < 0.5 <= rule.dropout
    assert plain.passes > rule.passes if task_of(task).periods else plain.epochs > rule.epochs
    assert len(final["popularity"]) == len(final["neighbours"]) == 1
    shown = "\n".join(tables(records))
    assert "rule, 5 seeds" in shown
    assert all(
        shown.count(f"{method}, chosen on validation from {len(tried[method])} trials") == 1
        for method in ("plain", "rule")
    )
    assert "gamma" not in shown
    for record in records:
        record["given"]["gamma"] = 0.02
    assert "\n".join(tables(records)).count("gamma 0.02") == 1  # of the rule alone


@given(st.sampled_from(list(TASKS)), st.lists(st.integers(0, 99), min_size=2, max_size=2))
def test_no_point_is_nearly_tried_twice(task: str, best: list[int]) -> None:
    """Whatever is best after each round, settings that differ do so by more than chance could tell."""
    tried = [Trial(task, "plain", **point) for point in grid(task)]
    for each in best:
        tried += [trial for trial in around(tried[each % len(tried)]) if trial not in tried]
    for name in ("learning_rate", "epochs"):
        values = sorted({getattr(trial, name) for trial in tried})
        assert all(after > 1.05 * before for before, after in pairwise(values)), values
    assert max(trial.period_rate for trial in tried) <= 1


def test_the_final_settings_do_not_depend_on_the_test() -> None:
    first = due(bases("beauty"), [])
    records = results_of(first)
    for record in records:
        record["test"] = {"all": {"ndcg": float(record["given"]["dropout"])}}  # another order than on validation
    assert due(bases("beauty"), records) == due(bases("beauty"), results_of(first))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_program_stops_and_goes_on(data: Path, tmp_path: Path) -> None:
    file = tmp_path / "out.jsonl"
    command = [sys.executable, "-m", "benchmarks.recommend", str(file), "--data", str(data)]
    command += ["--tasks", "beauty", "--workers", "2", "--budget"]
    begun = time.time()
    first = subprocess.run([*command, "35"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert time.time() - begun < 45
    some = read_records(file)
    second = subprocess.run([*command, "800"], cwd=ROOT, capture_output=True, text=True, check=True)
    records = read_records(file)
    assert records[: len(some)] == some
    assert not [record["error"] for record in records if "error" in record]
    assert len({json.dumps(record["given"]) for record in records}) == len(records)
    course = course_of("beauty", data)
    assert due(bases("beauty", METHODS, course.data, course.protocol), records) == []
    assert {record["given"]["seed"] for record in records if record["given"]["final"]} >= set(FINAL_SEEDS)
    assert "out of time" in first.stdout or len(some) == len(records)
    assert "everything has a result" in second.stdout


def test_steps_at_many_items_agree_on_the_exact_loss(tmp_path: Path) -> None:
    """All contenders but the compiled one, which would take long to compile."""
    file = tmp_path / "steps.jsonl"
    some = [name for name in million.CONTENDERS if name != "torch.compile"]
    command = [str(file), "--items", "300", "--users", "2", "--features", "8", "--steps", "2", "--contenders", *some]
    million.main(command)
    records = {record["given"]["contender"]: record for record in read_records(file)}
    assert not [record["error"] for record in records.values() if "error" in record]
    losses = [records[name]["first_loss"] for name in ("head, plain", "head with the rule", "eager")]
    assert losses == pytest.approx([losses[-1]] * 3, rel=0.02)  # bfloat16
    assert all(len(record["samples"]) == 2 for record in records.values())
    million.main(command)
    assert len(read_records(file)) == len(some)  # nothing is measured twice
    million.main([str(tmp_path / "none.jsonl"), "--budget", "10"])
    assert read_records(tmp_path / "none.jsonl") == []  # too little time


def test_the_sampled_loss_is_exact_when_all_other_items_are_drawn() -> None:
    h, weight, targets = torch.randn(3, 4), torch.randn(7, 4), torch.tensor([2, 2, 2])
    others = torch.tensor([0, 1, 3, 4, 5, 6])
    found = million.sampled_loss(h, weight, targets, others, sparse=False)
    torch.testing.assert_close(found, F.cross_entropy(h @ weight.T, targets))
