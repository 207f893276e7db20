"""What a model computes per example, from its configuration alone.

N positions of the longest input, E width of the model.
"""

from __future__ import annotations

from mgk.models.config import MatcherConfig, ModelConfig, VisionConfig
from mgk.ops.cost import Dimensions, attention_flops, projection_flops
from mgk.train.config import MODELS


def flops(model: ModelConfig) -> int:
    """FLOPs of forward and backward of the layers for one example of full length; embeddings and output left out."""
    if isinstance(model, VisionConfig):
        positions = (model.image_size // model.patch_size) ** 2 + (model.pooling == "class")
    else:
        positions = model.max_length
    dimensions = Dimensions(
        variant=model.attention,
        heads=model.heads,
        head_dim=model.head_dim or model.width // model.heads,
        queries=positions,
        keys=positions,
        components=model.components,
        embed_dim=model.width,
        feature_map=model.feature_map,
        causal=type(model) is MODELS["language"],
        e_step=model.e_step,
    )
    feed_forward = 3 * 4 * positions * model.width * model.hidden  # two products, each with two more in backward
    layer = attention_flops(dimensions).total + projection_flops(dimensions).total + feed_forward
    return layer * model.layers * (2 if isinstance(model, MatcherConfig) else 1)
