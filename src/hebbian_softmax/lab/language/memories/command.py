"""`hebbian evaluate RUN`: the perplexity of trained models in one stream with carried state, alone or with memories."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hebbian_softmax.lab.base.console import say, show
from hebbian_softmax.lab.base.devices import choose_device
from hebbian_softmax.lab.base.json_files import object_from_json, to_json, write_json
from hebbian_softmax.lab.base.runs import Run, open_run
from hebbian_softmax.lab.base.settings import choice, integer
from hebbian_softmax.lab.language.evaluation import as_plain, measure_all, tabulate, words_file
from hebbian_softmax.lab.language.memories import outcome
from hebbian_softmax.lab.language.memories.given import Reading, cost, measure_given
from hebbian_softmax.lab.language.memories.settings import (
    add_memory_options,
    check_options,
    chooses_size,
    grids_of,
    kinds_of,
    memories_of,
    workspace_of,
)
from hebbian_softmax.lab.language.memories.sweep import MemoryRows, memory_rows
from hebbian_softmax.lab.language.names import ModelName
from hebbian_softmax.lab.language.settings import FINAL
from hebbian_softmax.lab.language.trained import Trained, load_trained
from hebbian_softmax.lab.report.figures import require_extras
from hebbian_softmax.lab.report.tables import Table, for_stream

FILE = "evaluation.json"
GRID_FILE = "memory-sweep.json"
FOLDER = "memories"  # in the run folder, for what a sweep has computed


Found = tuple[dict[str, Any], list[Table], list[str], BaseException | None]
"""What was measured, for JSON, as tables, the lines to print below them, and the signal that has ended it, if any."""


def add_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `evaluate` to the command line."""
    help = "measure the language models of a run: perplexity in all and by frequency"
    description = (
        "Reads the last checkpoint of a run of hebbian train or hebbian compare on a corpus, and measures every word "
        "of the validation or test text after all words before it, with the model alone or with memories. "
        "Writes the loss of each word, and evaluation.json, to the run folder."
    )
    command = commands.add_parser("evaluate", help=help, description=description, allow_abbrev=False)
    command.add_argument("run", metavar="RUN", type=Path, help="a run folder, finished or not")
    splits = choice("valid", "test", "both")
    command.add_argument("--split", metavar="TEXT", type=splits, default="both", help="valid, test or both (default)")
    help = "parts of the text that are read side by side: faster, and a little off at the start of each part "
    help += "(default: 1, exact)"
    command.add_argument("--streams", metavar="N", type=integer(1), default=1, help=help)
    devices = choice("auto", "cpu", "cuda")
    command.add_argument("--device", metavar="TEXT", type=devices, default="auto", help="auto, cpu or cuda")
    command.add_argument("--quiet", action="store_true", help="show no progress")
    command.add_argument("--json", action="store_true", help="print the numbers as JSON")
    add_memory_options(command)
    command.set_defaults(execute=evaluate)


def evaluate(arguments: argparse.Namespace) -> int:
    """Measure the models of a run, write the results to its folder, and print them."""
    check_options(arguments)
    measure = measure_alone
    if memories_of(arguments).used or arguments.sweep:
        grids_of(arguments)  # faulty grids are refused before anything is loaded
        require_extras()
        measure = measure_memories
    run = open_run(arguments.run)
    splits = FINAL.get(arguments.split, (arguments.split,))
    with run.held():
        trained = load_trained(run, device=choose_device(arguments.device), quiet=arguments.quiet)
        numbers, tables, lines, stopped = measure(trained, arguments, splits)
        report = {"step": trained.step, "streams": arguments.streams, "stopped": stopped is not None, **numbers}
        if may_replace(run, stopped):
            write_json(run.path / FILE, report)
    if arguments.json:
        print(to_json({"run": str(run.path), **report}, indent=2))
    else:
        for table in tables:
            print(for_stream(table, sys.stdout), end="\n\n")
        show("\n".join(lines))
    if stopped is not None:
        sys.stdout.flush()
        raise stopped
    return 0


def may_replace(run: Run, stopped: BaseException | None) -> bool:
    """Return whether an evaluation may be written to the run folder: one that was stopped replaces no finished one."""
    if stopped is None:
        return True
    try:
        earlier = object_from_json((run.path / FILE).read_bytes())
    except (OSError, ValueError):  # there is none, or it is damaged
        return True
    return bool(earlier.get("stopped"))


def measure_alone(trained: Trained, arguments: argparse.Namespace, splits: Sequence[str]) -> Found:
    """Measure the models without memories."""
    run, options = trained.run, {"streams": arguments.streams, "quiet": arguments.quiet}
    scores = measure_all(trained.models, trained.corpus, splits, run, **options)
    files = [str(run.path / words_file(name, split)) for name in scores for split in splits]
    line = f"After step {trained.step:,}. Losses of single words: {', '.join(files)}"
    return {"scores": as_plain(scores)}, tabulate(scores, trained.corpus), [line], None


def measure_memories(trained: Trained, arguments: argparse.Namespace, splits: Sequence[str]) -> Found:
    """Measure the models with memories, and write words, pictures and grids to the run folder and its page."""
    run, corpus = trained.run, trained.corpus
    reading = Reading(corpus, splits, arguments.max_words, chooses_size(arguments), arguments.quiet)
    if arguments.words is not None:
        outcome.check_stretch(arguments.words, len(reading.text(splits[-1])) - 1)
    if not arguments.sweep and not arguments.quiet:
        say("Measuring how long the reading will take …")
        say(cost(trained.models, memories_of(arguments), reading))
    measured: dict[ModelName, MemoryRows] = {}
    for name, model in trained.models.items():
        if any(found.stopped for found in measured.values()):
            break
        if arguments.sweep:
            options: dict[str, Any] = {"splits": splits, "label": name.title, "quiet": arguments.quiet}
            options |= {"grids": grids_of(arguments), "kinds": kinds_of(arguments), "prefix": name.file_prefix}
            options |= {"folder": run.path / FOLDER, "workspace": workspace_of(arguments)}
            measured[name] = memory_rows(model, corpus, **options)
        else:
            measured[name] = measure_given(model, memories_of(arguments), reading, name.title)
    notes, tables = outcome.sentences(measured), outcome.tabulate(measured, corpus)
    plain = {name.key: [row.as_plain() for row in found.rows] for name, found in measured.items()}
    numbers = {"memories": plain, "notes": notes}
    stopped = next((found.stopped for found in measured.values() if found.stopped), None)
    unread = [name.title for name in trained.models if name not in measured]
    notes += [f"The reading was stopped before {title}, so nothing is known of it." for title in unread]
    if not may_replace(run, stopped):
        line = f"This was stopped, so it is not kept: {run.path} has an earlier evaluation that was finished."
        return numbers, tables, [*notes, "", line], stopped
    files, pictures = [], {}
    for name, found in measured.items():
        file, figure, image = outcome.keep_view(run, name, found, corpus, arguments.words)
        files += [*outcome.keep_words(run, name, found, corpus), file, figure.file]
        pictures[figure] = image
    if arguments.sweep:
        grids = {name.key: found.sweep.as_plain() for name, found in measured.items() if found.sweep}
        content = {"step": trained.step, "models": grids}
        write_json(run.path / GRID_FILE, content)
        files.append(GRID_FILE)
    lines = [*notes, "", f"After step {trained.step:,}. Files in {run.path}: {', '.join(files)}"]
    if outcome.show_on_page(run, [*tables, outcome.settings_table(measured)], pictures):
        lines.append(f"Page: {run.path / 'page.html'}")
    return numbers, tables, lines, stopped
