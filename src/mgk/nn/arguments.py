"""Checks of what a module is built from and called with, beside those of `mgk.ops.arguments`.

B batch, Nk keys, D width of a head.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mgk.nn.cache import KeyValueCache, StateCache
from mgk.ops import arguments as check
from mgk.ops.cost import FEATURE_MAPS, GAUSSIAN, LINEAR
from mgk.ops.feature_maps import FeatureMap, PositiveOrthogonalFeatures, check_feature_map


def check_combination(
    variant: str,
    e_step: str,
    prior: str,
    dropout: float,
    feature_map: object,
    learn_variance: bool,
    prior_positions: object,
    prior_momentum: float,
) -> None:
    """An option that would have no effect is a mistake; the defaults fit every variant."""
    gaussian, linear = variant in GAUSSIAN, variant in LINEAR
    if e_step == "hard" and not gaussian:
        raise ValueError(f"e_step: expected 'soft' for variant {variant!r} ('hard' is for mgk and smgk), got 'hard'")
    if prior == "em" and not (gaussian and e_step == "soft"):
        raise ValueError(
            "prior: expected 'sgd' or 'uniform' (the M-step is defined for mgk and smgk with a soft E-step), "
            f"got 'em' for variant {variant!r} with e_step={e_step!r}"
        )
    if learn_variance and not gaussian:
        raise ValueError(f"learn_variance: expected False for variant {variant!r}, which has no variance, got True")
    if dropout and linear:
        raise ValueError(
            f"dropout: expected 0 for variant {variant!r}, which makes no attention weights, got {dropout}"
        )
    if not linear and feature_map != "elu":
        raise ValueError(
            f"feature_map: expected the default for variant {variant!r}, which has none, got {feature_map!r}"
        )
    if prior_positions is not None:
        check.check_count("prior_positions", prior_positions)
    for name, given in (("prior_positions", prior_positions), ("prior_momentum", prior_momentum)):
        if given and prior != "em":
            raise ValueError(f"{name}: expected the default unless prior='em', got {given} with prior={prior!r}")


def make_feature_map(feature_map: object, head_dim: int, device: torch.device | str | None) -> str | FeatureMap:
    if isinstance(feature_map, str):
        check.check_choice("feature_map", feature_map, FEATURE_MAPS)
        return PositiveOrthogonalFeatures(head_dim).to(device) if feature_map == "favor" else feature_map
    return check_feature_map(feature_map)


def key_mask(key_padding_mask: object, expected: tuple[int, int], query: Tensor) -> Tensor | None:
    """True where a key takes part, of a mask with True where it does not, or with -inf, as PyTorch's layers pass it."""
    if key_padding_mask is None:
        return None
    if not isinstance(key_padding_mask, Tensor):
        raise TypeError(f"key_padding_mask: expected a bool tensor (B,Nk), got {check.describe(key_padding_mask)}")
    if key_padding_mask.is_floating_point():
        ignored = key_padding_mask == -torch.inf
        if key_padding_mask.device.type == "cpu" and bool((key_padding_mask.masked_fill(ignored, 0) != 0).any()):
            raise ValueError(
                "key_padding_mask: expected a bool tensor, or floats that are 0 or -inf, got other numbers"
            )
        key_padding_mask = ignored
    if key_padding_mask.dtype != torch.bool:
        raise TypeError(f"key_padding_mask: expected dtype torch.bool or a float dtype, got {key_padding_mask.dtype}")
    check.check_shape("key_padding_mask", key_padding_mask, "B,Nk", expected)
    check.check_same("key_padding_mask", key_padding_mask, query, dtype=False)
    return ~key_padding_mask


def check_cache(
    cache: object, kind: type[KeyValueCache] | type[StateCache], batch_size: int, is_self: bool, need_weights: bool
) -> None:
    if not isinstance(cache, kind):
        raise TypeError(f"cache: expected a {kind.__name__} of new_cache, got {type(cache).__name__}")
    if cache.batch_size != batch_size:
        raise ValueError(f"cache: expected one for a batch of {batch_size}, got one for {cache.batch_size}")
    if not is_self:
        raise ValueError("cache: expected self-attention (key=None) with a cache, got a key of its own")
    if need_weights and kind is StateCache:
        raise ValueError("need_weights: expected False with a cache of linear attention, which keeps no keys, got True")
