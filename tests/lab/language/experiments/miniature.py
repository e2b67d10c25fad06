"""`hebbian reproduce` in miniature: a corpus of dated words, models small enough for tests, and what they leave."""

from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hebbian_softmax.lab.base.runs import Run
from hebbian_softmax.lab.data.corpus import write_corpus
from tests.lab.language.commands import SIZES, call, only
from tests.lab.language.toy import corpus

SMALL = f"{SIZES} --size tiny --evaluations 2 --steps 6".replace("--tensorboard no", "").split()
DAYS = {"train": "1987-02-01..1987-06-17", "valid": "1987-06-18..1987-06-29", "test": "1987-10-19..1987-10-20"}
JUNE, LAST = date(1987, 6, 1).toordinal(), date(1987, 6, 17).toordinal()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Dated words: every third one was first seen in June, the others around 90 days before training ends."""
    made = corpus()
    path = tmp_path_factory.mktemp("corpora") / "dated"
    splits = {name: ids.numpy() for name, ids in made.splits.items()}
    days = (JUNE, LAST - 90, LAST - 89)  # the second is one too early
    first_days = np.array([days[word % 3] for word in range(len(made.words))], np.int32)
    write_corpus(path, "reuters", splits, made.words, made.counts.tolist(), DAYS, [], {"first_days": first_days})
    return path


@pytest.fixture
def reproduce(folder: Path, tmp_path: Path) -> Any:
    def run(name: str, *options: str) -> tuple[Run, dict[str, Any]]:
        arguments = [*SMALL, *options, "--corpus", folder, "--quiet", "--runs", tmp_path]
        assert call("reproduce", name, *arguments) == 0
        result = only(tmp_path).result()
        assert result is not None
        return only(tmp_path), result

    return run


def table(result: dict[str, Any], title: str) -> dict[str, dict[str, Any]]:
    """The rows of the table whose title begins so, by their first cell."""
    (found,) = [each for each in result["tables"] if each["title"].startswith(title)]
    return {row[0]: dict(zip(found["columns"][1:], row[1:], strict=True)) for row in found["rows"]}


def words_of(run: Run, trial: str, split: str) -> tuple[Any, Any]:
    with np.load(run.path / "trials" / trial / f"{split}-words.npz") as words:
        return words["nll"].astype("f8"), words["ids"]
