"""Every corpus is declared once and completely; commands, help texts and docs/corpora.md follow the declaration."""

import dataclasses
import importlib
import inspect
import pkgutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hebbian_softmax.lab import data
from hebbian_softmax.lab.base.settings import REQUIRED, option_name
from hebbian_softmax.lab.cli import main
from hebbian_softmax.lab.data.dated import Days, parse_days
from hebbian_softmax.lab.data.prepare import CorpusKind
from hebbian_softmax.lab.data.registry import CORPORA, KNOWN
from hebbian_softmax.lab.language.source import CORPORA as TRAINED
from tests import ROOT

SHARED = {"name", "data_root", "processes", "quiet", "execute", "corpus"}  # taken by hebbian data prepare itself
ORDER = ["corpus", "prepare", "registry", "command"]  # a module may import only those before it
every_corpus = pytest.mark.parametrize("kind", CORPORA.values(), ids=CORPORA)


def test_every_corpus_that_a_module_declares_is_registered() -> None:
    names = [found.name for found in pkgutil.iter_modules(data.__path__)]
    modules = [importlib.import_module(f"{data.__name__}.{name}") for name in names]
    declared = [value for module in modules for value in vars(module).values() if isinstance(value, CorpusKind)]
    assert sorted(kind.name for kind in declared) == sorted(CORPORA)


@every_corpus
def test_the_corpus_and_its_options_have_help_texts(
    kind: CorpusKind[Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "1000")
    for command in (["data", "prepare", "--help"], ["data", "prepare", kind.name, "--help"]):
        with pytest.raises(SystemExit):
            main(command)
        shown = " ".join(capsys.readouterr().out.split())
        assert kind.help
        assert kind.help[1:] in shown
    for field in dataclasses.fields(kind.options):
        assert field.name not in SHARED
        assert field.metadata["help"]
        assert option_name(field.name) in shown
        if field.default not in ("", False, REQUIRED):
            assert f"(default: {field.default})" in shown


@every_corpus
def test_a_plan_can_be_made(kind: CorpusKind[Any], tmp_path: Path) -> None:
    values: dict[str, Any] = {}
    for month, field in enumerate(dataclasses.fields(kind.options), 1):
        if field.default is REQUIRED:
            (tmp_path / field.name).write_text(field.name)
            days = parse_days(f"2000-{month:02}-01..2000-{month:02}-02")
            values[field.name] = days if field.type is Days else str(tmp_path / field.name)
    assert kind.needs_options == bool(values)
    plan = kind.plan(kind.options(**values))
    assert plan.name.startswith(kind.name)
    assert plan.usual != kind.needs_options


def test_hebbian_train_offers_each_corpus_that_needs_no_options() -> None:
    assert {name: TRAINED.get(name) for name in KNOWN} == {name: kind.help for name, kind in KNOWN.items()}


@every_corpus
def test_the_table_of_the_page_has_each_corpus(kind: CorpusKind[Any]) -> None:
    page = (ROOT / "docs" / "corpora.md").read_text(encoding="utf-8")
    assert any(f"`{kind.name}`" in line.split("|")[1] for line in page.splitlines() if line.startswith("|"))


def test_the_command_needs_neither_nltk_nor_the_experiments() -> None:
    script = (
        "import sys, hebbian_softmax.lab.data.command\n"
        "unwanted = ('nltk', 'matplotlib', 'hebbian_softmax.lab.language', 'hebbian_softmax.lab.experiments')\n"
        "print([name for name in unwanted if name in sys.modules])\n"
    )
    shown = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout
    assert shown.strip() == "[]"


@pytest.mark.parametrize("place", range(len(ORDER)), ids=ORDER)
def test_imports_go_one_way(place: int) -> None:
    source = inspect.getsource(importlib.import_module(f"{data.__name__}.{ORDER[place]}"))
    assert not [later for later in ORDER[place + 1 :] if f"lab.data.{later} import" in source]
