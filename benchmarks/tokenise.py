"""The lab's tokeniser against NLTK called as in the paper's script, on the same books in one process.

    python -m benchmarks.tokenise BOOKS [--count N] [--profile]

BOOKS is a folder or an archive of .txt files. NLTK must find its English model (NLTK_DATA). The two take turns book by
book, so that other work on the machine slows both.
"""

import argparse
import cProfile
import itertools
import platform
import pstats
import time
from pathlib import Path

import nltk

from hebbian_softmax.lab.data.texts import read_texts
from hebbian_softmax.lab.data.tokenise import Tokeniser


def by_nltk(text: str) -> list[str]:
    """Return the tokens of a text as the paper's script makes them."""
    tokens: list[str] = []
    for sentence in nltk.sent_tokenize(text.replace("\r", " ").replace("\n", " ")):
        tokens += [*nltk.word_tokenize(sentence), "<eos>"]
    return [token.lower() for token in tokens]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("books", metavar="BOOKS", type=Path, help="folder or archive of .txt files")
    parser.add_argument("--count", metavar="N", type=int, default=20, help="books to read (default: 20)")
    parser.add_argument("--profile", action="store_true", help="show which functions take the lab's time")
    arguments = parser.parse_args()
    texts = [
        content.decode("utf-8", "replace")
        for _, content in itertools.islice(read_texts(arguments.books), arguments.count)
    ]
    by_nltk("The first call loads the model.")
    tokeniser, seconds, tokens = Tokeniser(), {"nltk": 0.0, "lab": 0.0}, 0
    for text in texts:
        began = time.process_time()
        expected = by_nltk(text)
        middle = time.process_time()
        found = tokeniser.tokens(text)
        seconds["lab"] += time.process_time() - middle
        seconds["nltk"] += middle - began
        assert found == expected
        tokens += len(found)
    print(f"nltk {nltk.__version__}, Python {platform.python_version()}")
    print(f"{len(texts)} books, {tokens:,} tokens, all the same")
    for name, spent in seconds.items():
        print(f"{name:<5}{spent:8.1f} s of processor time, {tokens / spent:10,.0f} tokens/s")
    if arguments.profile:
        profile, tokeniser = cProfile.Profile(), Tokeniser()
        for text in texts:
            profile.runcall(tokeniser.tokens, text)
        pstats.Stats(profile).strip_dirs().sort_stats("tottime").print_stats(12)


if __name__ == "__main__":
    main()
