"""Commands that are refused with one clear line, before anything is trained and without a run folder."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.lab.language.commands import FEW
from tests.lab.language.experiments.conftest import SMALL, Refusal
from tests.lab.language.toy import prepared


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("train no-such-corpus", "invalid choice"),
        ("train corpus", "which corpus?"),
        ("train wikitext2", "; is wikitext-2 meant?"),
        ("train zipf --epoch 2", "unrecognized arguments: --epoch 2; is --epochs meant? (see "),
        ("train zipf --model perhaps", "must be one of lstm, transformer"),
        ("train zipf --model transformer --embedding 24", "give --embedding a multiple of 16, or other --heads"),
        ("compare zipf --heads 4", "this --model has no use for --heads 4: omit it, or change --model"),
        ("train zipf --input-dropout 1", "below 1"),
        ("train zipf --epochs 0", "above 0"),
        ("train zipf --rule-scale much", "must be a number"),
        ("train zipf --steps 3 --max-seconds 5", "give one of them"),
        ("train zipf --batch 100000", "too few for a batch"),
        ("evaluate nowhere", "is not a run folder"),
        ("sweep corpus", "which corpus?"),
        ("reproduce wikitext-table --corpus no-such", "--corpus 'no-such' is no corpus"),
        ("reproduce gigaword-curves --data-root /dev/null", "or give --corpus reuters --size small"),
        ("reproduce objectives --objective l2", "unrecognized arguments"),
        ("reproduce wikitext-table --write centred", "unrecognized arguments"),
        ("reproduce wikitext-table --fade perhaps", "--fade: must be yes or no"),
        ("reproduce objectives --memories all", "unrecognized arguments"),
        ("reproduce reuters --sweep-thetas 0.1,0", "--sweep-thetas: must be above 0, not '0'"),
        ("reproduce reuters --sweep-thetas 0.01", "--memories none: omit it, or give --memories cache or all"),
        ("reproduce frequency-table --memories cache --sweep-rates 1", "or give --memories all"),
        ("reproduce wikitext-table --sweep-cache-shares 0.95", "0.95 and 0.1, sum to 1.05"),
    ],
)
def test_bad_arguments(
    command: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusal: Refusal
) -> None:
    monkeypatch.setenv("HEBBIAN_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    assert message in refusal(*command.split())
    assert not list(tmp_path.glob("runs/*"))


def test_several_processes_would_each_do_a_whole_sweep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusal: Refusal
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    error = refusal("sweep", "zipf", "--runs", tmp_path)
    assert "hebbian sweep zipf trains in one process: start it without torchrun" in error
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("value", [3, 2**30])
def test_a_damaged_id_is_found_before_it_is_trained_on(value: int, tmp_path: Path, refusal: Refusal) -> None:
    made = prepared(tmp_path / "toy")
    ids = np.fromfile(made.path / "ids.bin", "<i4")
    ids[int(np.argmax(ids != value))] = value  # another word, or none
    ids.tofile(made.path / "ids.bin")
    error = refusal("train", tmp_path / "toy", *FEW, "--quiet", "--runs", tmp_path / "runs")
    assert re.search(r"toy/ids\.bin is damaged .*: delete the folder", error)
    assert not list((tmp_path / "runs").iterdir())


@pytest.mark.parametrize(("split", "length"), [("train", 20), ("valid", 1), ("test", 1)])
def test_a_text_that_is_too_short_is_one_clear_line(split: str, length: int, tmp_path: Path, refusal: Refusal) -> None:
    prepared(tmp_path / "short", **{split: torch.zeros(length, dtype=torch.int32)})
    error = refusal("train", tmp_path / "short", *FEW, "--quiet", "--runs", tmp_path / "runs")
    assert re.search(f"{tmp_path / 'short'}.* has {length} words", error)
    assert not list((tmp_path / "runs").iterdir())


def test_a_corpus_without_dates_is_refused_before_anything_is_trained(tmp_path: Path, refusal: Refusal) -> None:
    prepared(tmp_path / "toy")
    error = refusal("reproduce", "reuters", *SMALL, "--corpus", tmp_path / "toy", "--runs", tmp_path / "runs")
    assert "has no dates: give --corpus reuters" in error
    assert not list((tmp_path / "runs").iterdir())
