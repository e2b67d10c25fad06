"""The table of a campaign: README.md for people, and every trial in trials.json."""

import json
import textwrap
from collections import Counter
from collections.abc import Sequence
from datetime import date
from itertools import groupby
from pathlib import Path

from hebbian_softmax.lab.base import environment
from tests.lab.faults.campaign import Campaign, Trial
from tests.lab.faults.judge import ALLOWED, ERROR, NOTED, OTHER, SAME

FAULTS = {
    "killed at a random moment": (
        "SIGKILL after a random time, in every third trial a second one while the command goes on; then the command "
        "goes on, with `--resume` where there is a run, and its files are compared."
    ),
    "killed before a random change of a file": (
        "SIGKILL just before a file is opened for writing, renamed or removed, or a folder is made or removed."
    ),
    "disk full": (
        "From a random change of a file on, nothing can be created, or no file can grow beyond a random length. Once "
        "there is space again, the command goes on, and its files are compared."
    ),
    "damaged byte": (
        "A random byte of a file gets another value, or one of its bits is flipped; the date of the file stays. Then "
        "the command that is named reads the file."
    ),
    "two processes": (
        "A second command starts in the same folders while the first one runs. A command that was refused runs again "
        "afterwards, and all files are compared with those of both commands one after the other."
    ),
}

BEGINNING = """# Kills, damaged files, a full disk, two processes

Whatever happens to the command `hebbian`, it must end in the result of an undisturbed run, equal to the bit, or in a
clear error: one line that names the file and says what to do, exit code 1, no traceback, nothing lost. This table was
made by

```
python -m tests.lab.faults --trials {trials} --seed {seed} --output results/reliability
```

on {day}: {trials_done:,} trials of small commands in {minutes:.0f} minutes, {failures}. `trials.json` has each of them.
The random choices of a trial follow from the seed, the row and the number of the trial; moments are shares of the time
that the undisturbed run took. Machine: {cpu}, {cores} cores.
Versions: {versions}.

- *Same result*: files and output are those of an undisturbed run. Weights, random states, logs, tables and figures are
  compared, times and dates are not.
- *Clear error*: as above; after a kill or with space again on the disk, the command that goes on must succeed.
- *Less, with a note*: `hebbian report` shows what it can read; a note names the damaged file and says what to do.
- *Other input*: a text of the user's own with another letter is another text, as nothing tells that it is wrong. The
  corpus made from it says so by its checksums.

Figures are replaced by tiny pictures of their numbers, since Matplotlib would take most of the time.
"""


def write_results(folder: Path, trials: Sequence[Trial], campaign: Campaign) -> None:
    """Write the table and the trials."""
    folder.mkdir(parents=True, exist_ok=True)
    hardware, versions = environment.hardware(), environment.versions() | {"commit": environment.commit()}
    failed = [trial for trial in trials if not trial.verdict.allowed]
    seconds = sum(trial.seconds for trial in trials)
    lines = BEGINNING.format(
        trials=campaign.trials,
        seed=campaign.seed,
        day=date.today(),
        trials_done=len(trials),
        minutes=seconds / campaign.jobs / 60,
        failures=f"{len(failed)} of them failed" if failed else "none of them failed",
        cpu=hardware["cpu"],
        cores=hardware["cores"],
        versions=", ".join(f"{name} {version}" for name, version in versions.items()),
    )
    for fault, explanation in FAULTS.items():
        of_fault = [trial for trial in trials if trial.fault == fault]
        if of_fault:
            lines += f"\n## {fault.capitalize()}\n\n{textwrap.fill(explanation, 120)}\n\n{_table(of_fault)}"
    (folder / "README.md").write_text(lines, encoding="utf-8")
    content = {
        "command": f"python -m tests.lab.faults --trials {campaign.trials} --seed {campaign.seed}",
        "seed": campaign.seed,
        "versions": versions,
        "hardware": hardware,
        "seconds": round(seconds),
        "jobs": campaign.jobs,
        "rows": [_plain(list(group)) for _, group in groupby(trials, lambda trial: (trial.fault, trial.target))],
    }
    (folder / "trials.json").write_text(_one_trial_a_line(content), encoding="utf-8")


def _table(trials: Sequence[Trial]) -> str:
    rare = [name for name in (NOTED, OTHER) if any(trial.verdict.outcome == name for trial in trials)]
    names = [SAME, ERROR, *rare, "failed"]
    rows = [["", "trials", *names], ["---", *["---:"] * (len(names) + 1)]]
    for target, group in groupby(trials, lambda trial: trial.target):
        outcomes = [trial.verdict.outcome for trial in group]
        counts = Counter(name if name in ALLOWED else "failed" for name in outcomes)
        rows.append([target.replace("*", "\\*"), str(len(outcomes)), *(str(counts[name]) for name in names)])
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _plain(trials: Sequence[Trial]) -> dict[str, object]:
    first = trials[0]
    made = [[trial.number, trial.place, trial.verdict.outcome] for trial in trials]
    failed = [[trial.number, trial.verdict.detail] for trial in trials if not trial.verdict.allowed]
    return {"fault": first.fault, "target": first.target, "trials": made, "failed": failed}


def _one_trial_a_line(content: dict[str, object]) -> str:
    """Return JSON with a line for each trial: short, and easy to compare with another campaign's."""
    rows = content.pop("rows")
    assert isinstance(rows, list)
    head = json.dumps(content, indent=1, ensure_ascii=False)[:-2]
    parts = []
    for row in rows:
        trials = ",\n   ".join(json.dumps(trial, ensure_ascii=False) for trial in row.pop("trials"))
        parts.append(f'{json.dumps(row, ensure_ascii=False)[:-1]}, "trials": [\n   {trials}]}}')
    return head + ',\n "rows": [\n  ' + ",\n  ".join(parts) + "\n ]\n}\n"
