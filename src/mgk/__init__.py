"""Transformers whose attention keys are mixtures: MGK, sMGK, MLK and sMLK."""

from mgk import nn, ops
from mgk.ops import *  # noqa: F403

__version__ = "0.1.0"
__all__ = [*ops.__all__, "nn", "ops"]
