"""`hebbian evaluate RUN`: the perplexity of trained models in one stream with carried state, alone or with memories."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from hebbian_softmax.lab.base.devices import choose_device
from hebbian_softmax.lab.base.files import write_atomic
from hebbian_softmax.lab.base.runs import open_run, to_json
from hebbian_softmax.lab.base.settings import choice, integer
from hebbian_softmax.lab.language.evaluation import as_plain, measure_all, tabulate, text_of, words_file
from hebbian_softmax.lab.language.memories import outcome
from hebbian_softmax.lab.language.memories.memory import Memories
from hebbian_softmax.lab.language.memories.settings import (
    add_memory_options,
    check_options,
    grids_of,
    kinds_of,
    memories_of,
    workspace_of,
)
from hebbian_softmax.lab.language.memories.sweep import MemoryRows, memory_rows, read_shown, score_rows
from hebbian_softmax.lab.language.memories.view import check_stretch
from hebbian_softmax.lab.language.names import TEXTS, ModelName
from hebbian_softmax.lab.language.settings import FINAL
from hebbian_softmax.lab.language.trained import Trained, load_trained
from hebbian_softmax.lab.report.figures import require_extras
from hebbian_softmax.lab.report.tables import as_text

FILE = "evaluation.json"
GRID_FILE = "memory-sweep.json"
FOLDER = "memories"  # in the run folder, for what a sweep has computed


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
    command.add_argument(
        "--split",
        metavar="TEXT",
        type=choice("valid", "test", "both"),
        default="both",
        help="valid, test or both (default)",
    )
    command.add_argument(
        "--streams",
        metavar="N",
        type=integer(1),
        default=1,
        help="parts of the text that are read side by side: faster, and a little off at the start of each part "
        "(default: 1, exact)",
    )
    command.add_argument(
        "--device", metavar="TEXT", type=choice("auto", "cpu", "cuda"), default="auto", help="auto, cpu or cuda"
    )
    command.add_argument("--quiet", action="store_true", help="show no progress")
    command.add_argument("--json", action="store_true", help="print the numbers as JSON")
    add_memory_options(command)
    command.set_defaults(execute=evaluate)


def evaluate(arguments: argparse.Namespace) -> int:
    """Measure the models of a run, write the results to its folder, and print them."""
    check_options(arguments)
    with_memories = bool(memories_of(arguments).used) or arguments.sweep
    if with_memories:
        grids_of(arguments)  # faulty grids are refused before anything is loaded
        require_extras()
    run = open_run(arguments.run)
    splits = FINAL.get(arguments.split, (arguments.split,))
    with run.held():
        trained = load_trained(run, device=choose_device(arguments.device), quiet=arguments.quiet)
        if with_memories:
            return evaluate_memories(trained, arguments, splits)
        scores = measure_all(
            trained.models, trained.corpus, splits, run, streams=arguments.streams, quiet=arguments.quiet
        )
        found = {"step": trained.step, "streams": arguments.streams, "scores": as_plain(scores)}
        write_atomic(run.path / FILE, (to_json(found, indent=2) + "\n").encode())
    if arguments.json:
        print(to_json({"run": str(run.path), **found}, indent=2))
        return 0
    for table in tabulate(scores, trained.corpus):
        print(as_text(table), end="\n\n")
    files = [words_file(name, split) for name in scores for split in splits]
    print(f"After step {trained.step:,}. Losses of single words: {', '.join(str(run.path / file) for file in files)}")
    return 0


def measure_with(
    trained: Trained, memories: Memories, splits: Sequence[str], quiet: bool
) -> dict[ModelName, MemoryRows]:
    """Measure every model with the memories given, adding one after the other."""
    rows = [Memories(memories.used[:count]) for count in range(len(memories.used) + 1)]
    measured = {}
    for name, model in trained.models.items():
        parts = {}
        for split in splits:
            label = f"{name.title} with memories, {TEXTS[split]} text"
            parts[split] = read_shown(model, text_of(trained.corpus, split), memories, label, quiet)
        measured[name] = MemoryRows(score_rows(trained.corpus, rows, parts), parts)
    return measured


def sweep_all(trained: Trained, arguments: argparse.Namespace, splits: Sequence[str]) -> dict[ModelName, MemoryRows]:
    """Measure every model with memories whose settings are chosen for it."""
    return {
        name: memory_rows(
            model,
            trained.corpus,
            grids=grids_of(arguments),
            kinds=kinds_of(arguments),
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
    """Measure the models with memories, write the results to the run folder and its page, and print them."""
    run, corpus = trained.run, trained.corpus
    if arguments.words is not None:
        check_stretch(arguments.words, len(text_of(corpus, splits[-1])) - 1)
    if arguments.sweep:
        measured = sweep_all(trained, arguments, splits)
    else:
        measured = measure_with(trained, memories_of(arguments), splits, arguments.quiet)
    files, pictures = [], {}
    for name, found in measured.items():
        file, figure, image = outcome.keep_view(run, name, found, corpus, arguments.words)
        files += [*outcome.keep_words(run, name, found, corpus), file, figure.file]
        pictures[figure] = image
    if arguments.sweep:
        grids = {name.key: found.sweep for name, found in measured.items()}
        content = {"step": trained.step, "models": {key: each.as_plain() for key, each in grids.items() if each}}
        write_atomic(run.path / GRID_FILE, (to_json(content, indent=2) + "\n").encode())
        files.append(GRID_FILE)
    notes = outcome.sentences(measured)
    report = {"step": trained.step, "streams": 1, "memories": outcome.as_json(measured), "notes": notes}
    write_atomic(run.path / FILE, (to_json(report, indent=2) + "\n").encode())
    tables = outcome.tabulate(measured, corpus)
    on_page = outcome.show_on_page(run, tables, pictures)
    if arguments.json:
        print(to_json({"run": str(run.path), **report}, indent=2))
        return 0
    for table in tables:
        print(as_text(table), end="\n\n")
    print("\n".join(notes), end="\n\n")
    print(f"After step {trained.step:,}. Files in {run.path}: {', '.join(files)}")
    if on_page:
        print(f"Page: {run.path / 'page.html'}")
    return 0
