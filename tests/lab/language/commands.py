"""Calls of the command `hebbian` with small language models."""

from pathlib import Path

from hebbian_softmax.lab.base.runs import Run, open_run
from hebbian_softmax.lab.cli import main

SIZES = (
    "--hidden 8 --embedding 6 --batch 4 --sequence 5 --device cpu --tensorboard no --warmup 2 --valid-streams 4 "
    "--start 0"  # these trainings end before features have settled
)
FEW = f"{SIZES} --steps 12 --evaluations 3".split()
MANY = f"{SIZES} --steps 30 --evaluations 3 --deterministic --checkpoint-seconds 0.2".split()


def call(*arguments: str | Path) -> int:
    """Return the exit code, even if argparse exits by itself."""
    try:
        return main([str(argument) for argument in arguments])
    except SystemExit as stop:
        return int(stop.code or 0)


def only(runs: Path) -> Run:
    """Return the one run in a folder."""
    (path,) = runs.iterdir()
    return open_run(path)
