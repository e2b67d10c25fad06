"""The example of a recommender: exact rankings, targets that come once, and a catalogue that grows."""

import lzma
from pathlib import Path
from typing import Any

import pytest
import torch
from examples.recommender import IGNORED, Recommender, best_unseen, invented, main, read, train_once, windows
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hebbian_softmax import OnePassAdam

RULE: dict[str, Any] = {"gamma": 0.1, "limit": 50, "start": 0}
SMALL: dict[str, Any] = {"features": 8, "layers": 1, "length": 6, "dropout": 0.0}


def naive_ranking(scores: list[float], history: list[int], k: int) -> list[int]:
    """Return the k best items that are not in the history, the lowest number first among equals, then -1."""
    left = [item for item in range(len(scores)) if item not in history]
    best = sorted(left, key=lambda item: (-scores[item], item))[:k]
    return best + [-1] * (k - len(best))


@given(
    histories=st.lists(st.lists(st.integers(0, 11), min_size=1, max_size=14), min_size=1, max_size=5),
    k=st.integers(1, 15),
    seed=st.integers(0, 99),
)
def test_recommendations_are_the_naive_ranking(histories: list[list[int]], k: int, seed: int) -> None:
    """Small integers as values, so that products are exact and many scores are equal."""
    generator = torch.Generator().manual_seed(seed)
    h = torch.randint(-2, 3, (len(histories), 4), generator=generator).float()
    weight = torch.randint(-2, 3, (12, 4), generator=generator).float()
    found = best_unseen(h, weight, [torch.tensor(history) for history in histories], k)
    scores: list[list[float]] = (h @ weight.T).tolist()
    assert found.tolist() == [naive_ranking(*pair, k) for pair in zip(scores, histories, strict=True)]


def test_a_model_recommends_what_its_own_logits_rank_first() -> None:
    model = Recommender(30, **SMALL, **RULE).eval()
    histories = [[3], [1, 2, 3, 4, 5, 6, 7, 8, 9], [29, 0], [31, 5], [30]]  # 30 and 31 are not in the catalogue yet
    found = model.recommend(histories, k=5, batch=2).tolist()
    for history, row in zip(histories[:-1], found, strict=False):
        known = [item for item in history if item < 30]
        with torch.no_grad():
            logits = model.head(model(torch.tensor([known[-6:]]))[0, -1])
        assert row == naive_ranking(logits.tolist(), known, 5)
    assert found[-1] == [-1] * 5


def test_what_fills_up_a_row_changes_nothing_before_it() -> None:
    model = Recommender(30, **SMALL, **RULE)
    short, long = torch.tensor([[4, 5, 6]]), torch.tensor([[4, 5, 6, 0, 0]])
    for training in (True, False):
        model.train(training)
        torch.testing.assert_close(model(long)[:, :3], model(short))


@given(
    histories=st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=20), min_size=1, max_size=4),
    fresh=st.lists(st.integers(0, 25), min_size=4, max_size=4),
    length=st.integers(1, 7),
)
def test_each_fresh_item_is_a_target_once(histories: list[list[int]], fresh: list[int], length: int) -> None:
    fresh = fresh[: len(histories)]
    inputs, targets = windows(histories, fresh, length)
    assert inputs.shape == targets.shape
    expected = []
    for history, wanted in zip(histories, fresh, strict=True):
        first = max(1, len(history) - wanted)
        expected += [(history[at - 1], history[at]) for at in range(first, len(history))]
    at = targets != IGNORED
    assert sorted(zip(inputs[at].tolist(), targets[at].tolist(), strict=True)) == sorted(expected)


def test_a_window_has_what_came_before_in_order() -> None:
    inputs, targets = windows([[1, 2, 3, 4, 5, 6, 7]], [4], 3)
    assert inputs.tolist() == [[4, 5, 6], [1, 2, 3]]
    assert targets.tolist() == [[5, 6, 7], [IGNORED, IGNORED, 4]]


def test_nothing_is_trained_where_nobody_took_a_second_item() -> None:
    model = Recommender(10, **SMALL, **RULE)
    before = rows(model)
    inputs, targets = windows([[4], [5]], [1, 1], 6)
    assert inputs.shape == targets.shape == (0, 6)
    train_once(model, OnePassAdam(model.parameters(), head=model.head), inputs, targets, batch=4)
    assert torch.equal(rows(model), before)


@pytest.mark.parametrize("memorizing", [False, True])
def test_the_catalogue_grows_with_the_embedding_and_the_optimizer(memorizing: bool) -> None:
    model = Recommender(10, **SMALL, memorizing=memorizing, **RULE)
    optimizer = OnePassAdam(model.parameters(), head=model.head)
    train_once(model, optimizer, *windows([[1, 2, 3, 4]], [3], 6), batch=4)
    model.head.add_classes(3)
    before = rows(model)
    train_once(model, optimizer, *windows([[1, 2, 12]], [1], 6), batch=4)
    assert model.items.weight is model.head.weight
    assert model.items.num_embeddings == model.head.num_classes == 13
    assert optimizer.state[model.head.weight]["exp_avg"].shape == (13, 8)
    assert model.head.counts[[2, 11, 12]].tolist() == [1, 0, 1]
    moved = (rows(model) - before).norm(dim=1)
    assert bool(moved[12] > 10 * moved[11]) == memorizing  # Adam moves both by its learning rate, the rule writes one


def rows(model: Recommender) -> Tensor:
    return model.head.weight.detach().clone()


def test_invented_interactions_do_not_repeat_and_their_catalogue_grows() -> None:
    pairs = invented(2000, 50)
    assert len(set(pairs)) == 2000
    assert max(item for _, item in pairs[:500]) < 300 < max(item for _, item in pairs)


@pytest.mark.parametrize("options", [[], ["--plain"]])
def test_the_program_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str]) -> None:
    path = tmp_path / "toy.inter"
    lines = [f"{user}\t{item}\t5\t{time}" for time, (user, item) in enumerate(invented(300, 20))]
    path.write_text("\n".join(["user\titem\trating\ttime", *reversed(lines)]))
    main([str(path), "--epochs", "1", *options])
    shown = capsys.readouterr().out.splitlines()
    assert len(shown) == 14
    assert "would have been right in" in shown[-1]
    assert shown[1].startswith("   150-165")
    catalogue = [int(line.split()[1]) for line in shown[1:11]]
    assert catalogue == sorted(catalogue)
    assert catalogue[0] < catalogue[-1]


def test_a_compressed_file_is_read(tmp_path: Path) -> None:
    lines = ["user\titem\trating\ttime", *(f"{k % 7}\t{k}\t5\t{1000 - k}" for k in range(100))]
    (tmp_path / "found.inter.xz").write_bytes(lzma.compress("\n".join(lines).encode()))
    assert read(tmp_path / "found.inter.xz")[:2] == [("1", "99"), ("0", "98")]  # in the order of time
    whole = (tmp_path / "found.inter.xz").read_bytes()
    for content in (b"no archive", whole[: len(whole) // 2]):
        (tmp_path / "damaged.xz").write_bytes(content)
        with pytest.raises(SystemExit, match="is no text in UTF-8"):
            read(tmp_path / "damaged.xz")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"cannot be read \(No such file or directory\)"),
        (b"\xff\xfe\x00", "is no text in UTF-8"),
        (b"header\n1\t2\t3\n", "must have user, item, rating and time"),
        (b"header\n1\t2\t3\tnoon\n", "must have user, item, rating and time"),
        (b"header\n" + 99 * b"1\t2\t3\t4\n", "has only 99 interactions, and at least 100 are needed"),
    ],
    ids=["missing", "binary", "columns", "time", "few"],
)
def test_files_that_are_no_interactions_are_refused(content: bytes | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "interactions"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(SystemExit, match=message):
        main([str(path)])


def test_passes_must_be_positive(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--epochs", "0"])
    assert "--epochs: invalid positive value: '0'" in capsys.readouterr().err
