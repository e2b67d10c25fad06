"""Heads in models of transformers and under accelerate, as their users have them."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.heads import early_head

pytestmark = [
    pytest.mark.slow,  # these libraries take long to import; tests/test_filled.py guards the same without them
    pytest.mark.filterwarnings("default"),
]

OK = {"gamma": 0.1, "limit": 20}
SMALL: dict[str, Any] = {
    "vocab_size": 50, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2
}  # fmt: skip
"""A network of transformers that a test can train."""


def llama(tied: bool = False):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install -e '.[dev]'")

    class WithHead(transformers.LlamaForCausalLM):
        def __init__(self, config) -> None:
            super().__init__(config)
            self.lm_head = early_head(config.hidden_size, config.vocab_size, **OK)
            self.post_init()

    class Classifier(transformers.LlamaForSequenceClassification):
        def __init__(self, config) -> None:
            super().__init__(config)
            self.score = early_head(config.hidden_size, config.num_labels, **OK)
            self.post_init()

    config = transformers.LlamaConfig(
        **SMALL, num_key_value_heads=2, num_labels=7, pad_token_id=0, tie_word_embeddings=tied
    )
    return transformers.LlamaForCausalLM(config), WithHead, Classifier


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_rows_of_a_plain_checkpoint_count_as_familiar(tied: bool, tmp_path: Path) -> None:
    plain, with_head, _ = llama(tied)
    plain.save_pretrained(tmp_path / "plain")
    model = with_head.from_pretrained(tmp_path / "plain").train()
    head = model.lm_head
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    head.attach(optimizer)
    assert head.counts.tolist() == [20] * 50
    ids = torch.randint(1, 50, (2, 6))
    with head.targets(ids, shift=True):
        loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    assert int(head.counts.sum()) == 20 * 50 + 10
    assert bool(head.weight.isfinite().all())
    model.save_pretrained(tmp_path / "ours")
    again = with_head.from_pretrained(tmp_path / "ours", dtype=torch.bfloat16).lm_head
    again.attach(torch.optim.AdamW(again.parameters()))
    assert torch.equal(again.counts, head.counts)
    assert again.running.mean.dtype == torch.float32


def test_a_new_classifier_on_a_trained_body_starts_at_count_0(tmp_path: Path) -> None:
    plain, _, classifier = llama()
    plain.save_pretrained(tmp_path)
    model = classifier.from_pretrained(tmp_path)
    model.score.attach(torch.optim.AdamW(model.parameters()))
    assert model.score.counts.tolist() == [0] * 7


def test_resize_token_embeddings(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for tied in (True, False):
        _, with_head, _ = llama(tied)
        model = with_head._from_config(llama(tied)[0].config)
        head = model.lm_head
        model.resize_token_embeddings(60)
        optimizer = torch.optim.AdamW(model.parameters())
        ids = torch.randint(50, 60, (2, 6))
        if tied:
            with caplog.at_level(logging.INFO, "hebbian_softmax"):
                head.attach(optimizer)
            assert "grown from 50 to 60 rows" in caplog.text
            with head.targets(ids, shift=True):
                model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            assert int(head.counts[50:].sum()) == 10
        else:  # transformers has put a plain layer in its place
            with pytest.raises(ValueError, match="resize_token_embeddings"):
                head.attach(optimizer)
            with pytest.warns(UserWarning, match="resize_token_embeddings"), head.targets(ids, shift=True):
                model(input_ids=ids, labels=ids)


def test_optimizers_of_accelerate() -> None:
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed: pip install -e '.[dev]'")
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = nn.Sequential(nn.Linear(4, 8), early_head(8, 5, **OK))
    model, optimizer = accelerator.prepare(model, torch.optim.Adam(model.parameters()))
    head = model[-1]
    head.attach(optimizer)
    for label in range(4):
        with accelerator.accumulate(model):
            x, y = torch.randn(3, 4), torch.full((3,), label)
            with head.targets(y):
                loss = F.cross_entropy(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        assert int(head.counts.sum()) == 6 * ((label + 1) // 2)
