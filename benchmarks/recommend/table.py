"""Show the results of the study: the test, as means and standard deviations over seeds.

Results of other data, another split or other settings are not averaged; they stand in tables or rows of their own.

python -m benchmarks.recommend.table FILE.jsonl
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from benchmarks.recommend.plan import METHODS
from benchmarks.recommend.records import Record, read_records
from benchmarks.recommend.trials import Trial
from hebbian_softmax.lab.base.statistics import mean_and_spread

GROUPS = ("all", "<10", "<5", "cold", "new")
SETTINGS = {
    "plain": ("epochs", "learning_rate", "dropout", "period_rate", "passes"),
    "rule": ("epochs", "learning_rate", "dropout", "period_rate", "passes"),
    "neighbours": ("neighbours", "recent"),
    "popularity": (),
}
RULE = ("gamma", "limit", "start", "fade")
"""Settings that are shown where they are not the usual ones."""


def tables(records: Sequence[Record]) -> list[str]:
    """Return the lines of all tables, in per cent: one for each task or, where they differ, for each data and split."""
    groups: dict[tuple[str, str, str, int], list[Record]] = {}
    for record in results_in(records):
        groups.setdefault(_questions(record), []).append(record)
    tasks = list(dict.fromkeys(record["given"]["task"] for record in records))
    lines: list[str] = []
    for key, some in sorted(groups.items(), key=lambda group: tasks.index(group[0][0])):
        task, data, protocol, questions = key
        several = sum(other[0] == task for other in groups) > 1
        noted = f"data {data}, {protocol}" if data else "data and split not noted"
        lines += _table(f"{task} ({noted}, {questions:,} questions in validation)" if several else task, some)
    return lines


def results_in(records: Sequence[Record]) -> list[Record]:
    """Return the records that are results and no errors, one for each trial."""
    found: dict[str, Record] = {}
    for record in records:
        if "valid" in record:
            found.setdefault(_key(record["given"]), record)
    return list(found.values())


def failures(records: Sequence[Record]) -> list[str]:
    """Return a line for each trial that has failed and has no result yet."""
    solved = {_key(record["given"]) for record in results_in(records)}
    found = {_key(record["given"]): record for record in records if "error" in record}
    return [
        f"failed: {record['given']}: {record['error'].splitlines()[-1]}"
        for key, record in found.items()
        if key not in solved
    ]


def _key(given: Record) -> str:
    return json.dumps(given, sort_keys=True)


def _questions(record: Record) -> tuple[str, str, str, int]:
    """Return what two results must share to be compared. Older results do not tell their data and protocol."""
    given = record["given"]
    return given["task"], given.get("data", ""), given.get("protocol", ""), record["valid"]["all"]["questions"]


def _table(title: str, some: Sequence[Record]) -> list[str]:
    """Return the lines of one task: of each method one row, or one for each of its settings."""
    final = {method: _by_settings([each for each in some if _is(each, method)]) for method in METHODS}
    rows = {
        (method, f"{method} ({number + 1})" if len(alike) > 1 else method): results
        for method, alike in final.items()
        for number, results in enumerate(alike)
    }
    if not rows:
        return []
    lines: list[str] = []
    for kind, name_of_kind in (("ndcg", "NDCG@10"), ("hit_rate", "hit rate@10")):
        lines += ["", f"{title}: {name_of_kind} on the test, per cent", " " * 24 + _joined(GROUPS)]
        for (_, name), results in rows.items():
            cells = [_cell([each["test"][group][kind] for each in results]) for group in GROUPS]
            lines.append(f"{_with_seeds(name, results):24s}{_joined(cells)}")
    test = next(iter(rows.values()))[0]["test"]
    lines.append(f"{'questions':24s}" + "".join(f"{test[group]['questions']:16,}" for group in GROUPS))
    for (method, name), results in rows.items():
        tried = [each for each in some if _is(each, method) and not each["given"]["final"]]
        if tried or len(final[method]) > 1:
            chosen = _settings(method, results[0]["given"])
            lines.append(f"{name}, chosen on validation from {len(tried)} trials: {chosen}")
    return lines


def _by_settings(some: Sequence[Record]) -> list[list[Record]]:
    """Return the results that have a test, in a list for each setting: only seeds of the same one are averaged."""
    found: dict[str, list[Record]] = {}
    for record in some:
        if "test" in record:
            found.setdefault(_key(record["given"] | {"seed": None}), []).append(record)
    return list(found.values())


def _settings(method: str, given: Record) -> str:
    names = [name for name in SETTINGS[method] if name in given]
    if method == "rule":
        names += [name for name in RULE if given[name] != getattr(Trial, name)]
    return ", ".join(f"{name} {given[name]}" for name in names)


def _is(record: Record, method: str) -> bool:
    return bool(record["given"]["method"] == method)


def _with_seeds(name: str, results: Sequence[Record]) -> str:
    return f"{name}, {len(results)} seeds" if len(results) > 1 else name


def _joined(cells: Sequence[str]) -> str:
    return "".join(f"{cell:>16}" for cell in cells)


def _cell(values: Sequence[float | None]) -> str:
    known = [100 * value for value in values if value is not None]
    if not known:
        return "-"
    mean, spread = mean_and_spread(known)
    return f"{mean:.2f} ± {spread:.2f}" if len(known) > 1 else f"{mean:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    records = read_records(parser.parse_args().file)
    print("\n".join(tables(records)))
    print("".join(f"{line}\n" for line in failures(records)), end="")


if __name__ == "__main__":
    main()
