"""`hebbian reproduce omniglot`: section 4.1 and its appendix, with tuning, ten seeds, and what the paper left out.

Its parts consist of trials that are stored one by one as they finish:

tuning       learning rate, T and γ by steps to the target, on separate seeds, with equally many settings for each head;
             with --no-tune-rule only the learning rate, over the same values for both
main         both heads with the tuned settings: the paper's two figures on steps per level and on classes
paper-rate   both heads at the paper's learning rate, 8e-3
active-only  both heads with a softmax over the active classes only
seen-only    both heads with classes never seen left out of the softmax in training, and in checks, too
rates        plain softmax over learning rates: the paper's third figure
beyond       one table of the rule's variants and its rivals
"""

import argparse
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any

from hebbian_softmax.lab.base.console import program, quoted
from hebbian_softmax.lab.base.errors import LabError, OutOfTimeError
from hebbian_softmax.lab.base.json_files import to_json
from hebbian_softmax.lab.base.rule import (
    LITERAL_RULE,
    fade_setting,
    gamma_setting,
    limit_setting,
    number_of,
    rate_setting,
    start_setting,
    write_setting,
)
from hebbian_softmax.lab.base.runs import Run
from hebbian_softmax.lab.base.settings import choice, integer, multiple, number, positive, setting
from hebbian_softmax.lab.base.statistics import mean_and_spread
from hebbian_softmax.lab.images import omniglot
from hebbian_softmax.lab.images.compare import NAMES
from hebbian_softmax.lab.images.curriculum import CHECK_EVERY, History
from hebbian_softmax.lab.images.data import ImageSource
from hebbian_softmax.lab.images.fleet import Store, Trial, run_trials
from hebbian_softmax.lab.images.learner import Method
from hebbian_softmax.lab.images.tables import (
    draw_bands,
    draw_levels,
    draw_rates,
    spread_of,
    tabulate_milestones,
    tabulate_reached,
    tabulate_writes,
)
from hebbian_softmax.lab.report.recipe import Recipe
from hebbian_softmax.lab.report.result import Figure, Result
from hebbian_softmax.lab.report.tables import Cell, Table
from hebbian_softmax.rule import LIMIT

PARTS = ("tuning", "main", "paper-rate", "active-only", "seen-only", "rates", "beyond")
FIRST_TUNING_SEED = 1000
TRIALS = 27  # settings tried for each head
PAPER_RATE = 8e-3
PLAIN_RATE = 5e-3  # the best of 27 for plain softmax (results/omniglot)
RATES = (1e-4, 4e-4, 1e-3, 4e-3, 8e-3, 1.6e-2, 4e-2)  # those of the paper's figure on plain softmax's learning rate
SLOW = ("svm", "smax")  # objectives that no CUDA graph can hold
FIGURES = {
    "levels.png": "Training steps to complete each level, mean over seeds (the paper's figure on levels).",
    "classes.png": "Classes against training steps with bands of two standard deviations over seeds.",
    "rates.png": "Plain softmax for each learning rate: classes against steps, and classes at the end.",
}


def some_parts(text: str) -> str:
    """Parse `all` or names of parts with commas between them."""
    names = PARTS if text == "all" else text.split(",")
    if unknown := [name for name in names if name not in PARTS]:
        raise argparse.ArgumentTypeError(f"must be all or some of {','.join(PARTS)}, not {unknown[0]!r}")
    return text


@dataclass(frozen=True)
class Settings:
    """The options. Their defaults are the paper's scale."""

    seeds: int = setting(10, "number of seeds reported, from 0 on", integer(1, 1000))
    steps: int = setting(5000, f"training steps of a trial, a multiple of {CHECK_EVERY}", multiple(CHECK_EVERY))
    target: int = setting(200, "number of classes: the steps to reach it are tuned and compared", integer(31))
    tuning_seeds: int = setting(3, "number of seeds for tuning, other than those reported", integer(1, 1000))
    tuning_trials: int = setting(TRIALS, "number of settings tried for each head", integer(1, TRIALS))
    tune_rule: bool = setting(True, "let the part tuning choose γ and T, too, not only the learning rate", later=True)
    beyond_steps: int = setting(3000, "training steps in the part beyond, at most --steps", multiple(CHECK_EVERY))
    slow_seeds: int = setting(
        3, "number of seeds for the objectives svm and smax, which no CUDA graph can hold", integer(1, 1000)
    )
    learning_rate: float = setting(
        PLAIN_RATE, "learning rate of both heads where it is not tuned: plain softmax's best", positive, before=1e-3
    )
    write: str = write_setting()
    rate: str = rate_setting("recent", "paper")
    start: int | str = start_setting()
    fade: bool = fade_setting()
    gamma: float = gamma_setting("γ of the rule where it is not tuned", before=0.1)
    limit: int | str = limit_setting("T of the rule where it is not tuned", before=50)
    parts: str = setting("all", f"all, or some of {','.join(PARTS)}", some_parts)
    together: int = setting(30, "trials that run at a time on a GPU; on a CPU it is one per core", integer(1, 1000))
    budget: float = setting(0.0, "seconds after which to stop, to be resumed later; 0 for no limit", number(0))
    classes: int = setting(0, "number of classes that take part, 0 for all", integer(0, 100_000))
    filters: int = setting(64, "filters of each convolution, and features that the heads see", integer(1, 4096))
    device: str = setting("auto", "auto, cpu or cuda", choice("auto", "cpu", "cuda"))
    data_root: str = omniglot.data_root_setting()

    @property
    def plain(self) -> Method:
        """The plain head before it is tuned."""
        return Method(hebbian=False, learning_rate=self.learning_rate)

    @property
    def rule(self) -> Method:
        """The Hebbian head before it is tuned."""
        return Method(
            hebbian=True,
            learning_rate=self.learning_rate,
            gamma=self.gamma,
            limit=self.limit,
            rate=self.rate,
            scale=1.0 if self.write == "literal" else "match",
            write=self.write,
            start=self.start,
            fade=self.fade,
        )

    @property
    def chosen(self) -> tuple[str, ...]:
        """The parts to run, in their order."""
        return PARTS if self.parts == "all" else tuple(part for part in PARTS if part in self.parts.split(","))


Do = Callable[[str, Sequence[Trial]], dict[Trial, History]]
"""Runs the trials of a part, or finds them stored."""


def report(settings: Settings, do: Do) -> tuple[list[Table], dict[str, bytes], dict[str, Any], str]:
    """Run the chosen parts; return their tables, their figures, their numbers and the summary."""
    tables: list[Table] = []
    images: dict[str, bytes] = {}
    metrics: dict[str, Any] = {}
    words = ""
    methods = {"plain": settings.plain, "hebbian": settings.rule}
    if "tuning" in settings.chosen:
        methods, table = tune(settings, do)
        tables.append(table)
        words = f"Tuned on {settings.tuning_seeds} seeds: "
    words += "; ".join(f"{NAMES[name]} {described(method)}" for name, method in methods.items()) + ". "
    metrics["methods"] = {name: asdict(method) for name, method in methods.items()}

    def pair(part: str, **changes: Any) -> dict[str, list[Trial]]:
        """Return the trials of both heads by title, with the tuned settings except for `changes`."""
        return {
            NAMES[name]: seeded(f"{part}-{name}", replace(method, **changes), settings.seeds, settings.steps)
            for name, method in methods.items()
        }

    def add_table(title: str, groups: Mapping[str, Sequence[History]], steps: int) -> None:
        tables.append(tabulate_reached(title, groups, steps, settings.target))

    if "main" in settings.chosen:
        groups = run_groups(do, "main", pair("main"))
        tuned = "tuning" in settings.chosen
        how = "tuned" if tuned else f"not tuned, at a learning rate of {settings.learning_rate:g}"
        add_table(f"Both heads, {how}", groups, settings.steps)
        tables += [tabulate_milestones(groups), *tabulate_writes(groups)]
        images |= {"levels.png": draw_levels(groups), "classes.png": draw_bands(groups)}
        metrics["main"], sentence = compare(groups, settings)
        words += sentence
    for part, title, changes in (
        ("paper-rate", "Both at the paper's learning rate, 8e-3", {"learning_rate": PAPER_RATE}),
        ("active-only", "Both with a softmax over the active classes only", {"active_only": True}),
    ):
        if part in settings.chosen:
            groups = run_groups(do, part, pair(part, **changes))
            add_table(title, groups, settings.steps)
            metrics[part] = compare(groups, settings)[0]
    if "seen-only" in settings.chosen:
        trials = {
            f"{title}, {where}": each
            for where, checks in (("checks over all classes", False), ("checks without them, too", True))
            for title, each in pair(
                "seen-checks" if checks else "seen-only", seen_only=True, checks_seen_only=checks
            ).items()
        }
        groups = run_groups(do, "seen-only", trials)
        add_table("Both with classes never seen left out of the softmax", groups, settings.steps)
        tables += tabulate_writes(groups)
    if "rates" in settings.chosen:
        tried = {f"{rate:g}": Method(hebbian=False, learning_rate=rate) for rate in RATES}
        trials = {rate: seeded(f"rates-{rate}", each, settings.seeds, settings.steps) for rate, each in tried.items()}
        groups = run_groups(do, "rates", trials)
        add_table("Plain softmax by learning rate", groups, settings.steps)
        images["rates.png"] = draw_rates({float(rate): group for rate, group in groups.items()})
    if "beyond" in settings.chosen:
        steps = min(settings.beyond_steps, settings.steps)
        trials = {f"{title}, tuned": each for title, each in pair("main").items()}
        for short, (title, method) in beyond(methods["plain"], methods["hebbian"]).items():
            seeds = min(settings.seeds, settings.slow_seeds) if short in SLOW else settings.seeds
            trials[title] = seeded(f"beyond-{short}", method, seeds, steps)
        add_table("Beyond the paper, at the tuned settings", run_groups(do, "beyond", trials), steps)
    return tables, images, metrics, words.strip()


def seeded(name: str, method: Method, seeds: int, steps: int) -> list[Trial]:
    """Return the trials of one method from several seeds."""
    return [Trial(name, method, seed, steps) for seed in range(seeds)]


def run_groups(do: Do, part: str, trials: Mapping[str, Sequence[Trial]]) -> dict[str, list[History]]:
    """Return the histories of each group of trials; all groups run together."""
    histories = do(part, [trial for group in trials.values() for trial in group])
    return {title: [histories[trial] for trial in group] for title, group in trials.items()}


def tune(settings: Settings, do: Do) -> tuple[dict[str, Method], Table]:
    """Return the best settings of each head by steps to the target, and the table of everything tried."""
    methods = tried_settings(settings)
    seeds = range(FIRST_TUNING_SEED, FIRST_TUNING_SEED + settings.tuning_seeds)
    trials = {
        (name, method): [
            Trial(f"tuning-{name}-{number}", method, seed, settings.steps, settings.target) for seed in seeds
        ]
        for name, tried in methods.items()
        for number, method in enumerate(tried)
    }
    histories = do("tuning", [trial for group in trials.values() for trial in group])
    chosen: dict[str, Method] = {}
    rows: list[list[Cell]] = []
    for name, tried in methods.items():
        outcomes = {method: [histories[trial] for trial in trials[name, method]] for method in tried}
        chosen[name] = best(outcomes, settings.target, settings.steps)
        for method, group in outcomes.items():
            steps = ", ".join(
                "–" if (taken := each.steps_to(settings.target)) is None else f"{taken:,}" for each in group
            )
            mark = "chosen" if method == chosen[name] else ""
            reached = ", ".join(str(each.reached) for each in group)
            rows.append([f"{NAMES[name]}, {described(method)}", steps, reached, mark])
    columns = ["tried", f"steps to {settings.target} classes", "classes when stopped", ""]
    return chosen, Table(f"Tuning, seeds {seeds[0]} to {seeds[-1]}, {settings.steps:,} steps at most", columns, rows)


def compare(groups: Mapping[str, Sequence[History]], settings: Settings) -> tuple[dict[str, Any], str]:
    """Compare the steps to the target: the ratio of the means over seeds, and whether the 2σ ranges are apart."""
    taken = {name: [each.steps_to(settings.target) for each in groups[title]] for name, title in NAMES.items()}
    numbers: dict[str, Any] = {"target": settings.target, "steps": taken}
    known = {name: [step for step in steps if step is not None] for name, steps in taken.items()}
    if any(len(known[name]) < len(taken[name]) for name in NAMES):
        return numbers, f"Not every seed reached {settings.target} classes in {settings.steps:,} steps."
    (plain, plain_spread), (hebbian, hebbian_spread) = (mean_and_spread(known[name]) for name in NAMES)
    numbers["ratio"] = hebbian / plain
    numbers["apart"] = hebbian + 2 * hebbian_spread < plain - 2 * plain_spread
    return numbers, (
        f"To {settings.target} classes Hebbian softmax needed {spread_of(known['hebbian'])} steps, plain softmax "
        f"{spread_of(known['plain'])} (mean ± 2σ over {len(known['plain'])} seeds), a ratio of "
        f"{numbers['ratio']:.2f}; the ranges {'do not overlap' if numbers['apart'] else 'overlap'}."
    )


def tried_settings(settings: Settings) -> dict[str, list[Method]]:
    """Return the settings of each head that the part tuning tries, as many for one head as for the other."""
    plain = plain_settings(settings.tuning_trials)
    if settings.tune_rule:
        return {"plain": plain, "hebbian": hebbian_settings(settings.rule, settings.tuning_trials)}
    return {"plain": plain, "hebbian": [replace(settings.rule, learning_rate=each.learning_rate) for each in plain]}


def plain_settings(count: int = TRIALS) -> list[Method]:
    """Return `count` learning rates from 1e-4 to 4e-2, the paper's range: plain softmax has nothing else to tune."""
    ratio = (4e-2 / 1e-4) ** (1 / max(1, count - 1))
    return [Method(hebbian=False, learning_rate=float(f"{1e-4 * ratio**number:.2g}")) for number in range(count)]


def hebbian_settings(rule: Method, count: int = TRIALS) -> list[Method]:
    """Return up to 27 settings of a rule: learning rates that suit plain softmax, T, and γ.

    Writes across the mean bear larger γ than the paper's (results/study/images). In the recent rate γ acts only where a
    learning rate falls, and here it is constant; more learning rates are tried in its place.
    """
    recent = rule.rate == "recent"
    rates = [1e-3, 1.4e-3, 2e-3, 2.8e-3, 4e-3, 5.6e-3, 8e-3, 1.1e-2, 1.6e-2] if recent else [2e-3, 4e-3, 8e-3]
    limits: tuple[int | str, ...] = (30, "auto" if recent else 100, 300)
    gammas = [rule.gamma] if recent else [0.1, 0.2, 0.3] if rule.write == "across" else [0.05, 0.1, 0.25]
    grid = [
        replace(rule, learning_rate=rate, limit=limit, gamma=gamma)
        for rate, limit, gamma in product(rates, limits, gammas)
    ]
    return [grid[number * len(grid) // count] for number in range(min(count, len(grid)))]


def best(outcomes: Mapping[Method, Iterable[History]], target: int, most: int) -> Method:
    """Return the method with the fewest steps to `target` classes, averaged over seeds.

    A seed that does not get there counts as `most` steps. Among equals, the method that reached more classes wins.
    """

    def score(method: Method) -> tuple[float, float]:
        histories = list(outcomes[method])
        steps = mean_and_spread([most if (taken := each.steps_to(target)) is None else taken for each in histories])[0]
        return steps, -mean_and_spread([each.reached for each in histories])[0]

    return min(outcomes, key=score)


def beyond(plain: Method, hebbian: Method) -> dict[str, tuple[str, Method]]:
    """Return variants by short name: a title and the tuned settings with few things changed, not tuned again."""
    unlimited = 2**31 - 1
    at_once: dict[str, Any] = {"start": 0, "fade": False}
    variants = {
        "literal": ("the paper's literal rule, from the first step on", replace(hebbian, scale=1.0, **LITERAL_RULE)),
        "scale": ("literal write with a matched scale", replace(hebbian, scale="match", write="literal")),
        "center": ("centred write without a scale", replace(hebbian, scale=1.0, write="centred")),
        "centred": ("centred write with a matched scale", replace(hebbian, scale="match", write="centred")),
        "centred-at-once": (
            "centred write with a matched scale, from the first step on",
            replace(hebbian, scale="match", write="centred", **at_once),
        ),
        "at-once": (f"{hebbian.write} write, from the first step on", replace(hebbian, **at_once)),
        "constant": ("constant λ = γ, for ever", replace(hebbian, rate="constant")),
        "inverse": ("pure λ = 1/c, for ever", replace(hebbian, rate="inverse")),
        "rule-only": (
            "rule only, from the first step on: rows get no gradient, no T",
            replace(hebbian, train_rows=False, limit=unlimited, **at_once),
        ),
        "ip": ("inner objective IP", replace(hebbian, objective="ip")),
        "svm": ("inner objective SVM", replace(hebbian, objective="svm")),
        "smax": ("inner objective Smax", replace(hebbian, objective="smax")),
        "imprinting": (
            "weight imprinting: first activation, then gradients only",
            replace(hebbian, limit=1, **at_once),
        ),
        "class-means": ("plain softmax trained, answers by nearest class mean", replace(plain, class_means=True)),
        "head-rate": ("plain softmax, 10× learning rate of the head", replace(plain, head_rate=10.0)),
        "extra-steps": (
            f"plain softmax, 3 more steps on classes seen fewer than {number_of(hebbian.limit) or LIMIT} times",
            replace(plain, extra_steps=3, limit=hebbian.limit),
        ),
    }
    found: dict[Method, tuple[str, str]] = {hebbian: ("", "")}
    for short, (title, method) in variants.items():  # with other settings than the usual ones some are the same
        found.setdefault(method, (short, title))
    return {short: (title, method) for method, (short, title) in found.items() if method != hebbian}


def described(method: Method) -> str:
    """Return the tuned settings in words.

    >>> described(Method(hebbian=True))
    'learning rate 0.001, T auto, γ 0.2'
    """
    words = f"learning rate {method.learning_rate:g}"
    return f"{words}, T {method.limit}, γ {method.gamma:g}" if method.hebbian else words


@dataclass(frozen=True)
class Reproducing(Recipe):
    """`hebbian reproduce` on a set of images."""

    source: ImageSource

    def perform(self, run: Run, settings: Settings, quiet: bool) -> tuple[Result, dict[str, bytes]]:
        """Run all chosen parts, then make their tables and figures."""
        data = self.source.load(settings, quiet)
        store = Store(run.path / "trials")
        deadline = time.monotonic() + settings.budget if settings.budget else None
        scale: dict[str, Any] = {"classes": settings.classes or None, "filters": settings.filters}
        scale |= {"device": settings.device, "together": settings.together, "deadline": deadline}

        def do(part: str, trials: Sequence[Trial]) -> dict[Trial, History]:
            return run_trials(trials, store, data, label=part, quiet=quiet, **scale)

        try:
            tables, images, metrics, words = report(settings, do)
        except OutOfTimeError as error:
            raise LabError(
                f"the budget of {settings.budget:g} s is used up, {len(store.records())} trials are stored; "
                "go on with:",
                command=f"{program()} {self.command} --resume {quoted(run.path)}",
            ) from error
        result = Result(
            title=f"The {self.name.capitalize()} curriculum",
            summary=words,
            metrics={"data": data.identity, **metrics},
            tables=tables,
            figures=[Figure(name, caption) for name, caption in FIGURES.items() if name in images],
            next_steps=[f"hebbian compare {self.name}  # one seed, with live progress"],
        )
        return result, {**images, "trials.json": to_json(store.records()).encode()}


def reproducing(source: ImageSource) -> Reproducing:
    """Return the recipe that repeats the paper's experiments on a set of images."""
    return Reproducing(
        verb="reproduce",
        name=source.name,
        help="the image curriculum of section 4.1: tuning, ten seeds, three figures, and a table beyond the paper",
        description=(
            f"Re-runs the paper's image curriculum on {source.name.capitalize()} with both heads: tunes them on seeds "
            "of their own, then reports ten other seeds, the sweep over learning rates, and variants of the rule. "
            "Meant for a GPU; a stopped run goes on with --resume and keeps the trials that are finished."
        ),
        settings=Settings,
        source=source,
    )


RECIPES = [reproducing(omniglot.SOURCE)]
