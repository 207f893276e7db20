"""Recipes: configurations for the experiments of the paper and a few others; and comparisons of attentions.

>>> config = mgk.recipes.recipe("lra-text")
>>> config = mgk.train.replace(config, model__attention="softmax", model__heads=8, seed=1)
"""

from mgk.recipes.catalogue import RECIPES, describe, recipe
from mgk.recipes.compare import Comparison, compare

__all__ = ["RECIPES", "Comparison", "compare", "describe", "recipe"]
