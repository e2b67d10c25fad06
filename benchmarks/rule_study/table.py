"""Show the runs of a file beside plain softmax.

    python -m benchmarks.rule_study.table runs.jsonl

Each corpus, number of epochs and seed has a table of its own, sorted by the perplexity of the validation text. The
difference of a run, in per cent, is to the best plain softmax of its table, whatever its dropout. ``--test`` shows the
perplexities of the test text instead, for the final tables.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

Result = dict[str, Any]


def tables(results: list[Result], split: str) -> list[str]:
    """Return the lines of all tables."""
    groups: dict[tuple[Any, ...], list[Result]] = defaultdict(list)
    for result in results:
        if "valid" in result:
            trial = result["trial"]
            groups[trial["corpus"], trial["epochs"], trial["seed"]].append(result)
    lines = []
    for (corpus, epochs, seed), group in sorted(groups.items()):
        group.sort(key=lambda result: _number(result["valid"]["all"]))
        plain = next((result for result in group if result["trial"]["write"] == "none"), None)
        lines += ["", f"{corpus}, {epochs:g} epochs, seed {seed}: {split}, and per cent against the best plain softmax"]
        for result in group:
            cells = [f"{_number(result[split]['all']):8.2f}"]
            for bucket, value in result[split].items():
                if plain is not None and value is not None and plain[split][bucket]:
                    cells.append(f"{bucket} {100 * (value / plain[split][bucket] - 1):+6.1f}")
            lines.append("  ".join([*cells, result["given"].get("name", "")]))
    return lines


def _number(value: float | None) -> float:
    """Return a perplexity; one that is not a number counts as infinite, so that it is sorted last."""
    return float("inf") if value is None or value != value else value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--test", action="store_true", help="show the test text")
    options = parser.parse_args()
    results = [json.loads(line) for file in options.files for line in file.read_text().splitlines()]
    print("\n".join(tables(results, "test" if options.test else "valid")))
    failed = [result for result in results if "error" in result]
    for result in failed:
        print(f"failed: {result['given'].get('name')}: {result['error'].splitlines()[-1]}")


if __name__ == "__main__":
    main()
