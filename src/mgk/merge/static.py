"""A static cache for merged models: Transformers' own, with more heads of keys than of values.

Hk value heads, M components, C capacity in positions, D width of a head.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import StaticCache, StaticLayer, StaticSlidingWindowLayer


class MixtureStaticLayer(StaticLayer):
    """A layer of a static cache with keys (B,Hk*M,C,D) and values (B,Hk,C,D)."""

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate the buffers; the values again, as Transformers gives them as many heads as the keys have."""
        super().lazy_initialization(key_states, value_states)
        assert self.values is not None
        if value_states.shape[1] != key_states.shape[1]:
            self.values = self.values[:, : value_states.shape[1]].clone()
            if not torch.compiler.is_compiling():
                torch._dynamo.mark_static_address(self.values)  # type: ignore[no-untyped-call]


class MixtureSlidingLayer(MixtureStaticLayer, StaticSlidingWindowLayer):
    """The same for a layer with a window, of which C positions are kept."""


class MixtureStaticCache(StaticCache):
    """The static cache of a merged model; `generate(cache_implementation="static")` makes one.

    Args:
        config: of the merged model.
        max_cache_len: the number of positions to allocate.
    """

    def __init__(self, config: Any, max_cache_len: int, **options: Any) -> None:
        super().__init__(config, max_cache_len, **options)
        given: list[Any] = self.layers
        self.layers = [
            MixtureSlidingLayer(max_cache_len=layer.max_cache_len, sliding_window=layer.max_cache_len)
            if layer.is_sliding
            else MixtureStaticLayer(max_cache_len=layer.max_cache_len)
            for layer in given
        ]
