"""What the paper's tables say of language models (tables 1 and 2), to stand beside what is measured here."""

from collections.abc import Mapping
from dataclasses import dataclass

WIKITEXT_TABLE: Mapping[str, tuple[float | None, float | None]] = {
    "LSTM (Graves et al., 2014)": (None, 48.7),
    "Temporal CNN (Bai et al., 2018)": (None, 45.2),
    "Gated CNN (Dauphin et al., 2016)": (None, 37.2),
    "LSTM": (36.0, 36.4),
    "LSTM + Cache": (34.5, 34.8),
    "LSTM + Hebbian": (34.1, 34.3),
    "LSTM + Hebbian + Cache": (29.7, 29.9),
    "LSTM + Hebbian + Cache + MbPA": (29.0, 29.2),
}
"""Table 1: validation and test perplexity on WikiText-103."""


@dataclass(frozen=True)
class FrequencyRows:
    """Test perplexity by training frequency, in the order of `BUCKETS`, then of all words; as the paper writes it."""

    name: str
    softmax: tuple[str, str, str, str, str]
    hebbian: tuple[str, str, str, str, str]

    @property
    def totals(self) -> tuple[float, float]:
        """Of all words, plain and Hebbian."""
        return float(self.softmax[-1]), float(self.hebbian[-1])


FREQUENCY_TABLE: Mapping[str, FrequencyRows] = {
    "wikitext-103": FrequencyRows(
        "WikiText-103", ("12.1", "2.2e2", "1.2e3", "9.7e3", "36.4"), ("12.1", "1.8e2", "7.6e2", "5.2e3", "34.3")
    ),
    "gutenberg": FrequencyRows(
        "Gutenberg", ("19.0", "9.8e2", "6.9e3", "8.6e4", "47.9"), ("18.1", "9.4e2", "6.6e3", "5.9e4", "45.5")
    ),
    "gigaword": FrequencyRows(
        "GigaWord", ("39.4", "6.5e3", "3.7e4", "-", "53.5"), ("33.2", "3.2e3", "1.6e4", "-", "43.7")
    ),
}
"""Table 2."""
STAND_INS = {"wikitext-2": "wikitext-103", "reuters": "gigaword"}
"""Corpora that can be had, and the paper's that they are nearest to."""


def paper_rows(corpus: str) -> FrequencyRows | None:
    """The paper's numbers for a corpus by its name, or for the one it stands in for."""
    return FREQUENCY_TABLE.get(STAND_INS.get(corpus, corpus))
