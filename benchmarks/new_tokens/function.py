"""Measure tokens that lose their rows, through ``add_tokens`` itself.

The tokens of a test are taken out of SmolLM2's tokenizer and output layer, and ``add_tokens`` gives them back from the
texts of the stream; its report is of texts that come after it. So that the texts have the same tokens as in
``python -m benchmarks.new_tokens``, each token is written as one character of Unicode's private use. As in that
protocol, new tokens are read by the input rows that were trained, so the body of the model computes the same in every
test: what it has computed for that protocol is used again.

python -m benchmarks.new_tokens.function --json runs/function.json
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, LlamaForCausalLM
from transformers.modeling_outputs import BaseModelOutputWithPast

from benchmarks.new_tokens.environment import described
from benchmarks.new_tokens.features import (
    CHARACTERS,
    LENGTH,
    WHEEL,
    Features,
    load,
    pieces_of,
    running_text,
    unpacked_model,
)
from benchmarks.new_tokens.protocol import JUDGED, LIMIT, STREAM, drawn_tokens
from hebbian_softmax.hf import Report, add_tokens

FIRST = 0xF0000
"""The first character of a private use area with room for 65,534."""
SHORTEST = 8
"""Tokens by which a piece is recognised."""


def as_texts(pieces: Tensor) -> list[str]:
    """Return pieces (n, tokens) as texts of one character for each token."""
    return ["".join(chr(FIRST + token) for token in piece) for piece in pieces.tolist()]


def tokenizer_of(kept: Tensor) -> Any:
    """Return a tokenizer that knows these tokens by their characters, in this order; the first stands for others."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    characters = [chr(FIRST + token) for token in kept.tolist()]
    inner = Tokenizer(models.WordLevel({each: i for i, each in enumerate(characters)}, unk_token=characters[0]))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token=characters[0])


class Recorded(nn.Module):
    """Stands for the body of the model: it knows the activations of these pieces, and of their beginnings."""

    def __init__(self, pieces: Tensor, h: Tensor, kept: Tensor, new: Tensor) -> None:
        super().__init__()
        self.tokens = torch.cat([kept, new])
        """The original token behind each token that the model is given."""
        h = h.view(len(pieces), pieces.shape[1] - 1, -1)
        self.kept = torch.zeros(len(self.tokens), dtype=torch.bool).index_fill(0, kept, True)
        self.unknown = int(kept[0])
        self.known = dict(zip(self.beginnings(pieces), h, strict=True))
        assert len(self.known) == len(pieces), "two pieces begin alike"
        self.embed_tokens = nn.Embedding(len(kept), h.shape[2])  # which add_tokens resizes

    def beginnings(self, pieces: Tensor) -> list[tuple[int, ...]]:
        """Return the first tokens of pieces (n, tokens) as a tokenizer reads them that has none of the new ones."""
        start = pieces[:, :SHORTEST]
        return [tuple(each) for each in torch.where(self.kept[start], start, self.unknown).tolist()]

    def forward(self, input_ids: Tensor, **options: Any) -> BaseModelOutputWithPast:
        """Return the activations; those of the last token of a piece, which nothing follows, are zeros."""
        found = torch.stack([self.known[each] for each in self.beginnings(self.tokens[input_ids])])
        found = nn.functional.pad(found, (0, 0, 0, 1))[:, : input_ids.shape[1]]
        return BaseModelOutputWithPast(last_hidden_state=found)


def measure(config: Any, pieces: Tensor, features: Features, new: Tensor, streamed: int, judged: int) -> dict[str, Any]:
    """Return what the report of ``add_tokens`` says of tokens that lose their rows.

    The first ``streamed`` pieces are the texts, and the ``judged`` ones after them are held out.
    """
    kept = torch.ones(len(features.rows), dtype=torch.bool).index_fill(0, new, False).nonzero().squeeze(1)
    config.vocab_size, config.tie_word_embeddings, config.num_hidden_layers = len(kept), False, 0
    model = LlamaForCausalLM(config).eval()
    model.model = Recorded(pieces, features.h, kept, new)
    model.lm_head.weight = nn.Parameter(features.rows[kept])
    texts = as_texts(pieces[: streamed + judged])
    tokens = [chr(FIRST + token) for token in new.tolist()]
    report = add_tokens(
        model, tokenizer_of(kept), tokens, texts[:streamed], held_out=texts[streamed:], length=LENGTH, limit=LIMIT
    )
    print(report, flush=True)
    return outcome(report, judged)


def outcome(report: Report, judged: int) -> dict[str, Any]:
    """Return the numbers of a report on ``judged`` pieces; a character is a token here."""
    nats = report.bits_after * math.log(2) * LENGTH / (LENGTH - 1)
    return {
        "perplexity": math.exp(nats),
        "perplexity of kept tokens": math.exp(report.old_after),
        "positions": judged * (LENGTH - 1),
        "new tokens": len(report.counts),
        "new tokens by count": {
            name: {"tokens": tokens, "occurrences": occurrences, "nats": nats if occurrences else None}
            for name, (tokens, occurrences, nats) in report.new_after.items()
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("runs/smollm2"), help=f"the folder with {WHEEL}")
    parser.add_argument("--data-root", type=Path, default=Path("../shared/data"), help="the folder with wikitext-2/")
    parser.add_argument("--splits", type=int, default=3, help="the number of tests")
    parser.add_argument("--json", type=Path, required=True, help="where the numbers are written")
    options = parser.parse_args()
    options.json.parent.mkdir(parents=True, exist_ok=True)
    features, file = load(options.model, options.data_root), unpacked_model(options.model)
    pieces = pieces_of(file, running_text(options.data_root)[:CHARACTERS])
    assert torch.equal(pieces[:, 1:].reshape(-1), features.targets)
    streamed, judged = int(len(pieces) * STREAM), JUDGED // (LENGTH - 1)
    result: dict[str, Any] = described("benchmarks.new_tokens.function") | {"splits": {}}
    drawn = drawn_tokens(features.targets, len(features.rows), options.splits)[1]
    for number, new in enumerate(drawn, 1):
        begun, config = time.monotonic(), AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
        found = measure(config, pieces, features, new, streamed, judged)
        result["splits"][str(number)] = found | {"seconds": time.monotonic() - begun}
        options.json.write_text(json.dumps(result, indent=1) + "\n")
        print(f"test {number}: perplexity {found['perplexity']:.2f}, kept {found['perplexity of kept tokens']:.2f}")


if __name__ == "__main__":
    main()
