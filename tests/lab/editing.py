"""Changes of JSON files that are made on purpose."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def edited(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the object in a file, and write it back without its checksum, as the file's owner may do."""
    content = json.loads(path.read_bytes())
    content.pop("checksum", None)
    yield content
    path.write_text(json.dumps(content))
