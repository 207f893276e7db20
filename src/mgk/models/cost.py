"""FLOPs and parameters of a transformer layer, from its configuration."""

from __future__ import annotations

from collections import Counter

from mgk.models.config import TransformerConfig, TranslatorConfig
from mgk.nn.block import GATED
from mgk.ops.cost import Dimensions, Flops, attention_flops, parameters, projection_flops


def stack_flops(config: TransformerConfig, positions: int, *, causal: bool) -> Flops:
    """Return the FLOPs of all layers for one example. Layers with a window cost less than those without."""
    counts = Counter(config.windows)
    each = {window: layer_flops(config, positions, causal=causal, window=window) for window in counts}
    return Flops(
        sum(counts[window] * flops.forward for window, flops in each.items()),
        sum(counts[window] * flops.backward for window, flops in each.items()),
    )


def layer_flops(config: TransformerConfig, positions: int, *, causal: bool, window: int | None = None) -> Flops:
    """Return the FLOPs of a layer for one example: the attention with its projections, and the feed-forward part.

    A product of the feed-forward part has two more in backward. Norms, like all work per position, are not counted.
    """
    d = dimensions(config, positions, causal=causal, window=window)
    attention, projections = attention_flops(d), projection_flops(d)
    feed_forward = 2 * positions * feed_forward_weights(config)
    return Flops(
        attention.forward + projections.forward + feed_forward,
        attention.backward + projections.backward + 2 * feed_forward,
    )


def layer_parameters(config: TransformerConfig) -> int:
    """Return the number of learned parameters of a layer."""
    d = dimensions(config, 1)
    attention = parameters(d, bias=config.attention_bias, prior=config.prior, learn_variance=config.learn_variance)
    gated = config.activation in GATED
    biases = (1 + gated) * config.hidden + config.width if config.mlp_bias else 0
    norms = 2 * config.width * (2 if config.norm_type == "layer" else 1) + 2 * config.width_of_head * config.qk_norm
    return attention + feed_forward_weights(config) + biases + norms


def feed_forward_weights(config: TransformerConfig) -> int:
    """Return the number of weights in the two matrices of the feed-forward part, or three if it is gated."""
    return (3 if config.activation in GATED else 2) * config.width * config.hidden


def dimensions(
    config: TransformerConfig, positions: int, *, causal: bool = False, window: int | None = None
) -> Dimensions:
    """Return the sizes of the attention of a layer."""
    return Dimensions(
        variant=config.attention,
        heads=config.heads,
        head_dim=config.width_of_head,
        queries=positions,
        keys=positions,
        components=config.components,
        embed_dim=config.width,
        feature_map=config.feature_map,
        causal=causal,
        window=window,
        e_step=config.e_step,
        kv_heads=config.num_kv_heads,
    )


def translator_flops(config: TranslatorConfig) -> Flops:
    """Return the FLOPs of all layers of a translator, for a source and a target of full length."""
    positions = config.max_length
    encoder = stack_flops(config, positions, causal=False)
    own, across = layer_flops(config, positions, causal=True), dimensions(config, positions)
    parts = [own, attention_flops(across), projection_flops(across)]
    return Flops(
        encoder.forward + config.decoder_layers * sum(part.forward for part in parts),
        encoder.backward + config.decoder_layers * sum(part.backward for part in parts),
    )
