"""What the library promises about its output layer on one H200, checked against the entries of one or more runs.

    python -m benchmarks.output_layer.bars first.json second.json

A ratio is always that of two entries of the same run, and a share is relative to the best product of the same run.

Like is compared with like. Our loss with dW in fp32, in which it is summed, is compared with peers that return it in
fp32 and with those that return it in bf16, although these have half as many bytes to write. Our loss with dW in bf16 is
compared with peers that return it in bf16. Its ratio to those that return it in fp32, and so do not round it, is shown
without a bar, and so are peers that failed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.output_layer.measuring import Entry
from benchmarks.output_layer.peers import CUTE, PADDED, PEERS, PUBLISHED
from benchmarks.output_layer.problems import Spec

OURS = ("ours, fp32 master", "ours")
"""With the gradient of W in fp32, in which it is summed, and rounded to bf16."""
FP32_PEERS = {contender.name for contender in (*PEERS, *PADDED) if contender.fp32_gradient}
EXACT = ("peer", "tuned", "padded", "baseline")
"""The kinds of contenders that are not ours and compute all gradients."""
SHARE_OF_PEAK = {
    "ours, fp32 master": {"A": 0.85, "B": 0.78, "C": 0.85},
    "ours": {"A": 0.85, "B": 0.78, "C": 0.60},
}
SHARE_WITHOUT_PEERS = {"D1": 0.93, "D": 0.93, "D16": 0.93, "E": 0.93, "F": 0.80}
"""Where no peer with kernels for Hopper GPUs runs."""
RULE_SHARE = {"A": 0.005, "B": 0.015, "C": 0.015}
RULE_MS = {"B": 0.060}
"""At B the rule passes by its share of the step or by this time."""
AHEAD_OF_PEERS = {"A": 1.1, "B": 1.1, "C": 1.1}
AHEAD_OF_TUNED = {"A": 1.0, "B": 1.0, "C": 1.0}
NEAR_THE_FASTEST = {"D1": 0.98, "D": 0.98, "D16": 0.98, "E": 0.98, "F": 0.98}
EXTRA_BYTES = {"A": 4e9, "B": 0.65e9, "C": 1e9, "D1": 4e9, "D": 4e9, "D16": 4e9, "E": 4e9, "F": 0.65e9}
"""The most memory. At B it was 0.5e9 before the least workspace became 0.6 GB, with which B is one chunk."""

Runs = list[list[Entry]]


@dataclass
class Bar:
    """One promise, and how a run meets it."""

    what: str
    limit: str
    """Empty for what is shown without a bar."""
    value: str
    passed: bool | None
    """None if it was not measured."""

    def line(self) -> str:
        if not self.limit:
            return f"{'no bar':>12}  {self.what}: {self.value}"
        verdict = {True: "pass", False: "FAIL", None: "not measured"}[self.passed]
        return f"{verdict:>12}  {self.what}: {self.value} (bar: {self.limit})"


def check(runs: Runs) -> list[Bar]:
    """Check the bars of every shape, for both forms of the gradient of W."""
    found = []
    for shape in EXTRA_BYTES:
        here = [[e for e in run if e.spec.name == shape and e.spec.logits == "random"] for run in runs]
        for name in OURS:
            bars = [*_shares(shape, name, here), *_ratios(shape, name, here), _memory(shape, name, here)]
            for bar in bars:
                bar.what += "" if name == OURS[0] else " (dW in bf16)"
            found += bars
        found += _against_fp32(shape, here)
        if shape in RULE_SHARE:
            every = [entry for run in here for entry in run]
            found += [_rule(shape, every, "step with write"), _rule(shape, every, "step with every write")]
        found += _failures(shape, here)
    return found


def peak(spec: Spec, entries: Iterable[Entry]) -> float | None:
    """Return the best rate of the products that were measured on a problem of this size; None if there are none."""

    def size(spec: Spec) -> tuple[Any, ...]:
        return spec.n, spec.features, spec.classes, spec.dtype

    rates = (e.tflops() for e in entries if e.kind == "product" and size(e.spec) == size(spec))
    return max((rate for rate in rates if rate is not None), default=None)


def _ours(name: str, run: list[Entry]) -> Entry | None:
    return next((e for e in run if e.contender == name and e.status == "ok" and e.ms is not None), None)


def _shares(shape: str, name: str, here: Runs) -> list[Bar]:
    least = SHARE_OF_PEAK[name].get(shape)
    if least is None:
        if any(e.contender.startswith(c.name) for run in here for e in _exact(run) for c in CUTE):
            return []
        least = SHARE_WITHOUT_PEERS[shape]
    what, limit = f"{shape}: share of the best product", f">= {100 * least:g} %"
    found = []
    for run in here:
        ours, best = _ours(name, run), peak(run[0].spec, run) if run else None
        rate = ours.tflops() if ours else None
        if rate is not None and best is not None:
            found.append((rate / best, best))
    if not found:
        return [Bar(what, limit, "-", None)]
    share, best = min(found)
    return [Bar(what, limit, f"{100 * share:.1f} % of {best:.0f} TFLOP/s", share >= least)]


def _exact(run: list[Entry]) -> list[Entry]:
    """Return the contenders that are not ours and have the right gradients and a time."""
    return [e for e in run if e.kind in EXACT and e.status == "ok" and e.ms is not None]


def _ratios(shape: str, name: str, here: Runs) -> list[Bar]:
    kinds = {
        "fastest exact peer as it comes": (("peer",), AHEAD_OF_PEERS),
        "fastest tuned, padded or hand-written one": (("tuned", "padded", "baseline"), AHEAD_OF_TUNED),
        "fastest exact one that runs": (EXACT, NEAR_THE_FASTEST),
    }
    bars = []
    for whom, (wanted, limits) in kinds.items():
        if shape not in limits:
            continue
        what, limit = f"{shape}: against the {whom}", f">= {limits[shape]:g}x"

        def like(entry: Entry, wanted: tuple[str, ...] = wanted) -> bool:
            return entry.kind in wanted and (name == OURS[0] or entry.contender not in FP32_PEERS)

        lowest = _lowest_ratio(name, here, like)
        if lowest:
            bars.append(Bar(what, limit, lowest[1], lowest[0] >= limits[shape]))
        else:
            bars.append(Bar(what, limit, "-", None))
    return bars


def _against_fp32(shape: str, here: Runs) -> list[Bar]:
    """Return the ratio to peers with dW in fp32 of ours with dW in bf16."""
    lowest = _lowest_ratio(OURS[1], here, lambda entry: entry.contender in FP32_PEERS)
    return [Bar(f"{shape}: dW in bf16 against the fastest with dW in fp32", "", lowest[1], None)] if lowest else []


def _lowest_ratio(name: str, here: Runs, like: Callable[[Entry], bool]) -> tuple[float, str] | None:
    """Return the time of a contender over ours where it is lowest, as a number and in words; None without any."""
    found = []
    for run in here:
        ours = _ours(name, run)
        for entry in filter(like, _exact(run)):
            if ours is not None and ours.ms is not None and entry.ms is not None:
                ratio = entry.ms / ours.ms
                words = f"{ratio:.3f}x ({entry.contender}, {entry.ms:.2f} ms against {ours.ms:.2f})"
                found.append((ratio, words))
    return min(found, default=None)


def _failures(shape: str, here: Runs) -> list[Bar]:
    """Return the peers that failed, with the time that others published."""
    found = {}
    for entry in (e for run in here for e in run if e.kind in EXACT and e.status == "failed"):
        value = f"failed: {entry.reason}{published(shape, entry.contender)}"
        found[entry.contender, value] = Bar(f"{shape}: {entry.contender}", "", value, None)
    return list(found.values())


def published(shape: str, contender: str) -> str:
    """Return a remark about the time that others published for a contender that does not run; empty without one."""
    ms, where = PUBLISHED.get((shape, contender), (None, ""))
    return "" if ms is None else f" (published, not measured here: {ms:g} ms {where})"


def _memory(shape: str, name: str, here: Runs) -> Bar:
    what, limit = f"{shape}: extra memory", f"<= {EXTRA_BYTES[shape] / 1e9:g} GB"
    entries = [ours for run in here if (ours := _ours(name, run)) is not None]
    found = max((e.extra_bytes for e in entries if e.extra_bytes is not None), default=None)
    if found is None:
        return Bar(what, limit, "-", None)
    return Bar(what, limit, f"{found / 1e9:.2f} GB", found <= EXTRA_BYTES[shape])


def _rule(shape: str, here: list[Entry], kind: str) -> Bar:
    """Check the optimizer with which the rule takes most of its limit, by the profiler's kernel times.

    The difference of the steps' medians is shown, too.
    """
    limit = f"<= {100 * RULE_SHARE[shape]:g} % of the step"
    if shape in RULE_MS:
        limit += f" or {1e3 * RULE_MS[shape]:g} us"
    what = f"{shape}: the rule's kernels" + (", were every class written" if "every" in kind else "")
    steps = [
        (e.rule_ms / max(RULE_SHARE[shape] * e.ms, RULE_MS.get(shape, 0.0)), e)
        for e in here
        if e.kind == kind and e.rule_ms is not None and e.ms
    ]
    if not steps:
        writes = [(e.contender, added_by_write(e, here)) for e in here if e.kind == kind]
        known = [f"{name} {1e3 * added:.0f} us" for name, added in writes if added is not None]
        return Bar(what, limit, "by the profiler -; by medians of the steps " + (", ".join(known) or "-"), None)
    of_limit, entry = max(steps, key=lambda pair: pair[0])
    assert entry.rule_ms is not None
    assert entry.ms is not None
    value = f"{100 * entry.rule_ms / entry.ms:.2f} % ({1e3 * entry.rule_ms:.1f} us) of {entry.contender}"
    added = added_by_write(entry, here)
    if added is not None:
        value += f"; medians of the steps differ by {1e3 * added:.0f} us"
    return Bar(what, limit, value, of_limit <= 1)


def added_by_write(entry: Entry, entries: list[Entry]) -> float | None:
    """Return the median milliseconds of a step with the write less those of the same step without it."""
    name = entry.contender.partition(" + write")[0]
    without = next((e.ms for e in entries if e.contender == name and e.spec == entry.spec), None)
    return None if without is None or entry.ms is None else entry.ms - without


def entry_of(record: dict[str, Any]) -> Entry:
    """Return the entry that was written to JSON by :func:`benchmarks.output_layer.report.record_of`."""
    sizes = record["n"], record["features"], record["classes"]
    spec = Spec(record["shape"], *sizes, dtype=getattr(torch, record["dtype"]), logits=record["logits"])
    return Entry(
        spec,
        record["contender"],
        record["kind"],
        record["status"],
        record["reason"],
        ms=record["median_ms"],
        extra_bytes=record["extra_bytes"],
        operations=record["operations"],
        rule_ms=record["rule_kernels_ms"],
    )


def main(paths: list[str]) -> None:
    if not paths or paths[0].startswith("-"):
        raise SystemExit(__doc__)
    runs = [[entry_of(each) for each in json.loads(Path(path).read_text())["entries"]] for path in paths]
    print("\n".join(bar.line() for bar in check(runs)))


if __name__ == "__main__":
    main(sys.argv[1:])
