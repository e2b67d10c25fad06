"""Tokens added to models of transformers, which are made here and tiny."""

from __future__ import annotations

import copy
import importlib
import math
import random
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hebbian_softmax import HebbianSoftmax, NewClasses
from tests import ROOT

transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install -e '.[dev]'")
hf = pytest.importorskip("hebbian_softmax.hf")

pytestmark = pytest.mark.filterwarnings("default")

WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "dog", "ran", "to", "with", "ball", "under", "tree", "near"]
NEW = [" zebra", " quixotic", " flamingo"]


def sentences(number: int, seed: int, with_new: bool = True) -> list[str]:
    """Return texts in which a zebra follows "the", and a flamingo follows "under"; or texts without these animals.

    One of two words may follow a word, so that a model learns to look at the last one.
    """
    chance = random.Random(seed)
    animals = {"the": "the zebra", "under": "under flamingo"} if with_new else {}
    texts = []
    for _ in range(number):
        places = [chance.randrange(len(WORDS))]
        for _ in range(50):
            places.append((2 * places[-1] + chance.randint(1, 2)) % len(WORDS))
        texts.append(" ".join(animals.get(WORDS[place], WORDS[place]) for place in places))
    return texts


def make_tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=340,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator([" " + " ".join(WORDS)] * 20, trainer)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|end|>", pad_token="<|end|>")


def make_model(tokenizer: Any, tied: bool = False, spare: int = 0) -> Any:
    """Return a model that has learned the sentences a little, so that its logits mean something."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer) + spare,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
    )
    model = transformers.LlamaForCausalLM(config)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    ids = torch.tensor([tokenizer(text).input_ids[:48] for text in sentences(16, 5, with_new=False)])
    for _ in range(40):
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    return model.eval()


@pytest.fixture(scope="module")
def made() -> dict[bool, tuple[Any, Any]]:
    tokenizer = make_tokenizer()
    return {tied: (make_model(tokenizer, tied), tokenizer) for tied in (False, True)}


def fresh(made: dict[bool, tuple[Any, Any]], tied: bool = False) -> tuple[Any, Any]:
    return copy.deepcopy(made[tied])


@pytest.mark.parametrize("tied", [False, True])
def test_new_tokens_are_predicted_and_the_rest_stays(made: dict[bool, tuple[Any, Any]], tied: bool) -> None:
    model, tokenizer = fresh(made, tied)
    old_rows = model.lm_head.weight.detach().clone()
    old = len(tokenizer)
    report = hf.add_tokens(model, tokenizer, NEW, sentences(60, 1), held_out=sentences(10, 2), length=64)
    assert type(model.lm_head) is nn.Linear
    assert not model.training
    assert torch.equal(model.lm_head.weight[:old], old_rows)
    assert len(tokenizer) == old + 3 == model.lm_head.weight.shape[0] == model.config.vocab_size
    assert report.unseen == [" quixotic"]
    assert report.counts[" zebra"] == sum(text.count(" zebra") for text in sentences(60, 1))
    assert report.untied is tied
    assert report.bits_after < report.bits_before
    assert report.old_after < report.old_before + 0.2
    assert "bits per character" in str(report)
    ids = tokenizer(" near the", return_tensors="pt").input_ids
    probabilities = model(input_ids=ids).logits[0, -1].softmax(0)
    assert probabilities[old] > 2 * probabilities[old + 2]  # the zebra follows "the", and the flamingo does not
    assert probabilities[old + 1] < 1 / old


@pytest.mark.parametrize("tied", [False, True])
def test_a_saved_model_is_loaded_by_plain_transformers(
    made: dict[bool, tuple[Any, Any]], tied: bool, tmp_path: Path
) -> None:
    model, tokenizer = fresh(made, tied)
    hf.add_tokens(model, tokenizer, NEW, sentences(30, 1), length=64)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    words = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert again.config.tie_word_embeddings is False
    assert again.lm_head.weight is not again.get_input_embeddings().weight
    ids = words("near the zebra ran", return_tensors="pt").input_ids
    assert torch.equal(ids, tokenizer("near the zebra ran", return_tensors="pt").input_ids)
    assert torch.equal(again(input_ids=ids).logits, model(input_ids=ids).logits)


def test_readme_code_runs(made: dict[bool, tuple[Any, Any]], tmp_path: Path) -> None:
    for part in fresh(made):
        part.save_pretrained(tmp_path / "old")
    blocks = re.findall(r"```py\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    assert len(blocks) == 1
    given = {"name": tmp_path / "old", "texts": sentences(60, 1), "folder": tmp_path / "new"}
    exec(compile(blocks[0], "README.md", "exec"), given)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "new")
    assert len(again.lm_head.weight) == len(made[False][1]) + 2


def test_the_report_is_that_of_the_models_own_loss(made: dict[bool, tuple[Any, Any]]) -> None:
    model, tokenizer = fresh(made)
    before, words = fresh(made)
    tests = sentences(3, 2)
    report = hf.add_tokens(model, tokenizer, NEW, sentences(30, 1), held_out=tests, length=4096)
    for each, its, found in ((before, words, report.bits_before), (model, tokenizer, report.bits_after)):
        nats = 0.0
        for text in tests:
            ids = its(text, return_tensors="pt").input_ids
            logits = each(input_ids=ids).logits[0, :-1].detach()
            nats += float(F.cross_entropy(logits, ids[0, 1:], reduction="sum"))
        assert nats / math.log(2) / sum(map(len, tests)) == pytest.approx(found, rel=1e-5)


def test_rows_are_those_of_a_head_that_memorises_the_models_activations(made: dict[bool, tuple[Any, Any]]) -> None:
    """One text after the other, without padding, against batches of pieces of different lengths."""
    model, tokenizer = fresh(made)
    old, linear = len(tokenizer), copy.deepcopy(model.lm_head)
    texts = [text[: 40 + 20 * i] for i, text in enumerate(sentences(12, 1))]
    hf.add_tokens(model, tokenizer, NEW, texts, held_out=texts[:1], length=4096, batch_size=5)
    h, targets = [], []
    for text in texts:
        ids = tokenizer(text, return_tensors="pt").input_ids
        with torch.no_grad():
            h.append(model(input_ids=ids, output_hidden_states=True).hidden_states[-1][0, :-1])
        targets.append(ids[0, 1:])
    head = HebbianSoftmax.from_linear(linear, gamma=0.1, limit=1000)
    head.calibrate(torch.cat(h))
    head.add_classes(3)
    head.memorize(torch.cat(h), torch.cat(targets))
    torch.testing.assert_close(model.lm_head.weight, head.weight, rtol=1e-3, atol=1e-3)
    assert (model.lm_head.weight[old] - model.lm_head.weight[old + 2]).norm() > 0.1


def test_long_texts_are_read_in_pieces_and_every_token_counts(made: dict[bool, tuple[Any, Any]]) -> None:
    counts = []
    for length, batch in ((4096, 1), (7, 3)):
        model, tokenizer = fresh(made)
        texts = sentences(5, 1)
        report = hf.add_tokens(model, tokenizer, NEW, texts, held_out=texts[:1], length=length, batch_size=batch)
        counts.append(report.counts)
        tokens = sum(len(tokenizer(text).input_ids) - 1 for text in texts)
        assert int(report.memory["calibration.memorized"]) == tokens
    assert counts[0] == counts[1]


@pytest.mark.parametrize("spare", [0, *(pytest.param(spare, marks=pytest.mark.slow) for spare in (2, 20))])
def test_rows_without_a_token_are_unlikely(spare: int) -> None:
    tokenizer = make_tokenizer()
    model = make_model(tokenizer, spare=spare)
    old = len(tokenizer)
    hf.add_tokens(model, tokenizer, NEW, sentences(30, 1), length=64, pad_to_multiple_of=16)
    rows = model.lm_head.weight.shape[0]
    assert rows % 16 == 0
    assert rows >= old + max(3, spare)
    ids = tokenizer(sentences(1, 2)[0], return_tensors="pt").input_ids
    with torch.no_grad():
        assert model(input_ids=ids).logits.softmax(-1)[..., old + 3 :].max() < 0.01


def test_half_precision(made: dict[bool, tuple[Any, Any]]) -> None:
    model, tokenizer = fresh(made)
    report = hf.add_tokens(model.bfloat16(), tokenizer, NEW, sentences(40, 1), length=64)
    assert model.lm_head.weight.dtype == torch.bfloat16
    assert report.bits_after < report.bits_before


def test_what_to_install_is_said_where_transformers_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.delitem(sys.modules, "hebbian_softmax.hf")
    with pytest.raises(ImportError, match=r"pip install 'hebbian-softmax\[hf\]'"):
        importlib.import_module("hebbian_softmax.hf")


def added(content: str, **options: Any) -> Any:
    return transformers.AddedToken(content, **options)


@pytest.mark.parametrize(
    ("tokens", "texts", "options", "error", "words"),
    [
        ([" the"], ["some text"], {}, ValueError, "in the tokenizer already: ' the'"),
        (["<|end|>"], ["some text"], {}, ValueError, "already"),
        ([added("<new>", special=True)], ["some text"], {}, ValueError, "special tokens"),
        ([" zebra", " zebra"], ["some text"], {}, ValueError, "twice"),
        ([], ["some text"], {}, ValueError, "at least one"),
        ([" "], ["some text"], {}, ValueError, "empty"),
        (" zebra", ["some text"], {}, TypeError, "list of strings"),
        (NEW, [], {}, ValueError, "texts must have some text"),
        (NEW, ["  ", ""], {}, ValueError, "texts must have some text"),
        (NEW, "some text", {}, TypeError, "list of strings"),
        (NEW, ["zebra"], {}, ValueError, "too short"),
        (NEW, ["some text"], {"held_out": 1.5}, ValueError, "share"),
        (NEW, ["some text"], {"held_out": 0}, ValueError, "share"),
        (NEW, ["some text"], {"held_out": []}, ValueError, "held_out must have some text"),
        (NEW, ["some text"], {"length": 1}, ValueError, "length"),
        (NEW, ["some text"], {"limit": 0}, ValueError, "limit"),
        (NEW, ["some text"], {"pad_to_multiple_of": -3}, ValueError, "pad_to_multiple_of"),
        (NEW, ["some text"], {"new_classes": 2}, TypeError, "new_classes"),
    ],
)
def test_refused(
    made: dict[bool, tuple[Any, Any]],
    tokens: Any,
    texts: Any,
    options: dict[str, Any],
    error: type[Exception],
    words: str,
) -> None:
    model, tokenizer = fresh(made)
    size, rows = len(tokenizer), model.lm_head.weight.shape[0]
    with pytest.raises(error, match=words):
        hf.add_tokens(model, tokenizer, tokens, texts, **options)
    assert (len(tokenizer), model.lm_head.weight.shape[0]) == (size, rows)


def test_models_that_cannot_be_written_are_refused(made: dict[bool, tuple[Any, Any]]) -> None:
    model, tokenizer = fresh(made)
    call = {"tokenizer": tokenizer, "tokens": NEW, "texts": sentences(3, 1)}
    with pytest.raises(TypeError, match="language model of transformers"):
        hf.add_tokens(nn.Linear(2, 2), **call)
    with pytest.raises(TypeError, match="output layer"):
        hf.add_tokens(model.model, **call)
    model.hf_device_map = {"model": 0, "lm_head": 1}
    with pytest.raises(ValueError, match=r"spread over .* by device_map"):
        hf.add_tokens(model, **call)
    del model.hf_device_map

    def capped(module: Any, inputs: Any, output: Any) -> Any:
        output.logits = 30 * (output.logits / 30).tanh()
        return output

    hook = model.register_forward_hook(capped)
    with pytest.raises(ValueError, match="changes the logits"):
        hf.add_tokens(model, **call)
    hook.remove()
    model.config.is_encoder_decoder = True
    with pytest.raises(ValueError, match="causal language models only"):
        hf.add_tokens(model, **call)
    model.config.is_encoder_decoder = False

    class Quantised(nn.Linear):
        pass

    model.lm_head = Quantised(32, len(tokenizer))
    with pytest.raises(ValueError, match="before it is quantised"):
        hf.add_tokens(model, **call)
    small, _ = fresh(made)
    small.resize_token_embeddings(20)
    with pytest.raises(ValueError, match="is it that of the model"):
        hf.add_tokens(small, **call)


def fine_tune(model: Any, tokenizer: Any, folder: Path, callback: Any, steps: int, resume: bool = False) -> Any:
    texts = sentences(24, 3)
    rows = [{"input_ids": ids, "labels": ids} for ids in (tokenizer(text).input_ids[:48] for text in texts)]
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        save_steps=2,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    trainer = transformers.Trainer(model, arguments, train_dataset=rows, callbacks=[callback])
    trainer.train(resume_from_checkpoint=resume)
    return trainer


@pytest.mark.parametrize("tied", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_callback_goes_on_writing(made: dict[bool, tuple[Any, Any]], tied: bool, tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="accelerate, which the Trainer needs, is not installed")
    model, tokenizer = fresh(made, tied)
    report = hf.add_tokens(model, tokenizer, NEW, sentences(30, 1), length=64)
    callback = hf.MemorizeWhileTraining(model, report)
    with pytest.raises(ValueError, match="label_smoothing_factor"):
        callback.on_train_begin(SimpleNamespace(label_smoothing_factor=0.1), None, None)
    counts = callback.head.counts.clone()
    trainer = fine_tune(model, tokenizer, tmp_path, callback, steps=4)
    assert int((callback.head.counts - counts).sum()) == 4 * 4 * 47  # steps, texts a step, targets of a text
    with pytest.raises(RuntimeError, match="make a new MemorizeWhileTraining"):
        trainer.train()
    assert type(model.lm_head) is nn.Linear
    assert model.lm_head.weight is callback.head.weight
    assert model.lm_head.weight.isfinite().all()
    model.save_pretrained(tmp_path / "plain")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "plain")
    assert torch.equal(again.lm_head.weight, model.lm_head.weight)


@pytest.mark.slow  # tests/test_state.py guards the state that is saved
def test_fine_tuning_resumes(made: dict[bool, tuple[Any, Any]], tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="accelerate, which the Trainer needs, is not installed")
    found = []
    for resume in (False, True):
        model, tokenizer = fresh(made)
        report = hf.add_tokens(model, tokenizer, NEW, sentences(30, 1), length=64)
        callback = hf.MemorizeWhileTraining(model, report)
        if resume:
            fine_tune(model, tokenizer, tmp_path / "two", callback, steps=2)
            model, tokenizer = fresh(made)
            report = hf.add_tokens(model, tokenizer, NEW, sentences(30, 1), length=64)
            callback = hf.MemorizeWhileTraining(model, report)
            fine_tune(model, tokenizer, tmp_path / "two", callback, steps=4, resume=True)
        else:
            fine_tune(model, tokenizer, tmp_path / "one", callback, steps=4)
        found.append((callback.head.counts.clone(), model.lm_head.weight.detach().clone()))
    assert torch.equal(found[0][0], found[1][0])
    torch.testing.assert_close(found[0][1], found[1][1], rtol=1e-5, atol=1e-6)


@pytest.mark.slow  # tests/write/test_trained.py guards the option
def test_gradients_leave_rows_of_rare_tokens_to_the_write(made: dict[bool, tuple[Any, Any]], tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="accelerate, which the Trainer needs, is not installed")
    rows = []
    for settings in (NewClasses(prior="even"), NewClasses(prior="even", gradients_from=10**6)):
        model, tokenizer = fresh(made)
        report = hf.add_tokens(model, tokenizer, NEW, sentences(30, 1), length=64, new_classes=settings)
        callback = hf.MemorizeWhileTraining(model, report)
        assert callback.head.new_classes == settings
        callback.head.memorizing = False
        before = model.lm_head.weight.detach()[-3:].clone()
        fine_tune(model, tokenizer, tmp_path, callback, steps=2)
        rows.append((before, model.lm_head.weight.detach()[-3:]))
    assert not torch.equal(*rows[0])
    torch.testing.assert_close(*rows[1], rtol=1e-6, atol=1e-6)


def test_the_callback_wants_the_model_of_the_report(made: dict[bool, tuple[Any, Any]]) -> None:
    model, tokenizer = fresh(made)
    other, _ = fresh(made)
    report = hf.add_tokens(model, tokenizer, NEW, sentences(30, 1), length=64)
    with pytest.raises(ValueError, match="give the model that the tokens were added to"):
        hf.MemorizeWhileTraining(other, report)
