"""Generation with a static cache: every step has the same shape, so a GPU can replay it from one CUDA graph.

A step reads the full capacity of the cache, and a mask says which positions are filled. No argument of the step then
depends on a number on the host, so a CUDA graph can hold all its kernel launches, which for a single token take the
host longer than the GPU. torch.compile makes fewer kernels of them. The MGK and sMGK kernels skip masked positions;
PyTorch's softmax attention has slower kernels with a mask.

B batch, N positions so far, C capacity of the cache in positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mgk.models import LanguageModel
from mgk.nn import KeyValueCache, StackCache
from mgk.ops.graph import capture

if TYPE_CHECKING:
    from jaxtyping import Float, Int


class FixedShapeCache(KeyValueCache):
    """The buffers of a cache at their full capacity: `append` overwrites one position.

    Args:
        key: (B,H,C,D) or (B,H,M,C,D).
        value: (B,H,C,Dv).
        place: (1,), the position to write, on the device of the cache.
    """

    def __init__(self, key: Tensor, value: Tensor, place: Int[Tensor, " one"]) -> None:
        super().__init__(key.shape[0], key.shape[-2])
        self._key, self._value, self.place = key, value, place
        self.length = self._capacity - 1  # the attention adds the new position and so sees C keys

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        assert self._key is not None
        assert self._value is not None
        self._key.index_copy_(-2, self.place, key)
        self._value.index_copy_(-2, self.place, value)
        return self._key, self._value

    def visible(self, mask: Tensor | None, window: int | None) -> tuple[Tensor | None, int | None]:
        """A window ends at `place`, not at the end of the buffers: the mask (B,C) has to hide what is before it."""
        if mask is None or window is None:
            return mask, window
        return mask & (torch.arange(self._capacity, device=mask.device) > self.place - window), None


def decode(
    model: LanguageModel, buffers: list[tuple[Tensor, Tensor]], tokens: Tensor, mask: Tensor, positions: Tensor,
    place: Tensor,
) -> Float[Tensor, "b 1 v"]:  # fmt: skip
    """Write one token (B,1) at `place` of every layer's buffers, and return the logits of the next one."""
    cache = StackCache([FixedShapeCache(key, value, place) for key, value in buffers])
    return model(tokens, mask, positions=positions, cache=cache, last=1)  # type: ignore[no-any-return]


class StaticStep:
    """One decoding step of fixed shape. On a GPU the first step is launched, the second captured, others replay it.

    Args:
        model: the language model that filled the caches.
        layers: the cache of each layer, with a prompt in it.
        graph: capture and replay a CUDA graph on a GPU.
        compile: compile the step with torch.compile.
    """

    def __init__(
        self, model: LanguageModel, layers: list[KeyValueCache], *, graph: bool = True, compile: bool = False
    ) -> None:
        self.model, self.layers = model, layers
        self.shape = (layers[0].batch_size, layers[0]._capacity)
        self.device = buffers_of(layers[0])[0].device
        self.graph = graph and self.device.type == "cuda"
        self.decode = compiled_decode() if compile else decode
        self.tokens = torch.zeros(self.shape[0], 1, dtype=torch.long, device=self.device)
        self.positions = torch.zeros_like(self.tokens)
        self.mask = torch.zeros(self.shape, dtype=torch.bool, device=self.device)
        self.place = torch.zeros(1, dtype=torch.long, device=self.device)
        self._filled = 0
        self._buffers: list[tuple[Tensor, Tensor]] = []
        self._captured: tuple[torch.cuda.CUDAGraph, Tensor] | None = None
        for layer in layers:
            for buffer in buffers_of(layer):  # uninitialised memory may be NaN, and 0 * NaN is NaN
                buffer[..., layer.length :, :].zero_()

    def fits(self, layers: list[KeyValueCache]) -> bool:
        """Whether the step was built for these caches and they still have the same batch size and capacity."""
        same = all(a is b for a, b in zip(layers, self.layers, strict=True))
        return same and (layers[0].batch_size, layers[0]._capacity) == self.shape

    def __call__(
        self, tokens: Int[Tensor, "b 1"], mask: Tensor | None, positions: Int[Tensor, "b 1"] | None
    ) -> Float[Tensor, "b 1 v"]:
        """Append a token and return the logits of the next one.

        Args:
            tokens: (B,1).
            mask: (B,N), 0 for padding, over the tokens so far and this one; None means no padding.
            positions: (B,1); None counts the tokens that are not padding.
        """
        length = self.layers[0].length
        if length < self._filled:  # the cache was cropped
            self.mask.zero_()
        self._filled = length + 1
        self.mask[:, : self._filled] = True if mask is None else mask
        self.positions.copy_(self.mask.sum(1, keepdim=True) - 1 if positions is None else positions)
        self.tokens.copy_(tokens)
        self.place.fill_(length)
        logits = self._logits()
        for layer in self.layers:
            layer.length += 1
        return logits

    def _logits(self) -> Tensor:
        buffers = [buffers_of(layer) for layer in self.layers]
        same = len(self._buffers) == len(buffers) and all(
            a is b for old, new in zip(self._buffers, buffers, strict=True) for a, b in zip(old, new, strict=True)
        )
        self._buffers = buffers
        if not same or not self.graph:  # beam search replaces the buffers at every step
            self._captured = None
            return self._compute()
        if self._captured is None:
            self._captured = capture(self._compute, self.device, advice="add disable_compile=True")
        self._captured[0].replay()
        return self._captured[1].clone()

    @torch.no_grad()
    def _compute(self) -> Tensor:
        buffers = [buffers_of(layer) for layer in self.layers]
        return self.decode(self.model, buffers, self.tokens, self.mask, self.positions, self.place)


@cache
def compiled_decode() -> Callable[..., Tensor]:
    """One function for all caches, compiled once for all batch sizes above one and all capacities."""
    return torch.compile(decode, dynamic=True)


def buffers_of(cache: KeyValueCache) -> tuple[Tensor, Tensor]:
    """Keys and values of a cache at its full capacity."""
    assert cache._key is not None  # there was a prompt
    assert cache._value is not None
    return cache._key, cache._value
