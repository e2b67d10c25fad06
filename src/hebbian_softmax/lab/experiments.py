"""The list of all experiments that the command line offers. A new experiment gets one line here."""

from hebbian_softmax.lab.images import compare as images
from hebbian_softmax.lab.images import reproduce as omniglot
from hebbian_softmax.lab.language.experiments import train as words
from hebbian_softmax.lab.language.experiments.curves import GigawordCurves, GutenbergCurves, WikitextCurves
from hebbian_softmax.lab.language.experiments.objectives import Objectives
from hebbian_softmax.lab.language.experiments.reuters import Reuters
from hebbian_softmax.lab.language.experiments.sweep import SWEEPS
from hebbian_softmax.lab.language.experiments.wikitext_table import FrequencyTable, WikitextTable
from hebbian_softmax.lab.longtail import recipe as longtail
from hebbian_softmax.lab.recipe import Recipe

RECIPES: tuple[Recipe, ...] = (
    images.GLYPHS,
    images.OMNIGLOT,
    longtail.RECIPE,
    omniglot.RECIPE,
    *words.RECIPES,
    WikitextTable(),
    FrequencyTable(),
    WikitextCurves(),
    GutenbergCurves(),
    GigawordCurves(),
    Objectives(),
    Reuters(),
    *SWEEPS,
)
