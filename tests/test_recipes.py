"""The recipes of docs/recipes/transformers.md run as they stand, with tiny models in the place of a user's."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import ROOT
from tests.test_other_libraries import SMALL

transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install -e '.[dev]'")
pytest.importorskip("accelerate", reason="accelerate is not installed: pip install -e '.[dev]'")

pytestmark = [
    pytest.mark.slow,  # these libraries take long to import; tests/test_hf.py and tests/attach guard the parts
    pytest.mark.filterwarnings("default"),
]


def recipe(title: str) -> list[str]:
    page = (ROOT / "docs" / "recipes" / "transformers.md").read_text()
    section = re.split(rf"^##+ {title}\n", page, flags=re.MULTILINE)[1]
    section = re.split(r"^##+ ", section, flags=re.MULTILINE)[0]
    return re.findall(r"```python\n(.*?)```", section, flags=re.DOTALL)


def run(title: str, **names: Any) -> dict[str, Any]:
    (code,) = recipe(title)
    assert len(code.splitlines()) <= 25
    exec(compile(code, "docs/recipes/transformers.md", "exec"), names)
    return names


def arguments(folder: Path, steps: int = 4, micro: int = 2, accumulate: int = 2, **more: Any) -> Any:
    options = {"lr_scheduler_type": "constant", "save_steps": 2, "report_to": [], "use_cpu": True, "disable_tqdm": True}
    options |= {"dataloader_pin_memory": False, "learning_rate": 1e-2, "seed": 3} | more
    return transformers.TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=accumulate,
        **options,
    )


def language_model() -> tuple[Any, list[dict[str, Any]]]:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SMALL, num_key_value_heads=2)
    data = torch.randint(50, (32, 12))
    rows = []
    for i, ids in enumerate(data):
        labels = ids.clone()
        labels[: i % 7] = -100  # so that micro-batches have different numbers of labels
        rows.append({"input_ids": ids, "labels": labels})
    return transformers.LlamaForCausalLM(config), rows


def classifier() -> tuple[Any, list[dict[str, Any]]]:
    torch.manual_seed(0)
    dropped = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = transformers.BertConfig(**SMALL, num_labels=6, **dropped)
    rows = [{"input_ids": ids, "labels": int(ids[0]) % 6} for ids in torch.randint(50, (32, 12))]
    return transformers.BertForSequenceClassification(config), rows


KINDS = {
    "A language model with the Trainer": (language_model, "lm_head"),
    "A classifier with the Trainer": (classifier, "classifier"),
}
SGD = {"optim": "sgd", "learning_rate": 0.1}


def trained(title: str, settings: Any) -> Any:
    """Return the head after training as the recipe does it."""
    make, name = KINDS[title]
    model, dataset = make()
    found = run(title, model=model, arguments=settings, dataset=dataset)
    return getattr(found["model"], name)


@pytest.mark.parametrize("title", KINDS)
def test_accumulation_is_normalised_as_one_batch(title: str, tmp_path: Path) -> None:
    """With plain SGD, so that rounding is not blown up: Adam divides small gradients by themselves."""
    whole = trained(title, arguments(tmp_path / "a", micro=8, accumulate=1, **SGD))
    parts = trained(title, arguments(tmp_path / "b", micro=2, accumulate=4, **SGD))
    assert torch.equal(whole.counts, parts.counts)
    assert int(whole.counts.sum()) == int(whole.since_start.sum()) > 0  # features of a given layer have settled
    torch.testing.assert_close(whole.weight, parts.weight, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("title", KINDS)
def test_training_resumes(title: str, tmp_path: Path) -> None:
    whole = trained(title, arguments(tmp_path / "a"))
    trained(title, arguments(tmp_path / "b", steps=2))
    make, name = KINDS[title]
    model, dataset = make()
    (code,) = recipe(title)
    names: dict[str, Any] = {"model": model, "arguments": arguments(tmp_path / "b"), "dataset": dataset}
    exec(code.replace("trainer.train()", "trainer.train(resume_from_checkpoint=True)"), names)
    resumed = getattr(model, name)
    assert torch.equal(resumed.counts, whole.counts)
    torch.testing.assert_close(resumed.weight, whole.weight, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("title", KINDS)
@pytest.mark.parametrize("more", [{"bf16": True}, {"torch_compile": True, "torch_compile_backend": "eager"}])
def test_half_precision_and_compiled(title: str, more: dict[str, Any], tmp_path: Path) -> None:
    """With plain SGD, for the same reason."""
    plain = trained(title, arguments(tmp_path / "a", **SGD))
    other = trained(title, arguments(tmp_path / "b", **SGD, **more))
    assert torch.equal(other.counts, plain.counts)
    assert int(other.since_start.sum()) > 0
    torch.testing.assert_close(other.weight, plain.weight, rtol=0.01, atol=0.01)


def test_new_tokens(tmp_path: Path) -> None:
    from tests.test_hf import make_model, make_tokenizer, sentences

    tokenizer = make_tokenizer()
    model, texts = make_model(tokenizer), sentences(30, 1)
    names = run("New tokens for a language model", model=model, tokenizer=tokenizer, texts=texts, folder=tmp_path)
    rows = [{"input_ids": ids, "labels": ids} for ids in (tokenizer(text).input_ids[:40] for text in texts)]
    run("Fine-tuning afterwards", **names, arguments=arguments(tmp_path / "runs"), dataset=rows)
    assert type(model.lm_head) is torch.nn.Linear


def lightning_head(batch: int = 8, accumulate: int = 1, replaced: tuple[str, str] = ("", ""), **more: Any) -> Any:
    """Return the head after the recipe for Lightning, in which one string may be replaced."""
    pytest.importorskip("pytorch_lightning", reason="pytorch-lightning is not installed")
    torch.manual_seed(0)
    data = torch.utils.data.TensorDataset(torch.randn(40, 20), torch.arange(40) % 10)
    quiet = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    quiet |= {"enable_checkpointing": False, "accumulate_grad_batches": accumulate} | more
    (code,) = recipe("Lightning")
    names = {"loader": torch.utils.data.DataLoader(data, batch_size=batch), "quiet": quiet}
    assert replaced[0] in code
    exec(code.replace(*replaced), names)
    return names["classifier"].head


def test_lightning() -> None:
    assert lightning_head().counts.tolist() == [8] * 10


def test_lightning_normalises_accumulation_as_one_batch() -> None:
    sgd = ("torch.optim.Adam(self.parameters(), lr=1e-3)", "torch.optim.SGD(self.parameters(), lr=0.1)")
    whole, parts = lightning_head(replaced=sgd), lightning_head(batch=4, accumulate=2, replaced=sgd)
    assert torch.equal(whole.counts, parts.counts)
    torch.testing.assert_close(whole.weight, parts.weight, rtol=1e-4, atol=1e-5)


def test_lightning_resumes(tmp_path: Path) -> None:
    saving = {"enable_checkpointing": True, "default_root_dir": str(tmp_path)}
    whole = lightning_head()
    lightning_head(replaced=("max_epochs=2", "max_epochs=1"), **saving)
    (checkpoint,) = tmp_path.rglob("*.ckpt")
    resumed = lightning_head(replaced=("loader)", f"loader, ckpt_path={str(checkpoint)!r})"))
    assert torch.equal(whole.counts, resumed.counts)
    torch.testing.assert_close(whole.weight, resumed.weight, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("replaced", "more"),
    [
        (("", ""), {"precision": "bf16-mixed"}),
        (("fit(classifier", 'fit(torch.compile(classifier, backend="eager")'), {}),
    ],
)
def test_lightning_in_half_precision_and_compiled(replaced: tuple[str, str], more: dict[str, Any]) -> None:
    plain, other = lightning_head(), lightning_head(replaced=replaced, **more)
    assert torch.equal(plain.counts, other.counts)
    torch.testing.assert_close(plain.weight, other.weight, rtol=0.1, atol=0.1)
