"""Steps per second of the image curriculum: one seed, many together, and a plain PyTorch loop of the same model.

All train the paper's network on images of noise over 1,623 classes, of which `--active` are active and tested every 25
steps. "together" is what `hebbian reproduce omniglot` does: on a GPU each learner has a CUDA graph and a stream, on a
CPU a thread. `--processes` measures the alternative, one process for each learner. The last table shows how a round of
25 steps and a check divides into input, training and check.

    python -m benchmarks.curriculum [--device cuda] [--json FILE]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from hebbian_softmax.lab.base import environment
from hebbian_softmax.lab.base.files import write_atomic
from hebbian_softmax.lab.base.json_files import to_json
from hebbian_softmax.lab.images.convnet import augment, convnet
from hebbian_softmax.lab.images.curriculum import BATCH, CHECK_EVERY
from hebbian_softmax.lab.images.data import DRAWINGS, SIZE, TEST_DRAWINGS, ImageSet
from hebbian_softmax.lab.images.fleet import Eager, Graphed, Runner, Threads, finish_all, start
from hebbian_softmax.lab.images.learner import Learner, Method

CLASSES = 1623
HEADS = {"plain": Method(hebbian=False), "Hebbian": Method(hebbian=True)}


def noise() -> ImageSet:
    """Return an image set of noise."""
    images = torch.randint(256, (CLASSES, DRAWINGS, SIZE, SIZE), dtype=torch.uint8)
    return ImageSet("noise", images, [str(number) for number in range(CLASSES)])


def plain_loop(data: ImageSet, device: torch.device, active: int) -> Callable[[], None]:
    """Return a round in plain PyTorch, with only the network and the augmentation from this project."""
    network = convnet().to(device)
    head = nn.Linear(64, CLASSES, bias=False, device=device)
    optimizer = torch.optim.RMSprop([*network.parameters(), *head.parameters()], lr=1e-3)
    train, test = data.train.to(device), data.test.to(device)
    answers = torch.arange(active, device=device).repeat_interleave(TEST_DRAWINGS)

    def work() -> None:
        for _ in range(CHECK_EVERY):
            labels = torch.randint(active, (BATCH,), device=device)
            images = train[labels, torch.randint(train.shape[1], (BATCH,), device=device)]
            optimizer.zero_grad()
            features = network(augment(images.unsqueeze(1)))
            F.cross_entropy(head(F.dropout(features, 0.2)), labels).backward()
            optimizer.step()
        network.eval()
        with torch.no_grad():
            inputs = test[:active].reshape(-1, 1, SIZE, SIZE).float() / 255
            (head(network(inputs)).argmax(dim=1) == answers).float().mean().item()
        network.train()

    return work


def learner(data: ImageSet, method: Method, seed: int, images: torch.Tensor, active: int) -> Learner:
    """Return a learner with ``active`` active classes."""
    made = Learner(data, method, seed, device=images.device, images=images)
    made.active.fill_(active)
    return made


def rounds(runners: list[Runner], threads: Threads) -> Callable[[], None]:
    """Return a round of all runners, which read their last check but one, as in `run_trials`."""
    for runner in runners:
        runner.steps(1)
        runner.check()

    def advance(runner: Runner) -> None:
        runner.steps(CHECK_EVERY)
        runner.check()
        runner.read()

    return lambda: threads.each(advance, runners) and None


def rate(work: Callable[[], None], steps: int, seconds: float, finish: Callable[[], None]) -> float:
    """Return the steps a second of rounds that are repeated for ``seconds``, after one that does not count."""
    work()
    finish()
    began, done = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        work()
        done += steps
    finish()
    return done / (time.perf_counter() - began)


def _timed(work: Callable[[], Any], repeats: int) -> float:
    """Return the milliseconds of one call."""
    work()
    finish = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    finish()
    began = time.perf_counter()
    for _ in range(repeats):
        work()
    finish()
    return 1000 * (time.perf_counter() - began) / repeats


def one_of_many(method: Method, device: torch.device, options: argparse.Namespace) -> None:
    """Run one learner in a process of its own: get ready, wait for the others, print the steps a second."""
    data = noise()
    runner = start(learner(data, method, 0, data.images.to(device), options.active))
    with Threads(device, 1) as threads:
        work = rounds([runner], threads)
        work()
        runner.finish()
        time.sleep(max(0.0, options.worker - time.time()))
        print(rate(work, CHECK_EVERY, options.seconds, runner.finish))


def processes(count: int, options: argparse.Namespace) -> float:
    """Return the steps a second of ``count`` processes together, each with one learner."""
    command = [sys.executable, "-m", "benchmarks.curriculum", "--device", options.device]
    command += ["--active", str(options.active), "--seconds", str(options.seconds)]
    command += ["--worker", str(time.time() + 15 + count)]
    workers = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(count)]
    return sum(float(worker.communicate()[0].split()[-1]) for worker in workers)


def where(one: Learner, device: torch.device, active: int, repeats: int) -> dict[str, float]:
    """Return the milliseconds of each part of a round of 25 steps and a check, for one learner alone."""
    if device.type == "cuda":
        runner = Graphed(one)
        draw = runner.record(lambda: one.draw() and None)
        parts = {
            "input: sampling and augmentation": CHECK_EVERY * _timed(draw.replay, 20 * repeats),
            "all of the steps": _timed(lambda: runner.steps(CHECK_EVERY), repeats),
            "check": _timed(lambda: (runner.check(), runner.read()), repeats),
        }
    else:
        parts = {
            "input: sampling and augmentation": CHECK_EVERY * _timed(one.draw, repeats),
            "all of the steps": CHECK_EVERY * _timed(one.step, repeats),
            "check": _timed(lambda: one.right_answers(active), max(1, repeats // 5)),
        }
    parts["forward, backward, optimizer, write"] = parts["all of the steps"] - parts["input: sampling and augmentation"]
    return parts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--together", type=int, nargs="+", help="learners at a time (default: 10 and 30; on a CPU 10)")
    parser.add_argument("--active", type=int, default=200, help="active classes")
    parser.add_argument("--seconds", type=float, default=10.0, help="seconds of each measurement (default 10)")
    parser.add_argument("--processes", type=int, help="also measure this many processes with one learner each")
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    parser.add_argument("--worker", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    device = torch.device(options.device)
    if options.worker:
        torch.set_num_threads(1)
        one_of_many(HEADS["Hebbian"], device, options)
        return
    data = noise()
    images = data.images.to(device)
    finish = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    found: dict[str, float] = {}

    def measure(name: str, work: Callable[[], None], together: int = 1) -> None:
        found[name] = rate(work, CHECK_EVERY * together, options.seconds, finish)
        print(f"{name:50} {found[name]:10,.1f} steps/s", flush=True)

    measure("plain PyTorch loop, one seed", plain_loop(data, device, options.active))
    if device.type == "cpu":
        torch.set_num_threads(1)
        measure("plain PyTorch loop, one seed, one thread", plain_loop(data, device, options.active))
    for head, method in HEADS.items():
        for together in (1, *(options.together or ([10] if device.type == "cpu" else [10, 30]))):
            learners = [learner(data, method, seed, images, options.active) for seed in range(together)]
            if together == 1 and device.type == "cuda":
                with Threads(device, 1) as threads:
                    measure(f"{head}, one seed, operation by operation", rounds([Eager(learners[0])], threads))
                learners = [learner(data, method, 0, images, options.active)]
            with Threads(device, together) as threads:
                runners = [start(each) for each in learners]
                kind = "graphs" if isinstance(runners[0], Graphed) else "operation by operation"
                measure(f"{head}, {together} together, {kind}", rounds(runners, threads), together)
                finish_all(runners)
    if options.processes:
        found[f"Hebbian, {options.processes} processes"] = together = processes(options.processes, options)
        print(f"{f'Hebbian, {options.processes} processes':50} {together:10,.1f} steps/s", flush=True)
    shares = {}
    for head, method in HEADS.items():
        one = learner(data, method, 0, images, options.active)
        shares[head] = where(one, device, options.active, 10)
        print(f"{head}: milliseconds of a round of {CHECK_EVERY} steps and a check of {options.active} classes")
        for part, spent in shares[head].items():
            print(f"  {part:40} {spent:10.2f}")
    if device.type == "cuda":
        profile(learner(data, HEADS["Hebbian"], 0, images, options.active))
    if options.json:
        record = {
            "benchmark": "curriculum",
            "arguments": {name: value for name, value in vars(options).items() if name not in ("json", "worker")},
            "versions": environment.versions(),
            "hardware": environment.hardware(),
            "steps_per_second": found,
            "milliseconds_of_a_round": shares,
        }
        write_atomic(options.json, (to_json(record, indent=1) + "\n").encode())


def profile(one: Learner) -> None:
    """Print the kernels that take most of a step."""
    for _ in range(3):
        one.step()
    with torch.profiler.profile() as profiler:
        for _ in range(10):
            one.step()
        torch.cuda.synchronize()
    print(profiler.key_averages().table(sort_by="self_cuda_time_total", row_limit=15, max_name_column_width=60))


if __name__ == "__main__":
    main()
