"""`hebbian evaluate RUN`: the perplexity of trained models, in one stream with carried state."""

import argparse
from pathlib import Path

from hebbian_softmax.lab.base.devices import choose_device
from hebbian_softmax.lab.base.files import write_atomic
from hebbian_softmax.lab.base.runs import open_run, to_json
from hebbian_softmax.lab.base.settings import choice, integer
from hebbian_softmax.lab.language.evaluation import as_plain, measure_all, tabulate, words_file
from hebbian_softmax.lab.language.memories.command import FILE, evaluate_memories
from hebbian_softmax.lab.language.memories.options import add_memory_options, check_options, grids_of, memories_of
from hebbian_softmax.lab.language.settings import FINAL
from hebbian_softmax.lab.language.trained import load_trained
from hebbian_softmax.lab.report.figures import require_extras
from hebbian_softmax.lab.report.tables import as_text


def add_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    help = "measure the language models of a run: perplexity in all and by frequency"
    description = (
        "Reads the last checkpoint of a run of hebbian train or hebbian compare on a corpus, and measures every word "
        "of the validation or test text after all words before it; alone, or with the memories of evaluation time. "
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
        help="parts of the text read side by side: faster, and a little off at the start of each (default: 1, exact)",
    )
    command.add_argument(
        "--device", metavar="TEXT", type=choice("auto", "cpu", "cuda"), default="auto", help="auto, cpu or cuda"
    )
    command.add_argument("--quiet", action="store_true", help="no progress")
    command.add_argument("--json", action="store_true", help="print the numbers as JSON")
    add_memory_options(command)
    command.set_defaults(execute=evaluate)


def evaluate(arguments: argparse.Namespace) -> int:
    check_options(arguments)
    with_memories = memories_of(arguments) is not None or arguments.sweep
    if with_memories:
        grids_of(arguments)  # what is wrong with them is told before anything is loaded
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
