"""The registry of experiments: which module offers which command, imported only when its verb is asked for.

A new experiment is one module with a list `RECIPES` and one line in `MODULES`.
"""

from collections.abc import Sequence
from importlib import import_module

from hebbian_softmax.lab.base.runs import Run
from hebbian_softmax.lab.report.recipe import Recipe
from hebbian_softmax.lab.report.result import Beside

MODULES = {
    "train": ("language.experiments.train",),
    "compare": ("images.compare", "longtail.compare", "language.experiments.train"),
    "sweep": ("language.experiments.sweep",),
    "reproduce": (
        "images.reproduce",
        "longtail.reproduce",
        "language.experiments.wikitext_table",
        "language.experiments.curves",
        "language.experiments.reuters",
    ),
}
"""For each verb, the modules of its experiments in the order in which the help lists them."""

_added: dict[str, Recipe] = {}


def add(recipe: Recipe) -> None:
    """Offer a recipe from outside this package, for the rest of the process."""
    _added[recipe.command] = recipe


def recipes(verb: str) -> list[Recipe]:
    """Return the recipes of a verb. Only their modules are imported."""
    modules = [import_module(f"hebbian_softmax.lab.{name}") for name in MODULES.get(verb, ())]
    offered = [*(recipe for module in modules for recipe in module.RECIPES), *_added.values()]
    return [recipe for recipe in offered if recipe.verb == verb]


def find_recipe(command: str) -> Recipe | None:
    """Return the recipe of a command such as `compare glyphs`, or None if this version does not have it."""
    verb = command.partition(" ")[0]
    return next((recipe for recipe in recipes(verb) if recipe.command == command), None)


def compare_runs(runs: Sequence[Run]) -> Beside:
    """Set the models of several runs beside each other, where their experiment knows how to."""
    from hebbian_softmax.lab.language.report.words import compare_words

    return compare_words(runs)
