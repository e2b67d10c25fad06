"""All trials of all rows, several at the same time, each kept as soon as it is done."""

import hashlib
import json
import queue
import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from tests import ROOT
from tests.lab.faults.faults import Row, Stage, rows
from tests.lab.faults.judge import Verdict
from tests.lab.faults.scenes import Templates


@dataclass(frozen=True)
class Trial:
    """One trial: its row, its number in the row, what was done, how it ended, and the seconds that it took."""

    fault: str
    target: str
    number: int
    place: str
    verdict: Verdict
    seconds: float


def chosen(text: str) -> list[Row]:
    """Return the rows whose name contains a text."""
    return [row for row in rows() if text in f"{row.fault}: {row.target}"]


def source_code() -> str:
    """Return a checksum of the program and of the campaign: trials of another version do not count."""
    total = hashlib.sha256()
    for folder in ("src", "tests/lab/faults"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            total.update(path.read_bytes())
    return total.hexdigest()[:16]


class Campaign:
    """A campaign in a work folder. The random choices of a trial follow from the seed, its row and its number."""

    def __init__(self, work: Path, seed: int, trials: int, jobs: int) -> None:
        self.seed, self.trials, self.jobs = seed, trials, jobs
        self.folder = work.absolute() / f"{source_code()}-seed{seed}"
        self.kept = self.folder / "trials.jsonl"

    def run(self, rows: Sequence[Row]) -> list[Trial]:
        """Return all trials of the rows; make those that are not kept yet."""
        self.folder.mkdir(parents=True, exist_ok=True)
        done = {(each.fault, each.target, each.number): each for each in self._read()}
        stage = Stage(Templates(self.folder / "templates"), self.folder)
        found = []
        with open(self.kept, "a", encoding="utf-8") as file:
            for row in rows:
                numbers = range(max(1, round(self.trials * row.share)))
                missing = [n for n in numbers if (row.fault, row.target, n) not in done]
                for trial in self._make(row, missing, stage) if missing else ():
                    done[row.fault, row.target, trial.number] = trial
                    file.write(json.dumps(asdict(trial), ensure_ascii=False) + "\n")
                    file.flush()
                of_row = [done[row.fault, row.target, number] for number in numbers]
                found += of_row
                report(row, of_row)
        return found

    def _read(self) -> Iterator[Trial]:
        for line in self.kept.read_text(encoding="utf-8").splitlines() if self.kept.exists() else ():
            try:
                values = json.loads(line)
            except ValueError:  # a kill left half a line
                continue
            yield Trial(**{**values, "verdict": Verdict(**values["verdict"])})

    def _make(self, row: Row, numbers: Sequence[int], stage: Stage) -> Iterator[Trial]:
        """Make the trials of these numbers, and yield them as they end."""
        row.prepare(stage)
        worlds: queue.SimpleQueue[int] = queue.SimpleQueue()
        for free in range(self.jobs):
            worlds.put(free)

        def make(number: int) -> Trial:
            draw = random.Random(f"{self.seed}/{row.fault}/{row.target}/{number}")
            began, world = time.monotonic(), worlds.get()
            place, verdict = row.trial(stage, world, draw)
            if not verdict.allowed:
                stage.keep(world, f"{row.fault}-{row.target}-{number}")
            worlds.put(world)
            return Trial(row.fault, row.target, number, place, verdict, round(time.monotonic() - began, 3))

        with ThreadPoolExecutor(self.jobs) as pool:
            yield from pool.map(make, numbers)


def report(row: Row, trials: Sequence[Trial]) -> None:
    """Print the outcomes of a row, and every trial that ended in another way than allowed."""
    outcomes = Counter(trial.verdict.outcome for trial in trials)
    seconds = sum(trial.seconds for trial in trials)
    counted = ", ".join(f"{count} {outcome}" for outcome, count in outcomes.most_common())
    print(f"{row.fault}: {row.target}: {counted} ({seconds:.0f} s)", flush=True)
    for trial in trials:
        if not trial.verdict.allowed:
            print(
                f"  FAILED {trial.number}: {trial.place}: {trial.verdict.outcome}: {trial.verdict.detail}", flush=True
            )
