"""The list of all experiments that the command line offers.

A new experiment is a module with a list `RECIPES` and one line here.
"""

from hebbian_softmax.lab.images import compare as images
from hebbian_softmax.lab.images import reproduce as omniglot
from hebbian_softmax.lab.language.experiments import curves, objectives, reuters, sweep, wikitext_table
from hebbian_softmax.lab.language.experiments import train as words
from hebbian_softmax.lab.longtail import recipe as longtail
from hebbian_softmax.lab.recipe import Recipe

RECIPES: tuple[Recipe, ...] = (
    images.GLYPHS,
    images.OMNIGLOT,
    longtail.RECIPE,
    omniglot.RECIPE,
    *words.RECIPES,
    *wikitext_table.RECIPES,
    *curves.RECIPES,
    *objectives.RECIPES,
    *reuters.RECIPES,
    *sweep.RECIPES,
)
