"""The code in docs/memory.md runs as it is."""

import re

from tests import ROOT

PAGE = ROOT / "docs" / "memory.md"


def test_the_code_runs() -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    assert len(blocks) >= 3
    namespace: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), namespace)
