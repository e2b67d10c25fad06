"""What makes recipes of many trials quick enough to test: no sweep of the garbage, no figures."""

import gc
from collections.abc import Iterator

import pytest

from hebbian_softmax.lab.language.experiments import presentation as word_recipe

PNG = b"\x89PNG as no figure is"


@pytest.fixture(scope="module", autouse=True)
def quick() -> Iterator[None]:
    """A module imports this; a test of figures undoes the second of both."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gc, "collect", lambda: 0)  # a third of a second each time, among the objects of a test suite
        patch.setattr(word_recipe, "draw_curves", lambda groups: PNG)
        yield
