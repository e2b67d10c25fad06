"""Show the results of the study: the test, as means and standard deviations over seeds.

python -m benchmarks.recommend.table FILE.jsonl
"""

from __future__ import annotations

import argparse
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
    """Return the lines of all tables, in per cent."""
    lines: list[str] = []
    for task in dict.fromkeys(record["given"]["task"] for record in records):
        some = [record for record in records if record["given"]["task"] == task and "valid" in record]
        final = {method: [each for each in some if _is(each, method) and "test" in each] for method in METHODS}
        if not any(final.values()):
            continue
        for kind, title in (("ndcg", "NDCG@10"), ("hit_rate", "hit rate@10")):
            lines += [
                "",
                f"{task}: {title} on the test, per cent",
                " " * 24 + "".join(f"{each:>16}" for each in GROUPS),
            ]
            for method, results in final.items():
                if results:
                    cells = [_cell([each["test"][group][kind] for each in results]) for group in GROUPS]
                    lines.append(f"{_name(method, results):24s}" + "".join(f"{cell:>16}" for cell in cells))
        test = next(results for results in final.values() if results)[0]["test"]
        lines.append(f"{'questions':24s}" + "".join(f"{test[group]['questions']:16,}" for group in GROUPS))
        for method in METHODS:
            tried = [each for each in some if _is(each, method) and not each["given"]["final"]]
            if tried and final[method]:
                given = final[method][0]["given"]
                names = [name for name in SETTINGS[method] if name in given]
                if method == "rule":
                    names += [name for name in RULE if given[name] != getattr(Trial, name)]
                chosen = ", ".join(f"{name} {given[name]}" for name in names)
                lines.append(f"{method}, chosen on validation from {len(tried)} trials: {chosen}")
    return lines


def _is(record: Record, method: str) -> bool:
    return bool(record["given"]["method"] == method)


def _name(method: str, results: Sequence[Record]) -> str:
    return f"{method}, {len(results)} seeds" if len(results) > 1 else method


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
    for record in records:
        if "error" in record:
            print(f"failed: {record['given']}: {record['error'].splitlines()[-1]}")


if __name__ == "__main__":
    main()
