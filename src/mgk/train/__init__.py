"""Training: a configuration goes in, a folder with everything about the run comes out.

>>> from mgk import recipes, train
>>> train.train(recipes.recipe("lra-listops"), "runs/listops")
"""

from mgk.environment import require

require("mgk.train", "lightning-fabric", "safetensors")

from mgk.train.checkpoint import CheckpointError
from mgk.train.config import Config, DataConfig, OptimiserConfig, replace
from mgk.train.engine import Result, TrainingError, train
from mgk.train.evaluate import evaluate, load_model

__all__ = [
    "CheckpointError",
    "Config",
    "DataConfig",
    "OptimiserConfig",
    "Result",
    "TrainingError",
    "evaluate",
    "load_model",
    "replace",
    "train",
]
