"""`hebbian reproduce reuters`: news in the order of time, tested on the days of a crash.

A small, open stand-in for the paper's GigaWord experiment (section 4.3). Reuters-21578 trains on February to 17 June
1987, validates on 18 to 29 June and tests on 19 and 20 October 1987, the days of the stock market crash. Words first
seen in the last month of training are few and fresh, which is what the rule is for.
"""

from collections.abc import Sequence
from datetime import date
from typing import Any

from hebbian_softmax.lab.data.corpus import Corpus
from hebbian_softmax.lab.data.dated import Options, parse_days
from hebbian_softmax.lab.errors import LabError
from hebbian_softmax.lab.recipes.word_recipe import Presented, present_all
from hebbian_softmax.lab.recipes.word_reproductions import Reproduction
from hebbian_softmax.lab.recipes.word_tables import frequency_table, set_table
from hebbian_softmax.lab.recipes.word_trials import Outcome, WordSets

FRESH = "first seen in the last month of training"
CRASH = Options().test


def last_month(corpus_settings: Any) -> date:
    """The first day of the month in which training ends."""
    return parse_days(corpus_settings["train"])[1].replace(day=1)


def fresh_words(corpus: Corpus) -> WordSets:
    """The words of the vocabulary that training first meets in its last month."""
    if "first_days" not in corpus.arrays or "train" not in corpus.settings:
        raise LabError(f"{corpus.path} has no dates: give --corpus reuters, or one of hebbian data prepare dated")
    return {FRESH: corpus.arrays["first_days"] >= last_month(corpus.settings).toordinal()}


def in_words(corpus_settings: Any) -> str:
    """The days of the splits, and what is fresh."""
    days = {split: parse_days(corpus_settings[split]) for split in ("train", "valid", "test")}
    spans = {split: f"{first.isoformat()} to {last.isoformat()}" for split, (first, last) in days.items()}
    crash = ", the days of the stock market crash" if days["test"] == CRASH else ""
    return (
        f"News in the order of time: trained on {spans['train']}, validated on {spans['valid']}, tested on "
        f"{spans['test']}{crash}. Fresh words were first seen in {last_month(corpus_settings):%B %Y}."
    )


def present(outcomes: Sequence[Outcome]) -> Presented:
    tables = [set_table(outcomes, FRESH), frequency_table(outcomes)]
    return present_all(outcomes, "News in the order of time", tables, [in_words(outcomes[0].corpus["settings"])])


REPRODUCTIONS = [
    Reproduction(
        name="reuters",
        help="news of 1987 in the order of time, tested on the October crash, a stand-in for section 4.3",
        corpus="reuters",
        epochs=10,
        present=present,
        sets=fresh_words,
    )
]
