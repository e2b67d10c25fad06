"""`hebbian reproduce reuters`: news in the order of time, tested on the days of a crash.

A small, open stand-in for the paper's GigaWord experiment (section 4.3). Reuters-21578 trains on February to 17 June
1987, validates on 18 to 29 June and tests on 19 and 20 October 1987, the days of the stock market crash. Words first
seen late in training were seen a few times and not long ago, which is what the rule is for. Words first seen in June
are few, and 18 of the test text's words are among them: those of the last 90 days are shown beside them.
"""

from collections.abc import Sequence
from datetime import date, timedelta
from typing import Any

from hebbian_softmax.lab.base.errors import LabError
from hebbian_softmax.lab.data.corpus import Corpus
from hebbian_softmax.lab.data.dated import Options, parse_days
from hebbian_softmax.lab.language.experiments.memories import MemorySettings, measures
from hebbian_softmax.lab.language.experiments.memory_tables import memory_tables
from hebbian_softmax.lab.language.experiments.presentation import Presented, present_all
from hebbian_softmax.lab.language.experiments.reproduction import Reproduction
from hebbian_softmax.lab.language.experiments.tables import frequency_table, set_table
from hebbian_softmax.lab.language.experiments.trials import Outcome, WordSets

MONTH, DAYS = "last month", "last 90 days"
"""The sets of words by when training first meets them."""
CRASH = Options().test


def first_days_of(corpus_settings: Any) -> dict[str, date]:
    """From which day on a word is new, for each set: the month in which training ends, and its last 90 days."""
    last = parse_days(corpus_settings["train"])[1]
    return {MONTH: last.replace(day=1), DAYS: last - timedelta(days=89)}


def new_words(corpus: Corpus) -> WordSets:
    """The words of the vocabulary that training first meets late."""
    if "first_days" not in corpus.arrays or "train" not in corpus.settings:
        raise LabError(f"{corpus.path} has no dates: give --corpus reuters, or one of hebbian data prepare dated")
    seen = corpus.arrays["first_days"]
    return {name: seen >= day.toordinal() for name, day in first_days_of(corpus.settings).items()}


def in_words(corpus_settings: Any) -> str:
    """The days of the splits."""
    days = {split: parse_days(corpus_settings[split]) for split in ("train", "valid", "test")}
    spans = {split: f"{first.isoformat()} to {last.isoformat()}" for split, (first, last) in days.items()}
    crash = ", the days of the stock market crash" if days["test"] == CRASH else ""
    return (
        f"News in the order of time: trained on {spans['train']}, validated on {spans['valid']}, tested on "
        f"{spans['test']}{crash}."
    )


def present(outcomes: Sequence[Outcome]) -> Presented:
    settings = outcomes[0].corpus["settings"]
    since = first_days_of(settings)
    tables = [
        set_table(outcomes, MONTH, f"new in {since[MONTH]:%B}", f"words first seen in {since[MONTH]:%B %Y}"),
        set_table(outcomes, DAYS, "new", f"words first seen since {since[DAYS].isoformat()}, in the last 90 days"),
        frequency_table(outcomes),
        *memory_tables(outcomes),
    ]
    return present_all(outcomes, "News in the order of time", tables, [in_words(settings)])


REPRODUCTIONS = [
    Reproduction(
        name="reuters",
        help="news of 1987 in the order of time, tested on the October crash, a stand-in for section 4.3",
        corpus="reuters",
        epochs=10,
        present=present,
        sets=new_words,
        more=measures,
        own=MemorySettings,
    )
]
RECIPES = [reproduction.recipe() for reproduction in REPRODUCTIONS]
