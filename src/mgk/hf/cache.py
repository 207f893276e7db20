"""The caches of `mgk.nn` as Transformers' `generate` handles them.

A layer of softmax, MGK or sMGK grows with the text; one of the linear family (MLK) has one size however long the text.
"""
# mypy: disallow-untyped-calls=False, disallow-untyped-decorators=False
# Transformers is typed in part.

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache

from mgk.hf.static import RoomCache, StaticStep
from mgk.models import LanguageModel
from mgk.nn import KeyValueCache, StackCache, StateCache


class MGKCacheLayer(CacheLayerMixin):
    """One layer of an `mgk.nn.StackCache`: the attention fills it, `generate` reorders, repeats and crops it."""

    def __init__(self, inner: KeyValueCache | StateCache) -> None:
        super().__init__()
        self.inner = inner
        self.is_croppable = isinstance(inner, KeyValueCache)
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: the attention makes room when it appends."""

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
        raise ValueError("cache_implementation: expected 'dynamic' or 'static', got an offloaded one")

    prefetch = offload

    def reset(self) -> None:
        """Empty, with the room kept."""
        kept = self.inner
        kept.length = 0
        if isinstance(kept, StateCache):
            kept.state = None

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.inner.reorder(beam_idx)

    def activate_past_recording(self) -> None:
        """Asked for where tokens may be taken back, as with an assistant."""
        if isinstance(self.inner, StateCache):
            raise ValueError("cache: the linear family keeps one state and cannot go back; generate without assistant")

    def crop(self, tokens_to_remove: int) -> None:
        """Forget so many positions, given as a negative number; or keep so many, as it was in the first releases."""
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
        if isinstance(self.inner, StateCache):
            return None if self.inner.state is None else self.inner.state[0].device
        return None if self.inner._key is None else self.inner._key.device


class MGKCache(Cache):
    """The cache of a model of `mgk.hf`; `bytes` is what it holds.

    Args:
        stack: of `new_cache`, empty.
        room: reserve it for so many positions at once, and take single tokens in steps of one shape (`mgk.hf.static`).
        graph: hold such a step in a CUDA graph, on a GPU.
    """

    def __init__(self, stack: StackCache, room: int = 0, *, graph: bool = True) -> None:
        layers = stack.layers
        if room:
            layers = [RoomCache(x.batch_size, room) if isinstance(x, KeyValueCache) else x for x in layers]
        super().__init__(layers=[MGKCacheLayer(inner) for inner in layers])
        self.graph = graph
        self._step: StaticStep | None = None

    def step(self, model: LanguageModel, length: int) -> StaticStep | None:
        """What takes the next `length` tokens, if it is one, its room is reserved and something is there before it."""
        layers = [layer for layer in stack_of(self).layers if isinstance(layer, RoomCache)]
        if length != 1 or len(layers) != len(self.layers) or not 0 < layers[0].length < layers[0].room:
            return None
        if self._step is None or not self._step.fits(layers):
            self._step = StaticStep(model, layers, graph=self.graph)
        return self._step

    @property
    def bytes(self) -> int:
        return sum(layer.bytes for layer in stack_of(self).layers)


def stack_of(cache: Cache) -> StackCache:
    """What the model itself is called with."""
    return StackCache([cast(MGKCacheLayer, layer).inner for layer in cache.layers])


def adopt(cache: object, fresh: Callable[[], StackCache]) -> Cache:
    """A cache that the model can use: one of ours as it is, an empty `DynamicCache` with our layers put into it."""
    if isinstance(cache, Cache) and cache.layers and all(isinstance(layer, MGKCacheLayer) for layer in cache.layers):
        return cache
    if isinstance(cache, DynamicCache) and not cache.get_seq_length() and not cache.offloading:
        cache.layers = MGKCache(fresh()).layers
        cache.layer_class_to_replicate = None
        return cache
    kind = type(cache).__name__
    raise TypeError(
        f"past_key_values: expected an MGKCache or an empty DynamicCache, got {kind}; leave it out, or use "
        "cache_implementation='static' to reserve its room at once"
    )
