"""`hebbian train CORPUS` and `hebbian compare CORPUS`: the paper's language models (sections 4.2 to 4.4).

`train` trains one model; `compare` trains the same model with a plain and with a Hebbian softmax, from the same
weights, on the same batches with the same dropout, for the same number of steps.
"""

import argparse
import json
import math
import os
import re
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from hebbian_softmax.lab.base.devices import choose_device
from hebbian_softmax.lab.base.errors import LabError
from hebbian_softmax.lab.base.ranks import Ranks, current_ranks, joined
from hebbian_softmax.lab.base.runs import Run, open_run
from hebbian_softmax.lab.base.settings import as_options, from_values, given_options
from hebbian_softmax.lab.base.training import Interrupted, train
from hebbian_softmax.lab.language.board import board
from hebbian_softmax.lab.language.deterministic import deterministic
from hebbian_softmax.lab.language.evaluation import Score
from hebbian_softmax.lab.language.names import HEBBIAN, ONLY, PLAIN, ModelName
from hebbian_softmax.lab.language.outcome import TEXTS, as_plain, draw, measure_all, tabulate
from hebbian_softmax.lab.language.plan import make_plan
from hebbian_softmax.lab.language.progress import WordsProgress
from hebbian_softmax.lab.language.report.curves import CAPTION
from hebbian_softmax.lab.language.settings import FINAL, Settings, TrainSettings
from hebbian_softmax.lab.language.source import CORPORA, FOLDER, heads_of, load, settings_type
from hebbian_softmax.lab.language.task import WordTask, make_windows
from hebbian_softmax.lab.recipe import Recipe
from hebbian_softmax.lab.report.result import Figure, Result, load_result


def train_and_measure(name: str, run: Run, settings: Settings, quiet: bool) -> tuple[Result, dict[str, bytes]]:
    """Settle the number of steps, train, measure."""
    began = time.monotonic()
    device = choose_device(settings.device)
    corpus = load(name, settings, quiet)
    heads = heads_of(settings)

    def make_task(steps: int) -> WordTask:
        return WordTask(corpus, settings, heads, steps=steps, device=device)

    with deterministic(settings.deterministic == "yes"), board(run, settings.tensorboard) as logged:
        plan = make_plan(run, settings, make_windows(corpus, settings, "cpu"), make_task, began)
        task, steps = make_task(plan.steps), plan.steps
        plan.keep(run)  # now that all is known to fit together
        seconds = train(
            task,
            run,
            steps=steps,
            evaluate_every=-(-steps // settings.evaluations),
            checkpoint_seconds=settings.checkpoint_seconds,
            label=name,
            quiet=quiet,
            show=partial(WordsProgress, step_words=task.step_words),
            logged=logged,
        )
        models = {model: learner.model for model, learner in task.learners.items()}
        scores = measure_all(models, corpus, FINAL[settings.final], run, quiet=quiet or not current_ranks().first)
    records = run.records()
    result = Result(
        title=f"{'A language model' if len(heads) == 1 else 'Plain and Hebbian softmax'} on {corpus.name}",
        summary=summarize(scores, task, seconds, records[-1] if records else {}),
        metrics={
            "corpus": {"name": corpus.name, "fingerprint": corpus.fingerprint, "vocabulary": len(corpus.words)},
            "steps": steps,
            "words": steps * task.step_words,
            "processes": current_ranks().count,
            "seconds": seconds,
            "scores": as_plain(scores),
            "last_record": records[-1] if records else None,
        },
        tables=tabulate(scores, corpus),
        figures=[Figure("perplexity.png", CAPTION)],
        next_steps=suggest(name, settings, steps),
    )
    return result, {"perplexity.png": draw(records, list(heads))}


def summarize(
    scores: Mapping[ModelName, Mapping[str, Score]], task: WordTask, seconds: float, last: Mapping[str, Any]
) -> str:
    """What was seen, in plain sentences, whichever side it favours."""
    words = f"{task.steps:,} steps of {task.step_words:,} words"
    words += f", {task.steps / task.windows.epoch_steps:.2g} epochs of the text"
    if ONLY in scores:
        kind = "Hebbian" if task.learners[ONLY].model.memorizes else "plain"
        sentences = [f"A {kind} softmax, trained for {words}, in {seconds:.0f} s."]
        sentences += [
            f"Perplexity {each.perplexity:.2f} on the {TEXTS[split]} text." for split, each in scores[ONLY].items()
        ]
    else:
        sentences = [f"Both were trained for {words}."]
        for split, plain in scores[PLAIN].items():
            hebbian = scores[HEBBIAN][split]
            sentences.append(
                f"Perplexity on the {TEXTS[split]} text: plain softmax {plain.perplexity:.2f}, "
                f"Hebbian softmax {hebbian.perplexity:.2f}; {_of_rarest(plain, hebbian)}."
            )
    if not any(scores.values()):
        values = {name: f"{last.get(f'{name.log_prefix}valid_perplexity', math.nan):.2f}" for name in scores}
        seen = [value if name == ONLY else f"{name.title} {value}" for name, value in values.items()]
        sentences.append(f"Validation perplexity in the last record of the log: {', '.join(seen)}.")
    return " ".join([*sentences, "This is one seed."])


def _of_rarest(plain: Score, hebbian: Score) -> str:
    for bucket in reversed(plain.bucket_perplexity):
        one, other = plain.bucket_perplexity[bucket], hebbian.bucket_perplexity[bucket]
        if one is not None and other is not None:
            return f"on words seen {bucket} times in training {one:,.0f} and {other:,.0f}"
    raise ValueError("no words")


def suggest(name: str, settings: Settings, steps: int) -> list[str]:
    """Commands worth trying next; what they do not vary stays as it was in this run of `steps` steps."""
    verb = "train" if isinstance(settings, TrainSettings) else "compare"
    variations = [(replace(settings, seed=(settings.seed + 1) % 2**32), "other first weights, another order")]
    if isinstance(settings, TrainSettings) and settings.head == "plain":  # which the rule's options do not change
        variations.append((replace(settings, head="hebbian"), "the same with a Hebbian softmax"))
    else:
        literal = replace(settings, rule_scale="1", center="no", rate="paper")
        later = replace(settings, start=min(500, steps // 4))
        variations += [
            (literal, "the paper's literal rule"),
            (later, "memorise once the activations have settled"),
        ]
    return [
        f"{' '.join([f'hebbian {verb} {name}', *as_options(varied)])}  # {remark}"
        for varied, remark in variations
        if varied != settings
    ]


class WordsRecipe(Recipe):
    """A recipe that several processes can carry out together, as torchrun starts them."""

    def execute(self, arguments: argparse.Namespace) -> int:
        with joined(arguments.device or "auto") as ranks:
            return super().execute(arguments) if ranks.first else self._follow(ranks)

    def perform(self, run: Run, settings: Settings, quiet: bool) -> tuple[Result, dict[str, bytes]]:
        return train_and_measure(self.name, run, settings, quiet)

    def folder_name(self, settings: Any) -> str:
        """The corpus's, which for one's own is its name or that of its folder, whatever the name is linked to here."""
        return Path(os.path.abspath(settings.corpus)).name or self.name if self.name == FOLDER else self.name

    def _open(self, arguments: argparse.Namespace) -> tuple[Run, Any]:
        """Open the run and tell the other ranks where it is, or that there is none."""
        path = None
        try:
            given = given_options(arguments, self.settings)
            if arguments.resume is None and "steps" in given and "max_seconds" in given:
                raise LabError("--steps and --max-seconds both say how long to train: give one of them")
            run, settings = super()._open(arguments)
            path = str(run.path.absolute())
        finally:
            current_ranks().shared(json.dumps(path))
        return run, settings

    def _follow(self, ranks: Ranks) -> int:
        """The part of a rank that writes nothing: the run is the first rank's."""
        path = json.loads(ranks.shared(None))
        if path is None:
            return 1
        run = open_run(Path(path))
        if load_result(run) is None:
            try:
                self.perform(run, from_values(self.settings, run.settings), True)
            except Interrupted as stop:
                return 128 + stop.signum
        return 0


WHAT = {
    "train": "Trains an LSTM language model with a Hebbian or a plain softmax on",
    "compare": "Trains the same LSTM language model twice, with a plain and with a Hebbian softmax, on",
}
RECIPES = [
    WordsRecipe(
        verb=verb,
        name=name,
        help=help,
        description=f"{what} {re.split('[;:]', help)[0]}. See docs/language-models.md.",
        settings=settings_type(verb, name),
    )
    for verb, what in WHAT.items()
    for name, help in CORPORA.items()
]
