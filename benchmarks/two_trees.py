"""Compare the speed of two checkouts of this project on one GPU, in turn, in one run.

Each checkout has a process of its own, and the two take turns: whoever goes first in a round goes second in the next.
The output layer is measured as one pass of `head.loss` forward and backward, and as one whole training step with the
one-pass optimizer and the rule's write, and as the write alone, a CUDA graph; language models are measured by their
training steps.

    python benchmarks/two_trees.py --before OLD_CHECKOUT --after . [--json FILE] [--groups A B] [--quick]

`--quick` uses tiny sizes and the CPU, to see whether everything runs.
"""

import argparse
import inspect
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

LAYERS = {"B": (8_192, 1_024, 32_768), "C": (4_096, 512, 267_735), "A": (51_200, 2_048, 267_735)}
VOCABULARIES = {"words, V = 267,735": 267_735, "words, V = 63,951": 63_951}
ROUNDS, BLOCK_SECONDS = 6, 0.4


def layer_cases(name: str, quick: bool) -> dict[str, Callable[[], object]]:
    """Return the work of one output layer: its loss with gradients, a whole training step, and the write alone."""
    import torch

    from hebbian_softmax import HebbianSoftmax, OnePassRMSprop, rule

    n, features, classes = (64, 16, 500) if quick else LAYERS[name]
    device = "cpu" if quick else "cuda"
    torch.manual_seed(0)
    # Each tree's usual rule, with one T for both, so that both write the same rows.
    usual = next(getattr(rule, name) for name in ("RecentRate", "MeanRate", "PaperRate") if hasattr(rule, name))
    head = HebbianSoftmax(features, classes, gamma=0.25, limit=500, rate=usual(0.25, 500), device=device)
    optimizer = OnePassRMSprop(head.parameters(), lr=1e-5, head=head)
    h = torch.randn(n, features, device=device, dtype=torch.bfloat16, requires_grad=True)
    zipf = torch.arange(1, classes + 1, dtype=torch.float64, device=device).reciprocal()
    targets = torch.multinomial(zipf, n, replacement=True)
    # Counts as after a thousand such batches: on a new head the first write copies raw activations into the rows, and
    # the logits of the same activations then overflow.
    counts = (1000 * n * zipf / zipf.sum()).long()
    head.counts.copy_(counts)
    if getattr(head, "settling", None) is not None:  # random activations never settle
        head.settling.began.fill_(0)

    def loss(remember: bool = False) -> None:
        h.grad = head.weight.grad = None
        with torch.autocast(device, torch.bfloat16):
            found = head.loss(h, targets, remember=remember)
        found.backward()

    def step() -> None:
        loss(remember=True)
        optimizer.step()

    frozen = h.detach()

    def memorize() -> None:
        head.counts.copy_(counts)  # so that every call writes the same rows
        head.memorize(frozen, targets)

    write = memorize
    if not quick:
        memorize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            memorize()
        write = graph.replay
    return {
        f"{name}: loss forward and backward": loss,
        f"{name}: training step with the write": step,
        f"{name}: the write alone, as a graph": write,
    }


def word_cases(name: str, quick: bool) -> dict[str, Callable[[], object]]:
    """Return the training steps of a language model with a plain and with a Hebbian softmax."""
    import torch

    from benchmarks import language_model as program  # that of the checkout which is measured

    vocabulary = 500 if quick else VOCABULARIES[name]
    device = torch.device("cpu" if quick else "cuda")
    size = "tiny" if quick else "paper"
    settings = program.Settings(preset=size, limit=500, gamma=0.25, start=0, device=device.type)
    sizes = settings.sizes
    corpus = program.zipf_corpus(vocabulary, (program.STEPS_OF_TEXT * sizes.batch + 1) * sizes.sequence)
    windows = program.make_windows(corpus, settings, device)

    def steps_of(hebbian: bool) -> Callable[[], object]:
        learner, numbers = program.Learner(settings, vocabulary, hebbian=hebbian, device=device), itertools.count()
        # Trees of version 0.1 have an argument more.
        more = {"memorizing": True} if "memorizing" in inspect.signature(learner.step).parameters else {}
        return lambda: learner.step(windows.at(next(numbers)), program.RATE, **more)

    return {f"{name}, {head}": steps_of(hebbian) for head, hebbian in program.HEADS.items()}


def work(quick: bool) -> None:
    """Answer the requests of the parent process: prepare a group of cases, or time a block of one."""
    import torch

    def finish() -> float:
        if not quick:
            torch.cuda.synchronize()
        return time.perf_counter()

    def timed(call: Callable[[], object], steps: int) -> float:
        since = finish()
        for _ in range(steps):
            call()
        return (finish() - since) / steps

    cases: dict[str, Callable[[], object]] = {}
    for line in sys.stdin:
        request = json.loads(line)
        if "prepare" in request:
            cases = {}
            if not quick:
                torch.cuda.empty_cache()
            name = request["prepare"]
            cases = layer_cases(name, quick) if name in LAYERS else word_cases(name, quick)
            answer: Any = {}
            for key, call in cases.items():
                timed(call, 5)
                answer[key] = timed(call, 3)
        else:
            answer = timed(cases[request["time"]], request["steps"])
        print("answer " + json.dumps(answer), flush=True)


class Checkout:
    """A checkout of the project in a process of its own."""

    def __init__(self, path: Path, quick: bool) -> None:
        root = path.resolve()
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(root / "src"), str(root), *sys.path[1:]])}
        command = [sys.executable, str(Path(__file__).resolve()), "--worker", *(["--quick"] if quick else [])]
        self.process = subprocess.Popen(
            command, cwd=root, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, **request: Any) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        for line in self.process.stdout:
            if line.startswith("answer "):
                return json.loads(line.removeprefix("answer "))
        raise SystemExit(f"the process of a checkout ended with code {self.process.wait()}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, help="the older checkout")
    parser.add_argument("--after", type=Path, default=Path(), help="the newer checkout (default: this folder)")
    parser.add_argument("--json", type=Path, help="write all times to this file")
    parser.add_argument("--groups", nargs="+", choices=[*VOCABULARIES, *LAYERS], help="what to measure (default: all)")
    parser.add_argument("--quick", action="store_true", help="tiny sizes on the CPU: does everything run?")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options.quick)
        return
    if options.before is None:
        parser.error("--before is needed: the folder of the older checkout")
    checkouts = {"before": Checkout(options.before, options.quick), "after": Checkout(options.after, options.quick)}
    found: dict[str, Any] = {}
    print(f"{'median of the rounds':48} {'before':>10} {'after':>10}   after/before (least … most of the rounds)")
    for group in options.groups or (*VOCABULARIES, *LAYERS):
        firsts = {name: checkout.ask(prepare=group) for name, checkout in checkouts.items()}
        for case in firsts["before"]:
            steps = max(3, round((0.01 if options.quick else BLOCK_SECONDS) / max(f[case] for f in firsts.values())))
            times: dict[str, list[float]] = {name: [] for name in checkouts}
            for number in range(ROUNDS):
                for name in list(checkouts)[:: 1 if number % 2 == 0 else -1]:
                    times[name].append(checkouts[name].ask(time=case, steps=steps))
            ratios = [after / before for before, after in zip(times["before"], times["after"], strict=True)]
            found[case] = {"steps_in_a_block": steps, "seconds": times, "ratio": statistics.median(ratios)}
            before, after = (1e3 * statistics.median(times[name]) for name in checkouts)
            spread = f"({min(ratios):.4f} … {max(ratios):.4f})"
            print(f"{case:48} {before:7.3f} ms {after:7.3f} ms   {found[case]['ratio']:.4f} {spread}", flush=True)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
