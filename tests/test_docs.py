"""The code in the README and in docs/ runs as it stands."""

import json
import re
from pathlib import Path
from typing import Any

README = Path(__file__).parent.parent / "README.md"


def test_readme_code_runs() -> None:
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)
    assert len(blocks) >= 2
    namespace: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, str(README), "exec"), namespace)
    assert int(namespace["head"].counts[0]) == 50  # type: ignore[attr-defined]


def test_code_of_the_pages_runs() -> None:
    page = README.parent / "docs" / "fast.md"
    for block in re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL):
        exec(compile(block, str(page), "exec"), {})


def test_a_text_of_ones_own_becomes_articles(tmp_path: Path) -> None:
    page = README.parent / "docs" / "corpora.md"
    code, *_ = re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL)
    namespace: dict[str, Any] = {}
    exec(compile(code, str(page), "exec"), namespace)
    for split, text in (("train", "One é.\n\nTwo\nlines."), ("valid", "Three."), ("test", "Four.")):
        (tmp_path / f"{split}.txt").write_text(text, encoding="utf-8")
    namespace["one_file"](tmp_path, tmp_path / "my.jsonl")
    articles = [json.loads(line) for line in (tmp_path / "my.jsonl").read_text(encoding="utf-8").splitlines()]
    texts = [(article["date"], article["text"]) for article in articles]
    days = [f"2000-01-0{day}..2000-01-0{day}" for day in (1, 2, 3)]
    assert all(
        f"--{split} {day}" in page.read_text() for split, day in zip(("train", "valid", "test"), days, strict=True)
    )
    assert texts == list(
        zip([day[:10] for day in (days[0], *days)], ["One é.", "Two\nlines.", "Three.", "Four."], strict=True)
    )


def test_every_local_link_exists() -> None:
    root = README.parent
    for page in [README, *root.glob("docs/*.md"), *root.glob("results/*/README.md")]:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name} links to {target}"
