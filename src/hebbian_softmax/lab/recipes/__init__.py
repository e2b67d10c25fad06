"""One module for each experiment, and the list that the command line offers.

A new recipe is a module with a `RECIPE` and one line here.
"""

from hebbian_softmax.lab.recipes import images, longtail, omniglot, words
from hebbian_softmax.lab.recipes.recipe import Recipe

RECIPES: tuple[Recipe, ...] = (images.GLYPHS, images.OMNIGLOT, longtail.RECIPE, omniglot.RECIPE, *words.RECIPES)
