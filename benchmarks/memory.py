"""The memories for evaluation against the loops that they replace, in the same run.

    python -m benchmarks.memory [--device cuda] [--json FILE]
    python -m benchmarks.memory --device cuda --only mbpa --profile    # also: what two steps spend their time on

The cache is compared with a loop in the style of the public ``pointer.py``: a dense one-hot history, one token at a
time over all classes; unlike ``pointer.py`` it predicts from the first entry on. MbPA is compared with a loop that
copies the output layer for every query and adapts the copy by autograd. Both sides are given the activations and the
model's probabilities. The loops are timed on few tokens, at a full window, in turn with ours; the ratio is the result.
MbPA's layer predicts words about as well as a trained one. On a GPU, two steps are measured with each precision of
float32 products that torch offers; the loop multiplies in float32, and its speed with TF32 is given beside it.
On a CPU both sides use one thread by default, because on a busy machine several threads mostly wait for a core.
"""

from __future__ import annotations

import argparse
import copy
import json
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hebbian_softmax import MbPA, NeuralCache, linear_log_prob
from hebbian_softmax.lab.base import environment
from hebbian_softmax.memory import mix

SIZES: dict[str, dict[str, int]] = {
    "cpu": {
        "features": 256,
        "classes": 33_278,
        "window": 2_000,
        "tokens": 8_000,
        "loop_tokens": 6,
        "layer_tokens": 1_000,
        "mbpa_classes": 33_278,
        "neighbours": 256,
        "queries": 1_000,
        "loop_queries": 3,
        "two_step_queries": 10,
        "two_step_loop_queries": 3,
    },
    "cuda": {
        "features": 512,
        "classes": 267_735,
        "window": 10_000,
        "tokens": 32_768,
        "loop_tokens": 50,
        "layer_tokens": 32_768,
        "mbpa_classes": 33_278,
        "neighbours": 1_024,
        "queries": 16_384,
        "loop_queries": 20,
        "two_step_queries": 1_024,
        "two_step_loop_queries": 256,
    },
}
THETA, SHARE = 0.3, 0.1
ADAPTATION = {"learning_rate": 0.3, "l2": 0.5}
PRECISIONS = {"cpu": {"float32": "highest"}, "cuda": {"float32": "highest", "TF32": "high", "bfloat16": "medium"}}
"""The products of two steps, and the value of ``torch.set_float32_matmul_precision`` that leads to them."""
KINDS = 1_000
"""Words are alike if their numbers are equal modulo this."""


def text(length: int, features: int, classes: int, device: str) -> tuple[Tensor, Tensor]:
    """Return activations, and words with Zipf's frequencies that tend to follow similar activations."""
    generator = torch.Generator().manual_seed(0)
    ranks = torch.arange(1, classes + 1, dtype=torch.float64)
    words = torch.multinomial(1 / ranks, length, replacement=True, generator=generator)
    h = 0.2 * (kinds(features)[words % KINDS] + torch.randn(length, features, generator=generator))
    return h.to(device), words.to(device)


def kinds(features: int) -> Tensor:
    """Return the direction of each kind of words."""
    return torch.randn(KINDS, features, generator=torch.Generator().manual_seed(1))


def trained_layer(features: int, classes: int, device: str) -> nn.Linear:
    """Return a layer that knows how frequent words are and, roughly, which activations they follow."""
    head = nn.Linear(features, classes, device=device)
    noise = torch.randn(classes, features, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        head.weight.copy_(12 / features * (kinds(features)[torch.arange(classes) % KINDS] + noise))
        assert head.bias is not None
        head.bias.copy_(-torch.arange(1, classes + 1).log())
    return head


def pointer_loop(h: Tensor, one_hot: Tensor, targets: Tensor, model: Tensor, first: int, window: int) -> list[float]:
    """Return the log of the mixture for the targets from ``first`` on, one for each distribution in ``model``."""
    found = []
    for t, p in enumerate(model, start=first):
        low = max(0, t - window)
        if t > low:
            attention = torch.softmax(THETA * torch.mv(h[low:t], h[t]), 0).view(-1, 1)
            valid = one_hot[low:t]
            p = SHARE * (attention.expand_as(valid) * valid).sum(0) + (1 - SHARE) * p
        found.append(float(p[targets[t]].log()))
    return found


def copy_and_adapt(
    query: Tensor, keys: Tensor, labels: Tensor, target: Tensor, head: nn.Linear, k: int, n: int
) -> float:
    """Return log p(target) of a layer that is copied for this query and adapted in n steps."""
    distance = (keys - query).square().sum(1)
    near = distance.topk(min(k, len(keys)), largest=False)
    weights = (1e-3 + near.values).reciprocal()
    weights = weights / weights.sum()
    adapted = copy.deepcopy(head)
    optimizer = torch.optim.SGD(adapted.parameters(), lr=ADAPTATION["learning_rate"])
    for _ in range(n):
        optimizer.zero_grad()
        log_prob = adapted(keys[near.indices]).log_softmax(1).gather(1, labels[near.indices, None])[:, 0]
        pull = sum(
            (a - b.detach()).square().sum() for a, b in zip(adapted.parameters(), head.parameters(), strict=True)
        )
        (ADAPTATION["l2"] / 2 * pull - (weights * log_prob).sum()).backward()
        optimizer.step()
    with torch.no_grad():
        return float(adapted(query).log_softmax(0)[target])


def seconds(work: Callable[[], object], device: str) -> float:
    """Return the seconds that ``work`` takes, with all that it launched."""
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def compare(
    ours: Callable[[], object], n: int, loop: Callable[[], object], m: int, device: str, rounds: int
) -> dict[str, Any]:
    """Measure the seconds of both for each token, in turn; ours handles n tokens in a call and the loop m."""
    ours()  # The first call is slower.
    return ratio(take_turns({"loop": (loop, m), "ours": (ours, n)}, device, rounds), "loop", "ours")


def take_turns(
    sides: Mapping[str, tuple[Callable[[], object], int]], device: str, rounds: int
) -> dict[str, list[float]]:
    """Return the seconds for each token of each side, which is given with the tokens that it handles in a call."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, (work, tokens) in sides.items():
            times[name].append(seconds(work, device) / tokens)
    return times


def ratio(times: Mapping[str, list[float]], loop: str, ours: str) -> dict[str, Any]:
    """Return the times of two of the sides, their medians and the ratio of these."""
    pair = {"loop": times[loop], "ours": times[ours]}
    found = {name: statistics.median(values) for name, values in pair.items()}
    return {"seconds_a_token": pair, "median": found, "ratio": found["loop"] / found["ours"]}


def perplexity(log_probs: Tensor | list[float]) -> float:
    return float(torch.as_tensor(log_probs, dtype=torch.float64).mean().neg().exp())


@torch.no_grad()
def bench_cache(size: dict[str, int], device: str, rounds: int) -> dict[str, Any]:
    """Compare the cache with its loop: the same perplexity, and the time of each token."""
    n, few = size["window"], size["loop_tokens"]
    h, targets = text(n + size["tokens"], size["features"], size["classes"], device)
    head = nn.Linear(size["features"], size["classes"], device=device)
    result: dict[str, Any] = {}
    for dtype in (torch.float64, torch.float32):  # Compared from the first entry on and at a full window.
        g, layer = h[: n + few].to(dtype), copy.deepcopy(head).to(dtype)
        one_hot = torch.zeros(n + few, size["classes"], dtype=dtype, device=device)
        one_hot[torch.arange(n + few, device=device), targets[: n + few]] = 1
        checked = torch.cat([torch.arange(few), torch.arange(n, n + few)]).to(device)
        distributions = layer(g[checked]).softmax(1)
        loop = pointer_loop(g, one_hot, targets, distributions[:few], 0, n)
        loop += pointer_loop(g, one_hot, targets, distributions[few:], n, n)
        found = NeuralCache(n, THETA).sequence_log_prob(g, targets[: n + few])
        at_target = distributions.gather(1, targets[checked, None])[:, 0].log()
        pair = perplexity(loop), perplexity(mix(at_target, cache=found[checked], cache_weight=SHARE))
        result[f"perplexity_{dtype}"] = pair
        if abs(pair[0] / pair[1] - 1) > (1e-6 if dtype == torch.float64 else 1e-4):
            raise AssertionError(f"loop and cache disagree in {dtype}: perplexity {pair[0]} and {pair[1]}")
    # The last round was in float32, so its history serves the loop.
    late = distributions[few:]
    cache = NeuralCache(n, THETA)

    def ours() -> None:
        cache.reset()
        cache.observe(h[:n], targets[:n])
        cache.sequence_log_prob(h[n:], targets[n:])

    result |= compare(ours, size["tokens"], lambda: pointer_loop(h, one_hot, targets, late, n, n), few, device, rounds)
    result["beside_the_layer"] = beside_the_layer(h, targets, head, size, device, rounds)
    return result


def beside_the_layer(
    h: Tensor, targets: Tensor, head: nn.Linear, size: dict[str, int], device: str, rounds: int
) -> dict[str, Any]:
    """Time the output layer alone and the cache after it; on a GPU in bfloat16, which the fused loss needs."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    n = size["window"]
    last = min(n + size["layer_tokens"], len(h))
    h, weight = h.to(dtype), head.weight.detach().to(dtype)
    cache = NeuralCache(n, THETA)
    cache.observe(h[:n], targets[:n])
    times: dict[str, list[float]] = {"layer": [], "cache": []}
    for turn in range(rounds + 1):
        layer = seconds(lambda: linear_log_prob(h[n:last], weight, targets[n:last]), device)
        after = seconds(lambda: cache.sequence_log_prob(h[n:last], targets[n:last]), device)
        if turn:  # The first turn is slower.
            times["layer"].append(layer / (last - n))
            times["cache"].append(after / (last - n))
    median = {name: statistics.median(values) for name, values in times.items()}
    return {
        "seconds_a_token": times,
        "median": median,
        "ratio": 1 + median["cache"] / median["layer"],
        "dtype": str(dtype),
    }


@contextmanager
def multiplying(precision: str) -> Iterator[None]:
    """Multiply float32 with this precision: ``highest``, ``high`` or ``medium``."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


class Adaptation:
    """MbPA of some steps and its loop, for the same queries at a full window."""

    def __init__(self, size: dict[str, int], device: str, steps: int) -> None:
        self.window, self.neighbours, self.steps = size["window"], size["neighbours"], steps
        prefix = "" if steps == 1 else "two_step_"
        self.queries = size[f"{prefix}queries"]
        self.few = min(size[f"{prefix}loop_queries"], self.queries)
        features, classes = size["features"], size["mbpa_classes"]
        self.h, self.targets = text(self.window + self.queries, features, classes, device)
        self.head = trained_layer(features, classes, device)
        self.mbpa = MbPA(self.window, self.neighbours, steps, **ADAPTATION)

    def ours(self, precision: str = "highest") -> Tensor:
        """Return log p of all queries."""
        h, targets, n = self.h, self.targets, self.window
        self.mbpa.reset()
        self.mbpa.observe(h[:n], targets[:n])
        with multiplying(precision):
            return self.mbpa.sequence_log_prob(h[n:], targets[n:], self.head.weight, self.head.bias)

    def loop(self, precision: str = "highest") -> list[float]:
        """Return log p of the first queries."""
        h, targets, n = self.h, self.targets, self.window
        with multiplying(precision):
            return [
                copy_and_adapt(
                    h[t], h[t - n : t], targets[t - n : t], targets[t], self.head, self.neighbours, self.steps
                )
                for t in range(n, n + self.few)
            ]

    def agreed(self, loop: list[float], ours: Tensor) -> tuple[float, float]:
        """Return the perplexities of both over the queries of the loop, which must agree in float32."""
        pair = perplexity(loop), perplexity(ours[: self.few])
        if abs(pair[0] / pair[1] - 1) > 1e-3:
            raise AssertionError(f"loop and MbPA disagree: perplexity {pair[0]} and {pair[1]}")
        return pair


def bench_one_step(size: dict[str, int], device: str, rounds: int) -> dict[str, Any]:
    """Compare MbPA of one step with its loop: the same perplexity, and the time of each query."""
    both = Adaptation(size, device, steps=1)
    pair = both.agreed(both.loop(), both.ours())
    times = compare(both.ours, both.queries, both.loop, both.few, device, rounds)
    return {"perplexity_float32": pair, "steps": 1} | times


def bench_two_steps(size: dict[str, int], device: str, rounds: int, profiled: bool) -> dict[str, dict[str, Any]]:
    """Compare MbPA of two steps in each precision with its loop in float32: perplexities, and times of a query."""
    both, precisions = Adaptation(size, device, steps=2), PRECISIONS[device]
    ours = {name: both.ours(precision) for name, precision in precisions.items()}
    loop = both.loop()
    both.agreed(loop, ours["float32"])
    sides: dict[str, tuple[Callable[[], object], int]] = {"loop": (both.loop, both.few)}
    if "TF32" in precisions:
        both.loop(precisions["TF32"])
        sides["loop in TF32"] = partial(both.loop, precisions["TF32"]), both.few
    sides |= {name: (partial(both.ours, precision), both.queries) for name, precision in precisions.items()}
    times = take_turns(sides, device, rounds)
    exact, results = perplexity(ours["float32"]), {}
    for name, found in ours.items():
        results[name] = {"steps": 2, "products": name} | ratio(times, "loop", name)
        results[name]["perplexity"] = {
            "loop": perplexity(loop),
            "ours_on_the_same_words": perplexity(found[: both.few]),
            "ours_on_all_words": perplexity(found),
            "change_by_precision": perplexity(found) / exact - 1,
        }
        if "loop in TF32" in times:
            results[name]["seconds_a_token"]["loop in TF32"] = times["loop in TF32"]
        if profiled:
            print(f"two steps, {name}:\n{profile(partial(both.ours, precisions[name]), device)}")
    return results


def profile(work: Callable[[], object], device: str) -> str:
    """Return the operations that take most of the time of ``work``, with their milliseconds and calls."""
    activities = [torch.profiler.ProfilerActivity.CUDA if device == "cuda" else torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as found:
        seconds(work, device)
    spent = f"self_{'device' if device == 'cuda' else 'cpu'}_time_total"
    events = sorted(found.key_averages(), key=lambda event: -getattr(event, spent))
    return "\n".join(f"{getattr(each, spent) / 1000:9.1f} ms {each.count:6d} × {each.key[:80]}" for each in events[:12])


def header(device: str, commit: str | None) -> dict[str, Any]:
    """Return what the numbers depend on besides the sizes."""
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name() if device == "cuda" else environment.hardware()["cpu"],
        "threads": torch.get_num_threads(),
        "commit": commit or environment.commit(),
        "date": date.today().isoformat(),
    }


def rounded(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.2f}"


def table(results: dict[str, dict[str, Any]]) -> str:
    lines = ["| what | loop, tokens/s | ours, tokens/s | ratio |", "| --- | --- | --- | --- |"]
    for name, found in results.items():
        loop, ours = (rounded(1 / found["median"][side]) for side in ("loop", "ours"))
        lines.append(f"| {name} | {loop} | {ours} | {rounded(found['ratio'])}× |")
    return "\n".join(lines)


def two_step_line(found: dict[str, Any]) -> str:
    words = found["perplexity"]
    line = f"perplexity {words['ours_on_the_same_words']:.6f} where the loop has {words['loop']:.6f}; on all words "
    line += f"{words['ours_on_all_words']:.6f}, {words['change_by_precision']:+.1e} of that in float32"
    if "loop in TF32" in found["seconds_a_token"]:
        line += f"; the loop in TF32: {1 / statistics.median(found['seconds_a_token']['loop in TF32']):,.0f} tokens/s"
    return line


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=sorted(SIZES), default="cpu")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each side (default 3)")
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of both sides (default 1: see above)")
    parser.add_argument("--commit", help="commit to name in the record (default: that of git)")
    parser.add_argument("--only", choices=["cache", "mbpa"], help="measure only this memory")
    parser.add_argument("--profile", action="store_true", help="list the slowest operations of MbPA's two steps")
    for name in SIZES["cpu"]:
        parser.add_argument(f"--{name.replace('_', '-')}", type=int)
    options = parser.parse_args(arguments)
    size = {name: getattr(options, name) or value for name, value in SIZES[options.device].items()}
    torch.manual_seed(0)
    torch.set_num_threads(options.threads)
    where = header(options.device, options.commit)
    print(", ".join(f"{name} {value}" for name, value in (where | size).items()), flush=True)
    results: dict[str, dict[str, Any]] = {}
    if options.only != "mbpa":
        name = f"cache, n = {size['window']:,}, V = {size['classes']:,}"
        results[name] = bench_cache(size, options.device, options.rounds)
    if options.only != "cache":
        shape = f"K = {size['neighbours']:,}, V = {size['mbpa_classes']:,}"
        results[f"MbPA, 1 step, {shape}"] = bench_one_step(size, options.device, options.rounds)
        for name, found in bench_two_steps(size, options.device, options.rounds, options.profile).items():
            results[f"MbPA, 2 steps, {name}, {shape}"] = found
    print(table(results))
    for name, found in results.items():
        if "beside_the_layer" in found:
            ratio = found["beside_the_layer"]["ratio"]
            print(f"{name}: output layer and cache together take {ratio:.2f}× the output layer alone")
        if found.get("steps") == 1:
            print(f"{name}: 245,000 words would take {245_000 * found['median']['ours']:,.0f} s")
        if found.get("steps") == 2:
            print(f"{name}: {two_step_line(found)}")
    if options.json:
        options.json.write_text(json.dumps({"environment": where, "sizes": size, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
