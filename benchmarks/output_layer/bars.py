"""What the library promises about its output layer on one H200, checked against the entries of a run."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.output_layer.measuring import Entry

SHARE_OF_PEAK = {"A": 0.85, "B": 0.78, "C": 0.60}
RULE_SHARE = {"A": 0.005, "B": 0.015, "C": 0.015}
RULE_MS = {"B": 0.060}
"""At B the rule passes by its share of the step or by this time."""
AHEAD_OF_PEERS = {"A": 4.0, "B": 1.1, "C": 4.5}
EXTRA_BYTES = {"A": 4e9, "B": 0.5e9, "C": 1e9}


@dataclass
class Bar:
    """One promise, and how a run meets it."""

    what: str
    limit: str
    value: str
    passed: bool | None
    """None if it was not measured."""

    def line(self) -> str:
        verdict = {True: "pass", False: "FAIL", None: "not measured"}[self.passed]
        return f"{verdict:>12}  {self.what}: {self.value} (bar: {self.limit})"


def check(entries: list[Entry], peak_tflops: float) -> list[Bar]:
    """Check the bars for a gradient of W in fp32, in which it is summed, and again for one rounded to bf16."""
    return [
        bar
        for shape in SHARE_OF_PEAK
        for name in ("ours, fp32 master", "ours")
        for bar in _check(shape, name, entries, peak_tflops)
    ]


def _check(shape: str, name: str, entries: list[Entry], peak_tflops: float) -> list[Bar]:
    here = [e for e in entries if e.spec.name == shape and e.spec.logits == "random"]
    ours = next((e for e in here if e.contender == name and e.status == "ok" and e.ms is not None), None)
    bars = [
        _share(shape, ours, peak_tflops),
        _ahead(shape, ours, here, ("peer",), AHEAD_OF_PEERS[shape], "fastest exact peer as it comes"),
        _ahead(shape, ours, here, ("tuned", "padded", "baseline"), 1.0, "fastest tuned, padded or hand-written one"),
        _memory(shape, ours),
    ]
    if name == "ours":
        for bar in bars:
            bar.what += " (dW in bf16)"
        return bars
    return [*bars, _rule(shape, here, "step with write"), _rule(shape, here, "step with every write")]


def _share(shape: str, ours: Entry | None, peak: float) -> Bar:
    what, limit = f"{shape}: share of the GEMM peak ({peak:.0f} TFLOP/s)", f">= {100 * SHARE_OF_PEAK[shape]:g} %"
    rate = ours.tflops() if ours else None
    if rate is None:
        return Bar(what, limit, "-", None)
    return Bar(what, limit, f"{100 * rate / peak:.1f} %", rate / peak >= SHARE_OF_PEAK[shape])


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


def _ahead(shape: str, ours: Entry | None, here: list[Entry], kinds: tuple[str, ...], least: float, whom: str) -> Bar:
    what, limit = f"{shape}: against the {whom}", f">= {least:g}x"
    peers = [(e.ms, e.contender) for e in here if e.kind in kinds and e.status == "ok" and e.ms is not None]
    if ours is None or ours.ms is None or not peers:
        return Bar(what, limit, "-", None)
    ms, name = min(peers)
    return Bar(what, limit, f"{ms / ours.ms:.2f}x ({name}, {ms:.2f} ms against {ours.ms:.2f})", ms / ours.ms >= least)


def _memory(shape: str, ours: Entry | None) -> Bar:
    what, limit = f"{shape}: extra memory", f"<= {EXTRA_BYTES[shape] / 1e9:g} GB"
    if ours is None or ours.extra_bytes is None:
        return Bar(what, limit, "-", None)
    return Bar(what, limit, f"{ours.extra_bytes / 1e9:.2f} GB", ours.extra_bytes <= EXTRA_BYTES[shape])
