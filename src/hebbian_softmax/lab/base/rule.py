"""The settings of the Hebbian rule that several experiments have, and when a head began to write by itself.

The defaults are those of the library. Runs that were begun before there were these settings go on with what they did:
centred writes with the paper's rate from the first step on, which did not fade.
"""

from collections.abc import Callable
from typing import Any

from torch import nn

from hebbian_softmax import ConstantRate, HebbianSoftmax, InclusiveRate, InverseCountRate, PaperRate, RecentRate
from hebbian_softmax.checks import WRITES
from hebbian_softmax.lab.base.console import say
from hebbian_softmax.lab.base.settings import Former, boolean, choice, number, setting, whole_or_auto
from hebbian_softmax.rule import GAMMA, LIMIT, Rate

DEFAULT_GAMMA, DEFAULT_LIMIT, DEFAULT_RATE = GAMMA, "auto", "recent"
DEFAULT_WRITE, DEFAULT_START, DEFAULT_FADE = "across", "auto", True
"""The library's default rule."""
RULE_BEFORE: dict[str, Any] = {"write": "centred", "rate": "paper", "start": 0, "fade": False}
"""The rule of runs that do not name these settings."""
LITERAL_RULE: dict[str, Any] = {"write": "literal", "rate": "paper", "start": 0, "fade": False}
"""The paper's rule."""
SHORT = 300
"""A training of fewer steps may end before features have settled: that usually takes 100 to 250 steps."""
RATES: dict[str, Callable[[float, int | None], Rate]] = {
    "recent": RecentRate,
    "paper": lambda gamma, limit: PaperRate(gamma, LIMIT if limit is None else limit),
    "inclusive": lambda gamma, limit: InclusiveRate(gamma, LIMIT if limit is None else limit),
    "constant": lambda gamma, limit: ConstantRate(gamma, LIMIT if limit is None else limit),
    "inverse": lambda gamma, limit: InverseCountRate(LIMIT if limit is None else limit),
}
"""The rule's rate λ, made from γ and T; all of them end at T."""


def write_of_center(text: str) -> str:
    """Return the write that the setting `center` of older versions stood for.

    >>> write_of_center("yes"), write_of_center("False")
    ('centred', 'literal')
    """
    return "centred" if boolean(text) else "literal"


def gamma_setting(help: str = "γ of the Hebbian rule", before: float | None = None) -> Any:
    """Declare the setting `gamma`."""
    help += ": the least mixing rate, or how far the recent rate is raised where the learning rate falls"
    return setting(DEFAULT_GAMMA, help, number(0, 1), before=before)


def limit_setting(help: str = "T: classes seen so often are no longer written", before: int | None = None) -> Any:
    """Declare the setting `limit`."""
    usual = f"; auto: about {LIMIT}, more in long trainings, and at most the number of classes in short ones"
    return setting(DEFAULT_LIMIT, help + usual, whole_or_auto, before=before)


def number_of(limit: int | str) -> int | None:
    """Return T as the library takes it.

    >>> number_of(30), number_of("auto")
    (30, None)
    """
    return None if limit == "auto" else int(limit)


def make_rate(name: str, gamma: float, limit: int | str) -> Rate:
    """Return the rate λ that these settings describe."""
    return RATES[name](gamma, number_of(limit))


def rate_setting(*names: str) -> Any:
    """Declare the setting `rate`, a choice from these names."""
    meanings = {
        "recent": "the mean of a class's activations, in which later ones weigh more",
        "paper": "1/c, at least γ",
        "inclusive": "the paper's with a count that includes the batch",
        "constant": "γ",
        "inverse": "1/c",
    }
    listed = ", ".join(f"{name} ({meanings[name]})" for name in names)
    return setting(DEFAULT_RATE, f"the mixing rate λ: {listed}", choice(*names), before=RULE_BEFORE["rate"])


def write_setting(paper: str = "--write literal --rate paper --start 0 --no-fade") -> Any:
    """Declare the setting `write`; `paper` are the options that give the paper's rule."""
    return setting(
        DEFAULT_WRITE,
        "what the rule writes: activations as they are (literal), without their mean (centred), or only across it; "
        f"the paper's rule is {paper}",
        choice(*WRITES),
        before=RULE_BEFORE["write"],
        former=Former("center", write_of_center),
    )


def start_setting() -> Any:
    """Declare the setting `start`."""
    return setting(
        DEFAULT_START,
        "step from which the rule writes, or auto: once features have settled; it counts from the first step on",
        whole_or_auto,
        before=RULE_BEFORE["start"],
    )


def fade_setting() -> Any:
    """Declare the setting `fade`."""
    return setting(DEFAULT_FADE, "let what the rule writes fade with the learning rate", before=RULE_BEFORE["fade"])


def writing_began(head: nn.Module) -> int | None:
    """Return after how many steps a head began to write by itself; None if it has not, or was not to wait."""
    settling = head.settling if isinstance(head, HebbianSoftmax) else None
    began = -1 if settling is None else int(settling.began)
    return began if began > 0 else None


def say_when_it_began(start: int | str, began: int | None) -> str:
    """Return a sentence on when a head began to write, if it was to find that out by itself; else an empty one.

    >>> say_when_it_began("auto", 120)
    'Hebbian softmax began to write after 120 steps, when its features had settled. '
    >>> say_when_it_began(0, None)
    ''
    """
    if start != "auto":
        return ""
    if began is not None:
        return f"Hebbian softmax began to write after {began:,} steps, when its features had settled. "
    return (
        "Hebbian softmax has not written anything, because its features had not settled when training ended: it "
        "learned as plain softmax does. Train it longer: features usually settle after 100 to 250 steps. "
    )


def say_if_short(start: int | str, steps: int, quiet: bool) -> None:
    """Say before a training begins that it may be too short for a head that waits until features have settled."""
    if start == "auto" and steps < SHORT and not quiet:
        say(
            f"note: {steps:,} steps are planned, and the rule waits until features have settled, usually for 100 to "
            "250 steps: in a training this short it may write nothing, and then learns as plain softmax does"
        )


def newly_begun(head: nn.Module, step: int, every: int) -> int | None:
    """Return what `writing_began` does if that happened after the evaluation before this one, so that logs say it once.

    This evaluation is after step `step`, and there is one after every `every` steps.
    """
    began = writing_began(head)
    return began if began is not None and began > (step - 1) // every * every else None
