"""`hebbian evaluate RUN --cache --mbpa` and `--sweep`."""

import argparse
from collections.abc import Sequence

from hebbian_softmax.lab.base.files import write_atomic
from hebbian_softmax.lab.base.runs import to_json
from hebbian_softmax.lab.language.evaluation import text_of
from hebbian_softmax.lab.language.memories.options import grids_of, memories_of, workspace_of
from hebbian_softmax.lab.language.memories.outcome import (
    Measured,
    as_json,
    keep_view,
    keep_words,
    sentences,
    show_on_page,
    tabulate,
)
from hebbian_softmax.lab.language.memories.reading import Memories
from hebbian_softmax.lab.language.memories.rows import ALONE, MemoryRows, memory_rows, read_shown, score_rows
from hebbian_softmax.lab.language.memories.view import check_stretch
from hebbian_softmax.lab.language.names import TEXTS, ModelName
from hebbian_softmax.lab.language.trained import Trained
from hebbian_softmax.lab.report.tables import as_text

FILE = "evaluation.json"
GRID_FILE = "memory-sweep.json"
FOLDER = "memories"  # in the run folder: parts of a sweep


def measure_with(
    trained: Trained, memories: Memories, splits: Sequence[str], quiet: bool
) -> dict[ModelName, MemoryRows]:
    """Every model with the memories as they are given."""
    cached = Memories(memories.cache, None)
    rows = list(dict.fromkeys([ALONE, cached, memories]))  # without those that would be the same
    measured = {}
    for name, model in trained.models.items():
        parts = {}
        for split in splits:
            label = f"{name.title} with memories, {TEXTS[split]} text"
            parts[split] = read_shown(model, text_of(trained.corpus, split), memories, label, quiet)
        measured[name] = MemoryRows(score_rows(trained.corpus, rows, parts), parts)
    return measured


def sweep_all(trained: Trained, arguments: argparse.Namespace, splits: Sequence[str]) -> dict[ModelName, MemoryRows]:
    """Every model with memories that suit it."""
    return {
        name: memory_rows(
            model,
            trained.corpus,
            grids=grids_of(arguments),
            mbpa=arguments.mbpa or not arguments.cache,
            splits=splits,
            folder=trained.run.path / FOLDER,
            prefix=name.file_prefix,
            workspace=workspace_of(arguments),
            label=name.title,
            quiet=arguments.quiet,
        )
        for name, model in trained.models.items()
    }


def evaluate_memories(trained: Trained, arguments: argparse.Namespace, splits: Sequence[str]) -> int:
    """Measure, write, show."""
    run, corpus = trained.run, trained.corpus
    if arguments.words is not None:
        check_stretch(arguments.words, len(text_of(corpus, splits[-1])) - 1)
    if arguments.sweep:
        measured: Measured = sweep_all(trained, arguments, splits)
    else:
        memories = memories_of(arguments)
        assert memories is not None
        measured = measure_with(trained, memories, splits, arguments.quiet)
    files, pictures = [], {}
    for name, found in measured.items():
        file, figure, image = keep_view(run, name, found, corpus, arguments.words)
        files += [*keep_words(run, name, found, corpus), file, figure.file]
        pictures[figure] = image
    if arguments.sweep:
        grids = {name.key: found.sweep for name, found in measured.items()}
        content = {"step": trained.step, "models": {key: each.as_plain() for key, each in grids.items() if each}}
        write_atomic(run.path / GRID_FILE, (to_json(content, indent=2) + "\n").encode())
        files.append(GRID_FILE)
    report = {"step": trained.step, "streams": 1, "memories": as_json(measured), "notes": sentences(measured)}
    write_atomic(run.path / FILE, (to_json(report, indent=2) + "\n").encode())
    tables = tabulate(measured, corpus)
    on_page = show_on_page(run, tables, pictures)
    if arguments.json:
        print(to_json({"run": str(run.path), **report}, indent=2))
        return 0
    for table in tables:
        print(as_text(table), end="\n\n")
    print("\n".join(sentences(measured)), end="\n\n")
    print(f"After step {trained.step:,}. Files in {run.path}: {', '.join(files)}")
    if on_page:
        print(f"Page: {run.path / 'page.html'}")
    return 0
