"""The settings of cache and MbPA, chosen on the validation text alone (appendix A.1).

1. Cache: all θ and n from one pass over the text, all λ_c from the log-probabilities that it leaves.
2. MbPA of one step, with the cache's best θ and n: all K and α from one pass, all λ_c with all λ_m afterwards.
3. MbPA of two steps costs more than a hundred times as much. It is swept on a stretch of the text that begins where the
   memory is full. Where its best is better there than one step is at its best there, and the time is enough to
   measure whole texts with it, it reads the whole text: all λ_c with all λ_m again, and whichever is better there.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hebbian_softmax import MbPA, NeuralCache, linear_log_prob
from hebbian_softmax.lab.base.progress import Progress
from hebbian_softmax.lab.language.memories.grid import (
    Grids,
    Point,
    at_edges,
    best_first,
    cache_points,
    mbpa_points,
)
from hebbian_softmax.lab.language.memories.reading import Memories, layer_of, pieces, read_parts, usable
from hebbian_softmax.lab.language.memories.store import Store
from hebbian_softmax.lab.language.memories.two_steps import TwoSteps, sweep_two_steps
from hebbian_softmax.lab.language.model import LanguageModel


@dataclass(frozen=True)
class Sweep:
    """Every point of each grid, the best first, and what was chosen from them."""

    cache: Sequence[Point]
    mbpa: Sequence[Point]  # of one step; none where MbPA was not wanted
    two_steps: TwoSteps | None
    chosen: Point  # the last row's: with MbPA where that was wanted
    squared_norm: float  # the mean of ‖h‖², which θ and α multiply
    notes: Sequence[str]

    def as_plain(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "chosen": {"cache": self.cache[0].as_plain(), "last": self.chosen.as_plain()},
            "mean_squared_norm_of_activations": self.squared_norm,
            "notes": list(self.notes),
            "cache": [point.as_plain() for point in self.cache],
            "mbpa": [point.as_plain() for point in self.mbpa],
            "two_steps": None if self.two_steps is None else self.two_steps.as_plain(),
        }


def sweep(
    model: LanguageModel,
    ids: Tensor,
    grids: Grids,
    *,
    mbpa: bool,
    test_words: int,
    store: Store,
    workspace: int | None,
    label: str,
    quiet: bool,
) -> tuple[Sweep, dict[str, Tensor]]:
    """Choose on the validation text `ids`. The second value is its words' log-probabilities under what was chosen.

    `test_words` is how many words will be measured later: two steps are chosen only if there is time for them.
    """

    def shown(what: str) -> Progress:
        return Progress(f"{what} of {label}", total=len(ids) - 1, unit="words", quiet=quiet)

    def read_cache() -> dict[str, Tensor]:
        with shown("cache grid") as progress:
            return read_cache_grid(model, ids, grids, workspace, progress)

    settings: dict[str, Any] = {"thetas": list(grids.thetas), "sizes": list(grids.sizes)}
    grid = store.get("valid-cache-grid", settings, read_cache)
    by_cache = best_first(cache_points(grid["model"], grid["cache"], grids))
    best, norm = by_cache[0].cache, float(grid["squared_norm"])
    at = list(grids.thetas).index(best.theta), list(grids.sizes).index(best.size)
    parts = {"model": grid["model"], "cache": grid["cache"][at]}
    if not mbpa:
        return Sweep(by_cache, (), None, by_cache[0], norm, at_edges(by_cache[0], grids)), parts

    def read_mbpa() -> dict[str, Tensor]:
        with shown("MbPA grid") as progress:
            return {"mbpa": read_mbpa_grid(model, ids, grids, best.size, workspace, progress)}

    settings = {"size": best.size, "neighbours": grids.counts(best.size), "rates": list(grids.rates)}
    found = store.get("valid-mbpa-grid", settings, read_mbpa)["mbpa"]
    adapted = dict(zip(grids.one_step(best.size), found, strict=True))
    by_mbpa = best_first(mbpa_points(parts["model"], parts["cache"], adapted, best, grids))
    chosen = by_mbpa[0]
    two = sweep_two_steps(
        model,
        ids,
        grids,
        parts,
        adapted,
        chosen,
        later=len(ids) - 1 + test_words,
        store=store,
        workspace=workspace,
        label=label,
        quiet=quiet,
    )
    notes = list(two.notes) if two else []
    if two is not None and two.candidate is not None:
        twice = two.candidate

        def read_two_steps() -> dict[str, Tensor]:
            what = f"{label} with MbPA of two steps, validation text"
            with Progress(what, total=len(ids) - 1, unit="words", quiet=quiet) as progress:
                return read_parts(model, ids, Memories(None, twice, workspace), seen=progress.update)

        adapted[twice] = store.get("valid-two-steps", asdict(twice), read_two_steps)["mbpa"]
        rival = best_first(mbpa_points(parts["model"], parts["cache"], {twice: adapted[twice]}, best, grids))[0]
        reached = f"{rival.perplexity:.4g}, one step {chosen.perplexity:.4g}"
        notes.append(f"On the whole validation text two steps reach {reached}.")
        chosen = min(chosen, rival, key=lambda point: point.perplexity)
    assert chosen.mbpa is not None
    result = Sweep(by_cache, by_mbpa, two, chosen, norm, notes + at_edges(chosen, grids))
    return result, {**parts, "mbpa": adapted[replace(chosen.mbpa, share=0.0)]}


@torch.no_grad()
def read_cache_grid(
    model: LanguageModel, ids: Tensor, grids: Grids, workspace: int | None, progress: Progress
) -> dict[str, Tensor]:
    """log p of the model (T,) and of the cache (θ, n, T), and the mean of ‖h‖², in one pass."""
    cache = NeuralCache(max(grids.sizes), grids.thetas[0])
    weight, bias = layer_of(model)
    base, every, norms = [], [], []
    with usable():
        for h, targets in pieces(model, ids):
            base.append(linear_log_prob(h, weight, targets, linear_bias=bias)[0].cpu())
            thetas, sizes = list(grids.thetas), list(grids.sizes)
            found = cache.sequence_log_prob(h, targets, thetas=thetas, sizes=sizes, workspace=workspace)
            every.append(found.cpu())
            norms.append(h.float().square().sum(1).cpu())
            progress.update(progress.done + len(targets))
        norm = torch.cat(norms).double().mean()
        return {"model": torch.cat(base), "cache": torch.cat(every, -1), "squared_norm": norm}


@torch.no_grad()
def read_mbpa_grid(
    model: LanguageModel, ids: Tensor, grids: Grids, size: int, workspace: int | None, progress: Progress
) -> Tensor:
    """log p under MbPA of one step, in the order of `Grids.one_step`, (K · α, T), in one pass."""
    counts = grids.counts(size)
    mbpa = MbPA(size, counts[-1])
    weight, bias = layer_of(model)
    found = []
    with usable():
        for h, targets in pieces(model, ids):
            grid = mbpa.sequence_log_prob(
                h, targets, weight, bias, neighbours=counts, learning_rates=list(grids.rates), workspace=workspace
            )
            found.append(grid.flatten(0, 1).cpu())
            progress.update(progress.done + len(targets))
    return torch.cat(found, -1)
