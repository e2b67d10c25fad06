"""Count the files of this project that a reader meets in one training step and in the commands of the laboratory.

A file counts as entered when one of its functions runs; its module-level code does not count, because importing a file
is not reading it. Each case runs in a process of its own, so that nothing is cached by an earlier case.

    python -m benchmarks.files_entered [--json FILE] [--list]
"""

import argparse
import contextlib
import io
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

SMALL = "--hidden 8 --embedding 6 --batch 4 --sequence 5 --warmup 2 --steps 6 --evaluations 2 --device cpu"
ZIPF = "--vocabulary 40 --tokens 800"
CORPUS = Path(__file__).parents[1] / "tests" / "fixtures" / "version-0.1" / "corpus"


@contextlib.contextmanager
def watched() -> Iterator[set[str]]:
    """Collect the files of the package in which a function is called, on all threads."""
    import hebbian_softmax

    package = os.path.dirname(hebbian_softmax.__file__) + os.sep
    entered: set[str] = set()

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(package) and frame.f_code.co_name != "<module>":
            entered.add(name.removeprefix(package))

    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        yield entered
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]


def training_step(one_pass: bool) -> set[str]:
    """Take a step after two others, so that nothing of the first step's set-up is counted."""
    import torch

    from hebbian_softmax import HebbianSoftmax, OnePassAdam

    torch.manual_seed(0)
    head = HebbianSoftmax(16, 100)
    if one_pass:
        optimizer: torch.optim.Optimizer = OnePassAdam(head.parameters(), head=head)
    else:
        optimizer = torch.optim.Adam(head.parameters())
        head.attach(optimizer)
    for _ in range(3):
        h, targets = torch.randn(8, 16, requires_grad=True), torch.randint(100, (8,))
        with watched() as entered:
            head.loss(h, targets).backward()
            optimizer.step()
            optimizer.zero_grad()
    return entered


def command(words: str, *, before: str = "") -> Callable[[], set[str]]:
    """Run `hebbian WORDS` in a new folder, after `hebbian BEFORE` in a process of its own."""

    def case() -> set[str]:
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
            if before:
                program = [sys.executable, "-m", "hebbian_softmax.lab.cli", *before.split()]
                subprocess.run(program, check=True, capture_output=True)
            runs = [str(path) for path in Path("runs").glob("*")]
            from hebbian_softmax.lab.cli import main

            with watched() as found, contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
                code = main([word.format(*runs) for word in words.split()])
                assert code == 0, f"hebbian {words} ended with {code}"
            return found

    return case


CASES: dict[str, Callable[[], set[str]]] = {
    "a training step": lambda: training_step(one_pass=False),
    "a training step, one-pass optimizer": lambda: training_step(one_pass=True),
    "hebbian --help": command("--help"),
    "hebbian train": command(f"train zipf {ZIPF} {SMALL} --quiet"),
    "hebbian evaluate --sweep": command(
        "evaluate {} --sweep --sweep-sizes 20 --sweep-neighbours 4 --two-step-words 0 --device cpu --quiet",
        before=f"train zipf {ZIPF} {SMALL} --quiet",
    ),
    "hebbian reproduce": command(
        f"reproduce frequency-table --corpus {CORPUS} --size tiny --trials 0 --seeds 1 --quiet {SMALL}"
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the names of the files to this file")
    parser.add_argument("--list", action="store_true", help="print the names of the files, too")
    parser.add_argument("--case", choices=CASES, help=argparse.SUPPRESS)  # what the processes are started with
    arguments = parser.parse_args()
    if arguments.case:
        print(json.dumps(sorted(CASES[arguments.case]())))
        return
    found: dict[str, list[str]] = {}
    for name in CASES:
        program = [sys.executable, "-m", "benchmarks.files_entered", "--case", name]
        done = subprocess.run(program, check=False, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{name} failed:\n{done.stderr}")
        found[name] = json.loads(done.stdout.splitlines()[-1])
        library = [each for each in found[name] if not each.startswith("lab" + os.sep)]
        print(f"{name:40} {len(found[name]):4} files: {len(library)} of the library, the rest of the laboratory")
        if arguments.list:
            print("".join(f"    {each}\n" for each in found[name]), end="")
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
