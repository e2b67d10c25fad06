"""`hebbian reproduce reuters`: news in chronological order, tested on the days of a crash.

A small, open stand-in for the paper's GigaWord experiment (section 4.3). Reuters-21578 trains on February to 17 June
1987, validates on 18 to 29 June and tests on 19 and 20 October 1987, the days of the stock market crash. A word first
seen late in training was seen only a few times and recently, which is the case that the rule is made for. Few words
are first seen in June, and only 18 words of the test text are among them, so the words of the last 90 days are shown
beside them.
"""

from collections.abc import Mapping, Sequence
from datetime import date, timedelta
from typing import Any

from hebbian_softmax.lab.base.errors import LabError
from hebbian_softmax.lab.data.corpus import Corpus
from hebbian_softmax.lab.data.dated import Options, parse_days
from hebbian_softmax.lab.language.experiments.memories import WithMemories
from hebbian_softmax.lab.language.experiments.tables import frequency_table, memory_tables, set_table
from hebbian_softmax.lab.language.experiments.trials import Outcome, WordSets
from hebbian_softmax.lab.report.tables import Table

MONTH, DAYS = "last month", "last 90 days"
"""The sets of words, named by when training first meets them."""
CRASH = Options().test


class Reuters(WithMemories):
    """News in chronological order, with the perplexity of words that were new near the end of training."""

    name = "reuters"
    help = "news of 1987 in chronological order, tested on the October crash, a stand-in for section 4.3"
    title = "News in chronological order"
    corpus = "reuters"
    epochs = 10
    hint = ""

    def sets(self, corpus: Corpus) -> WordSets:
        if "first_days" not in corpus.arrays or "train" not in corpus.settings:
            raise LabError(
                f"{corpus.path} has no dates: give --corpus reuters, or a corpus made by hebbian data prepare dated"
            )
        seen = corpus.arrays["first_days"]
        return {name: seen >= day.toordinal() for name, day in first_days(corpus.settings).items()}

    def tables(self, outcomes: Sequence[Outcome]) -> list[Table]:
        since = first_days(outcomes[0].corpus["settings"])
        return [
            set_table(outcomes, MONTH, f"new in {since[MONTH]:%B}", f"words first seen in {since[MONTH]:%B %Y}"),
            set_table(outcomes, DAYS, "new", f"words first seen since {since[DAYS].isoformat()}, in the last 90 days"),
            frequency_table(outcomes),
            *memory_tables(outcomes),
        ]

    def remark(self, outcomes: Sequence[Outcome]) -> str:
        settings = outcomes[0].corpus["settings"]
        days = {split: parse_days(settings[split]) for split in ("train", "valid", "test")}
        spans = {split: f"{first.isoformat()} to {last.isoformat()}" for split, (first, last) in days.items()}
        crash = ", the days of the stock market crash" if days["test"] == CRASH else ""
        return (
            f"News in chronological order: trained on {spans['train']}, validated on {spans['valid']}, tested on "
            f"{spans['test']}{crash}."
        )


def first_days(corpus_settings: Mapping[str, Any]) -> dict[str, date]:
    """Return the first day of each set's period: the month in which training ends, and its last 90 days."""
    last = parse_days(corpus_settings["train"])[1]
    return {MONTH: last.replace(day=1), DAYS: last - timedelta(days=89)}


RECIPES = [Reuters()]
