"""One run of the benchmark: parts in order of importance until the budget is spent. No contender can end it."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from benchmarks.output_layer.contenders import GRAPH, OURS, SMALLER_WORKSPACE, TORCH, Contender
from benchmarks.output_layer.measuring import Entry, free_memory, measure, reason_of
from benchmarks.output_layer.peers import PADDED, PEERS, TORCH_LCE, TORCH_LCE_TUNED
from benchmarks.output_layer.problems import Problem, Reference, Spec, draw, reference
from benchmarks.output_layer.products import PRODUCTS
from benchmarks.output_layer.profiling import kernels_ms, rule_kernels_ms
from benchmarks.output_layer.steps import CPU_STEPS, STEP_GRAPHS, STEPS

PARTS = ("losses", "graphs", "steps", "kernels", "peaked")


class Session:
    """Collects entries. ``after_part`` is called after each new one, so that a killed run leaves its numbers."""

    def __init__(
        self,
        device: str,
        budget: float | None = None,
        only: list[str] | None = None,
        without: list[str] | None = None,
        seconds: float = 1.0,
        after_part: Callable[[], None] = lambda: None,
    ) -> None:
        self.device, self.budget, self.only, self.seconds = device, budget, only, seconds
        self.without = without or []
        self.after_part = after_part
        self.entries: list[Entry] = []
        self.target_probabilities: dict[Spec, float] = {}
        self._truths: dict[Spec, Reference] = {}
        self._problem: Problem | None = None
        self._started = time.monotonic()
        self._lost = ""

    def spent(self) -> float:
        return time.monotonic() - self._started

    def why_not(self) -> str:
        """Return the reason why nothing more is measured; an empty string if there is none."""
        if self._lost:
            return self._lost
        if self.budget is not None and self.spent() > self.budget:
            return f"budget of {self.budget:g} s spent"
        return ""

    def part(self, spec: Spec, contenders: list[Contender], together: bool = False) -> None:
        """Measure contenders on a spec; ``together`` lets them take turns, which a busy CPU needs."""
        contenders = [c for c in contenders if self._wanted(c)]
        groups = [contenders] if together else [[c] for c in contenders]
        for group in filter(None, groups):
            found = self._measure(spec, group)
            self.entries += found
            for entry in found:
                result = f"{entry.ms:.3f} ms" if entry.ms is not None else ""
                print(
                    f"[{self.spent():4.0f} s] {spec.name} {spec.logits}: {entry.contender}: ", end="", file=sys.stderr
                )
                print(" ".join(filter(None, [entry.status, result, entry.reason])), file=sys.stderr, flush=True)
            self.after_part()

    def profile(self, spec: Spec) -> None:
        """Add the device's time by kernel to entries of ours, and that of the rule's kernels to the steps."""
        for entry in self.entries:
            if entry.spec != spec or entry.ms is None or not ("write" in entry.kind or entry.kind == "ours"):
                continue
            contender = next(c for c in (*OURS, *STEPS) if c.name == entry.contender)
            reason = self.why_not() or self._profile(entry, contender)
            if reason:
                entry.note += f"; kernels not measured: {reason}"
            free_memory(self.device)
            self.after_part()

    def _profile(self, entry: Entry, contender: Contender) -> str:
        try:
            run, _ = contender.build(self._problem_of(entry.spec))
            for _ in range(3):
                run()
            if entry.kind == "ours":
                entry.kernels = kernels_ms(run)
            else:
                entry.rule_ms = rule_kernels_ms(run)
        except Exception as error:
            return reason_of(error)
        return ""

    def _wanted(self, contender: Contender) -> bool:
        def named(words: list[str]) -> bool:
            return any(word.lower() in contender.name.lower() for word in words)

        if contender.kind == "product":  # Shares are relative to it.
            return True
        return (self.only is None or named(self.only)) and not named(self.without)

    def _measure(self, spec: Spec, group: list[Contender]) -> list[Entry]:
        reason, status = self.why_not(), "skipped"
        if not reason:
            try:
                problem = self._problem_of(spec)
                found = measure(group, problem, self._truths[spec], self.device, self.seconds, self.why_not)
                self._check_device(found)
                return found
            except Exception as error:  # From the inputs or the reference; entries tell what contenders raise.
                reason, status = reason_of(error), "failed"
            self._problem = None
            free_memory(self.device)
        return [Entry(spec, c.name, c.kind, status, reason) for c in group]

    def _problem_of(self, spec: Spec) -> Problem:
        if self._problem is None or self._problem.spec != spec:
            self._problem = None  # Freed before the next one is made.
            free_memory(self.device)
            self._problem = draw(spec, self.device)
        if spec not in self._truths:
            self._truths[spec] = reference(self._problem)
            self.target_probabilities[spec] = self._truths[spec].target_probability
            free_memory(self.device)
        return self._problem

    def _check_device(self, found: list[Entry]) -> None:
        """Note a lost device: after an illegal access nothing runs any more in this process."""
        if self.device == "cuda" and any(entry.status == "failed" for entry in found):
            try:
                torch.cuda.synchronize()
            except Exception as error:
                self._lost = f"device lost after {found[-1].contender} ({reason_of(error)})"


def loss_contenders(spec: Spec, compiles: bool) -> list[Contender]:
    padded = PADDED if spec.classes % 64 else []
    variants = [SMALLER_WORKSPACE] if spec.name == "B" else []
    return [c for c in (*PRODUCTS, *OURS, *variants, *PEERS, *TORCH, *padded) if compiles or not c.compiles]


def run_full(session: Session, specs: list[Spec], parts: Sequence[str], compiles: bool) -> None:
    """Measure everything, most important first: the losses at every shape, then the other parts."""
    if "losses" in parts:
        for spec in specs:
            session.part(spec, loss_contenders(spec, compiles), together=True)
    short = [spec for spec in specs if spec.name in ("B", "C")]
    if "graphs" in parts:
        for spec in short:
            session.part(spec, [GRAPH])
    if "steps" in parts:
        for spec in specs:
            session.part(spec, [*STEPS, *(STEP_GRAPHS if spec in short else [])])
    if "kernels" in parts and session.device == "cuda":
        for spec in specs:
            session.profile(spec)
    if "peaked" in parts:
        for spec in specs:
            kinds = ("ours", "approximate") if spec.name == "A" else ("ours", "approximate", "peer")
            peaked = [c for c in (*OURS, *TORCH, *PEERS) if c.kind in kinds and not c.compiles]
            session.part(replace(spec, logits="peaked"), peaked, together=True)


def run_cpu(session: Session, specs: list[Spec], compiles: bool) -> None:
    """Measure the losses, then whole steps without and with the write; all take turns, which a busy CPU needs."""
    torchs = [c for c in TORCH if c.name != "eager, fp32 logits" and (compiles or not c.compiles)]
    for spec in specs:
        session.part(spec, [*PRODUCTS, *OURS, *torchs, TORCH_LCE, TORCH_LCE_TUNED], together=True)
        session.part(spec, CPU_STEPS, together=True)
