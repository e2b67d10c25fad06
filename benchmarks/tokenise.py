"""NLTK called as the paper's script calls it, beside the lab's tokeniser, on the same books in one process.

python -m benchmarks.tokenise BOOKS [--count N] [--profile], BOOKS a folder or an archive of .txt files. NLTK's English
model must be findable (NLTK_DATA). The two take turns book by book, so that other work on the machine slows both.
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
    tokens: list[str] = []
    for sentence in nltk.sent_tokenize(text.replace("\r", " ").replace("\n", " ")):
        tokens += [*nltk.word_tokenize(sentence), "<eos>"]
    return [token.lower() for token in tokens]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("books", metavar="BOOKS", type=Path)
    parser.add_argument("--count", metavar="N", type=int, default=20, help="books to read (default: 20)")
    parser.add_argument("--profile", action="store_true", help="show where the lab's time goes")
    arguments = parser.parse_args()
    texts = [
        content.decode("utf-8", "replace")
        for _, content in itertools.islice(read_texts(arguments.books), arguments.count)
    ]
    by_nltk("It loads. Its model.")
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
