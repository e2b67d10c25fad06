"""The code in the README and in docs/ runs as it stands."""

import re

from tests import ROOT

README = ROOT / "README.md"


def test_readme_code_runs() -> None:
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)
    assert len(blocks) >= 2
    namespace: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, str(README), "exec"), namespace)
    assert int(namespace["head"].counts[0]) == 100  # type: ignore[attr-defined]


def test_code_of_the_pages_runs() -> None:
    whole = [("memory.md", 3, True), ("recipes/intents.md", 3, True), ("guide.md", 7, True)]
    whole += [("api/layer.md", 1, True), ("api/rule.md", 1, True)]
    for name, fewest, one_program in (("fast.md", 0, False), *whole):
        page = README.parent / "docs" / name
        blocks = re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL)
        assert len(blocks) >= fewest
        namespace: dict[str, object] = {}
        for block in blocks:
            exec(compile(block, str(page), "exec"), namespace if one_program else {})


def test_every_local_link_exists() -> None:
    root = README.parent
    for page in [README, *root.glob("docs/**/*.md"), *root.glob("results/**/README.md"), root / "examples/README.md"]:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name} links to {target}"
