"""A small campaign of faults: a trial or two of each row. `python -m tests.lab.faults` runs all of it."""

from pathlib import Path

import pytest

from tests.lab.faults.campaign import Campaign, chosen
from tests.lab.faults.faults import rows


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("fault", sorted({row.fault for row in rows()}))
def test_the_same_result_or_a_clear_error(fault: str, tmp_path: Path) -> None:
    found = Campaign(tmp_path / "work", seed=1, trials=2, jobs=2).run(chosen(fault))
    assert not [trial for trial in found if not trial.verdict.allowed]
