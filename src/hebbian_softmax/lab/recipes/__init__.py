"""One module for each experiment, and the list that the command line offers.

A new recipe is a module with a `RECIPE` and one line here.
"""

from hebbian_softmax.lab.recipes import (
    images,
    longtail,
    omniglot,
    reuters,
    sweep,
    wikitext_table,
    word_curves,
    word_objectives,
    words,
)
from hebbian_softmax.lab.recipes.recipe import Recipe

_OF_WORDS = [
    reproduction.recipe()
    for module in (wikitext_table, word_curves, word_objectives, reuters)
    for reproduction in module.REPRODUCTIONS
]

RECIPES: tuple[Recipe, ...] = (
    images.GLYPHS,
    images.OMNIGLOT,
    longtail.RECIPE,
    omniglot.RECIPE,
    *words.RECIPES,
    *_OF_WORDS,
    *sweep.RECIPES,
)
