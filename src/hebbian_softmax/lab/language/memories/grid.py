"""The grids over which cache and MbPA are swept, and the perplexity at every point of them (appendix A.1)."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hebbian_softmax.lab.language.evaluation import perplexity
from hebbian_softmax.lab.language.memories.reading import CacheSettings, MbpaSettings, check_shares
from hebbian_softmax.memory import mix


@dataclass(frozen=True)
class Grids:
    """The paper's; for α and β, whose grids it does not give, values around those that it chose."""

    thetas: Sequence[float] = (0.1, 0.2, 0.3)
    sizes: Sequence[int] = (1000, 5000, 8000, 9000, 10_000)
    cache_shares: Sequence[float] = (0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35)
    neighbours: Sequence[int] = (512, 1024)
    rates: Sequence[float] = (0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
    l2: Sequence[float] = (0.1, 0.5, 1.0)
    mbpa_shares: Sequence[float] = (0.02, 0.04, 0.06, 0.08, 0.1)
    two_step_words: int = 500
    """Validation words on which two steps are swept; 0: only one step is."""
    budget: float = 600.0
    """Seconds that two steps may take in all."""

    def __post_init__(self) -> None:
        check_shares(max(self.cache_shares), max(self.mbpa_shares))

    def counts(self, size: int) -> list[int]:
        """K: no more neighbours than the memory, which is as large as the cache, holds."""
        return sorted({min(count, size) for count in self.neighbours})

    def one_step(self, size: int) -> list[MbpaSettings]:
        """K and then α. The pull β is zero at the first step, so one value stands for all."""
        return [MbpaSettings(size, count, 1, rate, 0.0, 0.0) for count in self.counts(size) for rate in self.rates]

    def two_steps(self, size: int, rate: float) -> list[MbpaSettings]:
        """K, then α from among `rate`, the best at one step, and the next to it in the grid, then β."""
        ordered = sorted(set(self.rates))
        at = ordered.index(rate)
        near = ordered[max(0, at - 1) : at + 2]
        return [
            MbpaSettings(size, count, 2, each, l2, 0.0)
            for count in self.counts(size)
            for each in near
            for l2 in self.l2
        ]


@dataclass(frozen=True)
class Point:
    """One setting of a grid and the perplexity of the validation text, or of a stretch of it, with it."""

    perplexity: float
    cache: CacheSettings
    mbpa: MbpaSettings | None = None

    def as_plain(self) -> dict[str, Any]:
        plain = {f"cache_{name}": value for name, value in asdict(self.cache).items()}
        if self.mbpa is not None:
            plain |= {f"mbpa_{name}": value for name, value in asdict(self.mbpa).items()}
        return {**plain, "perplexity": self.perplexity}


def best_first(points: Iterator[Point]) -> list[Point]:
    """Of equally good ones the earlier in the grid comes first."""
    return sorted(points, key=lambda point: point.perplexity)


def cache_points(model: Tensor, cache: Tensor, grids: Grids) -> Iterator[Point]:
    """All θ, n and λ_c, from log-probabilities of the model (T,) and of the cache (θ, n, T)."""
    model = model.double()
    for theta, of_theta in zip(grids.thetas, cache, strict=True):
        for size, log_prob in zip(grids.sizes, of_theta.double(), strict=True):
            for share in grids.cache_shares:
                mixed = mix(model, cache=log_prob, cache_weight=share)
                yield Point(_perplexity(mixed), CacheSettings(size, theta, share))


def mbpa_points(
    model: Tensor, cache: Tensor, adapted: Mapping[MbpaSettings, Tensor], best: CacheSettings, grids: Grids
) -> Iterator[Point]:
    """All λ_c and λ_m for the cache of the best θ and n and each MbPA, all given by log-probabilities (T,)."""
    model, cache = model.double(), cache.double()
    for settings, log_prob in adapted.items():
        wide = log_prob.double()
        for cache_share in grids.cache_shares:
            for mbpa_share in grids.mbpa_shares:
                mixed = mix(model, cache=cache, cache_weight=cache_share, mbpa=wide, mbpa_weight=mbpa_share)
                yield Point(_perplexity(mixed), replace(best, share=cache_share), replace(settings, share=mbpa_share))


def _perplexity(log_prob: Tensor) -> float:
    return perplexity(-float(torch.mean(log_prob)))


def ends(point: Point, grids: Grids) -> list[str]:
    """The chosen values that are the lowest or highest of their grids."""
    chosen: list[tuple[str, float, Sequence[float]]] = [
        ("θ", point.cache.theta, grids.thetas),
        ("the cache's n", point.cache.size, grids.sizes),
        ("the cache's λ", point.cache.share, grids.cache_shares),
    ]
    if point.mbpa is not None:
        chosen += [
            ("K", point.mbpa.neighbours, grids.counts(point.mbpa.size)),
            ("α", point.mbpa.rate, grids.rates),
            ("MbPA's λ", point.mbpa.share, grids.mbpa_shares),
        ]
    return [
        f"{name} = {value:g} ({'lowest' if value == min(grid) else 'highest'})"
        for name, value, grid in chosen
        if len(set(grid)) > 1 and value in (min(grid), max(grid))
    ]


def at_edges(point: Point, grids: Grids) -> list[str]:
    """A sentence on these values; none where there are none."""
    found = ends(point, grids)
    return [f"At the end of its grid, so that the best may lie beyond: {', '.join(found)}."] if found else []
