"""The numbers for language models in the paper's tables 1 and 2, shown beside those measured here."""

from collections.abc import Mapping, Sequence

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
ALL = "all"
COLUMNS = (">10K", "1K–10K", "100–1K", "<100", ALL)
"""The columns of table 2: frequency buckets by their names in `BUCKETS`, then all words."""


def _rows(corpus: str, *rows: Sequence[str]) -> dict[str, dict[str, str]]:
    titles = (f"paper, {corpus}, softmax", f"paper, {corpus}, Hebbian softmax")
    return {title: dict(zip(COLUMNS, row, strict=True)) for title, row in zip(titles, rows, strict=True)}


FREQUENCY_TABLE: Mapping[str, Mapping[str, Mapping[str, str]]] = {
    "wikitext-103": _rows(
        "WikiText-103", ("12.1", "2.2e2", "1.2e3", "9.7e3", "36.4"), ("12.1", "1.8e2", "7.6e2", "5.2e3", "34.3")
    ),
    "gutenberg": _rows(
        "Gutenberg", ("19.0", "9.8e2", "6.9e3", "8.6e4", "47.9"), ("18.1", "9.4e2", "6.6e3", "5.9e4", "45.5")
    ),
    "gigaword": _rows("GigaWord", ("39.4", "6.5e3", "3.7e4", "-", "53.5"), ("33.2", "3.2e3", "1.6e4", "-", "43.7")),
}
"""Table 2: test perplexity as the paper prints it, by corpus, title of the row (first the plain softmax) and column."""
STAND_INS = {"wikitext-2": "wikitext-103", "reuters": "gigaword"}
"""Freely available corpora, and the paper's corpora that are most like them."""
