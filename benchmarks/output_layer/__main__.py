"""Forward and backward pass of the output layer's loss, ours against torch and other packages: one table, and JSON.

    python -m benchmarks.output_layer                                          # small shapes on this CPU
    PYTHONPATH=src:peers python -m benchmarks.output_layer --device cuda --json h200.json

eq TFLOP/s is 6·N·d·V over the time: three matrix products, which every exact computation needs. Contenders take turns,
and so do plain matrix products that last as long as the problem; "% of best" is relative to the best rate of these.
Extra memory does not include the returned gradients; a step returns none, so there it includes them. Errors are
relative to float64. On a CPU one thread is used by default, because on a busy machine several threads mostly wait for a
core. The promises are checked by ``python -m benchmarks.output_layer.bars`` over the JSON files of several runs.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.output_layer import bars, problems, report
from benchmarks.output_layer.session import PARTS, Session, run_cpu, run_full


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.output_layer", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--shapes", help="only these shapes, for example A,B (CUDA) or 1,2 (CPU)")
    parser.add_argument("--only", help="only contenders whose name contains one of these words, for example ours,liger")
    parser.add_argument("--without", help="leave out contenders whose name contains one of these words")
    parser.add_argument("--parts", default=",".join(PARTS), help=f"of the full run on CUDA: {', '.join(PARTS)}")
    parser.add_argument("--seconds", type=float, default=1.0, help="seconds for each contender (default 1)")
    parser.add_argument("--no-compile", action="store_true", help="leave out torch.compile")
    parser.add_argument("--budget", type=float, help="seconds after which the rest is skipped (default on CUDA: 440)")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (default 1)")
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    parser.add_argument("--commit", help="commit to name in the record (default: that of git)")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to see whether everything runs")
    return parser.parse_args(arguments)


def command_line(arguments: list[str]) -> str:
    """Return the command line without the folders of this machine."""
    return " ".join(["python -m benchmarks.output_layer", *(Path(a).name if "/" in a else a for a in arguments)])


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    if options.device == "cpu":
        torch.set_num_threads(options.threads)
    torch.backends.cuda.matmul.allow_tf32 = False
    device, quick = options.device, options.quick
    if device == "cuda":
        gc.freeze()  # Imported objects stay alive, so collecting between contenders is fast.
    specs = problems.QUICK if quick else problems.CUDA if device == "cuda" else problems.CPU
    if options.shapes:
        names = options.shapes.split(",")
        unknown = set(names) - {spec.name for spec in specs}
        if unknown:
            raise SystemExit(f"--shapes: unknown {', '.join(sorted(unknown))}; use {', '.join(s.name for s in specs)}")
        specs = [spec for spec in specs if spec.name in names]

    head = report.header(device, options.commit, command_line(sys.argv[1:] if arguments is None else arguments))
    print("\n".join(f"{key}: {value}" for key, value in head.items() if value is not None), flush=True)
    budget = options.budget if options.budget is not None else 440.0 if device == "cuda" else None
    only = options.only.split(",") if options.only else None
    parts = options.parts.split(",")
    if set(parts) - set(PARTS):
        raise SystemExit(f"--parts: unknown {', '.join(sorted(set(parts) - set(PARTS)))}; use {', '.join(PARTS)}")
    without = options.without.split(",") if options.without else None
    session = Session(device, budget, only, without, seconds=0.01 if quick else options.seconds)

    def checked() -> list[bars.Bar]:
        return bars.check([session.entries]) if device == "cuda" and not quick else []

    def save() -> None:
        record: dict[str, Any] = head | {
            "seconds": round(session.spent(), 1),
            "mean_target_probability": {s.title(): p for s, p in session.target_probabilities.items()},
            "entries": [report.record_of(entry, session.entries) for entry in session.entries],
            "bars": [vars(bar) for bar in checked()],
        }
        if options.json:
            options.json.write_text(json.dumps(record, indent=1) + "\n")

    session.after_part = save
    if device == "cpu" and not quick:
        run_cpu(session, specs, not options.no_compile)
    else:
        run_full(session, specs, parts, compiles=device == "cuda" and not options.no_compile)
    save()
    print("\n" + report.table(session.entries, session.target_probabilities))
    if listed := report.kernels(session.entries):
        print("\n" + listed)
    if checked():
        print("\n" + "\n".join(bar.line() for bar in checked()))
    print(f"\n{session.spent():.0f} s")


if __name__ == "__main__":
    main()
