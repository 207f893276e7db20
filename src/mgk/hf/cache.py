"""The decode caches of `mgk.nn` behind the cache interface of Transformers.

The cache of softmax, MGK and sMGK attention grows with the text; that of the linear family (MLK) has a constant size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicCache,
    QuantizedCache,
    StaticCache,
    StaticSlidingWindowLayer,
)

from mgk.hf.quantised import QuantisedKeyValueCache, quantised
from mgk.hf.static import StaticStep
from mgk.models import LanguageModel
from mgk.nn import KeyValueCache, StackCache, StateCache
from mgk.nn.cache import WindowCache

UNCROPPABLE = (WindowCache, QuantisedKeyValueCache)


class MGKCacheLayer(CacheLayerMixin):
    """One layer of an `mgk.nn.StackCache`: the attention fills it; `generate` reorders, repeats and crops it."""

    def __init__(self, inner: KeyValueCache | StateCache) -> None:
        super().__init__()
        self.inner = inner
        self.is_croppable = isinstance(inner, KeyValueCache) and not isinstance(inner, UNCROPPABLE)
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: the attention allocates the buffers when it appends."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        raise TypeError("cache: only the attention of mgk can fill this cache")

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.inner.length + query_length, 0

    def get_seq_length(self) -> int:
        return self.inner.length

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length  # its name in the first releases of Transformers 5

    def offload(self) -> None:
        raise ValueError("cache_implementation: expected 'dynamic', 'quantized' or 'static', got an offloaded cache")

    prefetch = offload

    def reset(self) -> None:
        """Empty the cache and keep its buffers."""
        self.inner.length = 0
        if isinstance(self.inner, StateCache):
            self.inner.state = None
        if isinstance(self.inner, QuantisedKeyValueCache):
            self.inner.layer.reset()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.inner.reorder(beam_idx)

    def activate_past_recording(self) -> None:
        """Called before tokens may be removed again, as in assisted decoding."""
        if isinstance(self.inner, StateCache):
            raise ValueError("cache: the state of the linear family cannot remove tokens; generate without assistant")
        if isinstance(self.inner, QuantisedKeyValueCache):
            raise ValueError("cache: a quantised cache cannot remove tokens; generate without assistant")
        if isinstance(self.inner, WindowCache):
            raise ValueError(
                "cache: a cache of a window has no earlier tokens to go back to; use cache_implementation='static', or "
                "generate without assistant"
            )

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last -n positions for a negative n; for a positive n, as in older releases, keep the first n."""
        if tokens_to_remove > 0:
            tokens_to_remove = min(0, tokens_to_remove - self.inner.length)
        if -tokens_to_remove > self.inner.length:
            raise ValueError(f"crop: expected 0 to -{self.inner.length}, got {tokens_to_remove}")
        if tokens_to_remove:
            self.activate_past_recording()
        self.inner.length += tokens_to_remove

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.inner.reorder(torch.arange(self.inner.batch_size, device=self._device).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        self.inner.reorder(torch.arange(self.inner.batch_size, device=indices.device)[indices])

    @property
    def _device(self) -> torch.device | None:
        tensors = self.inner.state if isinstance(self.inner, StateCache) else (self.inner._key,)
        return None if tensors is None or tensors[0] is None else tensors[0].device


class MGKCache(Cache):
    """The cache of a model of `mgk.hf`.

    Args:
        stack: an empty cache, from `new_cache` of the wrapped model.
        capacity: allocate the buffers for this number of positions at once, and decode single tokens in steps of one
            shape (`mgk.hf.static`); 0 lets the buffers grow.
        graph: on a GPU, run such a step as a CUDA graph.
        compile: compile such a step with torch.compile.
    """

    def __init__(self, stack: StackCache, capacity: int = 0, *, graph: bool = True, compile: bool = False) -> None:
        layers = stack.layers
        if capacity:
            layers = [KeyValueCache(x.batch_size, capacity) if isinstance(x, KeyValueCache) else x for x in layers]
        super().__init__(layers=[MGKCacheLayer(inner) for inner in layers])
        self.static, self.graph, self.compile = bool(capacity), graph, compile
        self._step: StaticStep | None = None

    def step(self, model: LanguageModel, length: int) -> StaticStep | None:
        """The static step for the next `length` tokens; None where it does not apply.

        It needs a static cache of keys and values with a prompt in it and a free position, and a single token.
        """
        layers = [layer for layer in stack_of(self).layers if isinstance(layer, KeyValueCache)]
        if not self.static or length != 1 or not layers or not 0 < layers[0].length < layers[0]._capacity:
            return None
        if self._step is None or not self._step.fits(layers):
            self._step = StaticStep(model, layers, graph=self.graph, compile=self.compile)
        return self._step

    @property
    def bytes(self) -> int:
        """Bytes of the positions in the cache."""
        return stack_of(self).bytes


def stack_of(cache: Cache) -> StackCache:
    """The `mgk.nn` cache inside a Transformers cache."""
    return StackCache([cast(MGKCacheLayer, layer).inner for layer in cache.layers])


def static_length(cache: StaticCache) -> int:
    """Return how many positions an empty `StaticCache` was made for; layers with a window do not know it."""
    lengths: list[int] = [x.max_cache_len for x in cache.layers if not isinstance(x, StaticSlidingWindowLayer)]  # type: ignore[union-attr]
    if not lengths:
        raise ValueError(
            "past_key_values: a StaticCache whose layers all have a window does not say how many positions it is for; "
            "use cache_implementation='static' or MGKCache(model.mgk.new_cache(rows), positions)"
        )
    return lengths[0]


def adopt(cache: object, fresh: Callable[[], StackCache], *, graph: bool = True) -> Cache:
    """Return a cache that the model can use.

    An `MGKCache` is returned unchanged. An empty `DynamicCache` gets our layers, as does an empty `QuantizedCache`,
    whose layers hold their numbers. An empty `StaticCache` is replaced by an `MGKCache` of its length, and shares its
    layers, so that it says how many positions there are.
    """
    if isinstance(cache, StaticCache) and isinstance(found := getattr(cache, "adopted", None), MGKCache):
        return found
    if isinstance(cache, Cache) and cache.layers and all(isinstance(layer, MGKCacheLayer) for layer in cache.layers):
        return cache
    empty = (
        isinstance(cache, DynamicCache | StaticCache | QuantizedCache)
        and not cache.get_seq_length()
        and not cache.offloading
    )
    if empty and isinstance(cache, DynamicCache):
        cache.layers = MGKCache(fresh()).layers
        cache.layer_class_to_replicate = None
        return cache
    if empty and isinstance(cache, QuantizedCache):
        cache.layers = MGKCache(quantised(fresh(), cache)).layers
        return cache
    if empty and isinstance(cache, StaticCache):
        found = MGKCache(fresh(), static_length(cache), graph=graph)
        cache.layers, cache.adopted = found.layers, found  # type: ignore[attr-defined]
        return found
    raise TypeError(
        "past_key_values: expected an MGKCache, or an empty DynamicCache, QuantizedCache or StaticCache, got "
        f"{type(cache).__name__}; leave it out, or use cache_implementation='static' to allocate the cache at once"
    )
