"""One module for each experiment, and the list that the command line offers.

A new recipe is a module with a `RECIPE` and one line here.
"""

from hebbian_softmax.lab.images import compare as images
from hebbian_softmax.lab.images import reproduce as omniglot
from hebbian_softmax.lab.language.experiments import curves as word_curves
from hebbian_softmax.lab.language.experiments import objectives as word_objectives
from hebbian_softmax.lab.language.experiments import reuters, sweep, wikitext_table
from hebbian_softmax.lab.language.experiments import train as words
from hebbian_softmax.lab.longtail import recipe as longtail
from hebbian_softmax.lab.recipe import Recipe

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
