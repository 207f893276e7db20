"""Decoding caches: keys and values, those of a window, or the state of linear attention.

A cache is for inference: no gradient flows through it. `MixtureAttention.new_cache` returns the right kind.

B batch, H heads, M components, N positions so far, C capacity in positions, D width of a head, Dv width of a value.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mgk.ops import arguments as check
from mgk.ops.linear import LinearState

if TYPE_CHECKING:
    from jaxtyping import Float, Int

MIN_CAPACITY = 16  # positions: a smaller buffer would save less than growing it costs


class KeyValueCache:
    """Keys (B,H,N,D), or (B,H,M,N,D) for projected mixtures, and values (B,H,N,Dv), for softmax, MGK and sMGK.

    H counts the heads of keys and values, of which grouped queries have fewer than query heads. sMGK stores one key per
    position for every M, because its shifts are parameters. The capacity C doubles when it is full, so appending N
    positions copies O(N) numbers in total.
    """

    def __init__(self, batch_size: int, capacity: int = 0) -> None:
        self.batch_size, self.length, self._capacity = batch_size, 0, capacity
        self._key: Tensor | None = None
        self._value: Tensor | None = None

    def append(
        self, key: Float[Tensor, "b h *m n d"], value: Float[Tensor, "b h n dv"]
    ) -> tuple[Float[Tensor, "b h *m nk d"], Float[Tensor, "b h nk dv"]]:
        """Add new positions, and return keys and values of all positions (views, valid until the next call)."""
        start, stop = self.length, self.length + key.shape[-2]
        if stop > self._capacity:
            self._capacity = max(stop, 2 * self._capacity, MIN_CAPACITY)
        self._key = _write(self._key, key, start, self._capacity)
        self._value = _write(self._value, value, start, self._capacity)
        self.length = stop
        return self._key[..., :stop, :], self._value[..., :stop, :]

    def reorder(self, indices: Int[Tensor, " b"]) -> None:
        """Replace row b by row indices[b], for beam search."""
        check_indices(indices, self.batch_size)
        self.batch_size = len(indices)
        if self._key is not None and self._value is not None:
            self._key, self._value = self._key.index_select(0, indices), self._value.index_select(0, indices)

    def positions(self, new: int) -> Tensor | None:
        """The positions (B,N) of the next `new` tokens where rows differ in length; None: from `length` on."""
        return None

    def visible(self, mask: Tensor | None, window: int | None) -> tuple[Tensor | None, int | None]:
        """Return the mask (B,Nk) of the keys that `append` has returned, and the window of their last positions."""
        return mask, window

    @property
    def held(self) -> int:
        """How many positions are stored."""
        return self.length

    @property
    def bytes(self) -> int:
        """Bytes of the stored positions, which is what a step reads; the buffers may be twice as large."""
        held = [t[..., : self.held, :] for t in (self._key, self._value) if t is not None]
        return sum(t.numel() * t.element_size() for t in held)


class WindowCache(KeyValueCache):
    """Keys and values of the last `window` positions, the only ones that a window lets the next position see.

    The buffers have twice as many positions. Once they are full, the last ones move to the front, so appending N
    positions copies O(N) numbers in total.
    """

    def __init__(self, batch_size: int, window: int) -> None:
        super().__init__(batch_size)
        self.window = window
        self._stop = 0  # end of the positions in the buffers
        self._returned = 0  # how many positions `append` has returned

    def append(
        self, key: Float[Tensor, "b h *m n d"], value: Float[Tensor, "b h n dv"]
    ) -> tuple[Float[Tensor, "b h *m nk d"], Float[Tensor, "b h nk dv"]]:
        """Add new positions, and return keys and values of these and of the `window` - 1 before them."""
        before, new = min(self.length, self.window - 1), key.shape[-2]
        self._returned, self.length = before + new, self.length + new
        if self._stop + new <= 2 * self.window:
            stop = self._stop + new
            if stop > self._capacity:
                self._capacity = min(2 * self.window, max(stop, 2 * self._capacity, MIN_CAPACITY))
            self._key = _write(self._key, key, self._stop, self._capacity)
            self._value = _write(self._value, value, self._stop, self._capacity)
            self._stop = stop
            return self._key[..., stop - before - new : stop, :], self._value[..., stop - before - new : stop, :]
        self._capacity, kept = 2 * self.window, min(before + new, self.window)
        key, value = _joined(self._key, key, self._stop, before), _joined(self._value, value, self._stop, before)
        self._key = _write(self._key, key[..., -kept:, :], 0, self._capacity)
        self._value = _write(self._value, value[..., -kept:, :], 0, self._capacity)
        self._stop = kept
        return key, value

    def visible(self, mask: Tensor | None, window: int | None) -> tuple[Tensor | None, int | None]:
        return None if mask is None else mask[:, -self._returned :], window

    @property
    def held(self) -> int:
        return min(self.length, self.window)


class StateCache:
    """The sums of linear attention over the positions so far (`LinearState`); their size does not grow."""

    def __init__(self, batch_size: int) -> None:
        self.batch_size, self.length = batch_size, 0
        self.state: LinearState | None = None

    def advance(self, state: LinearState, positions: int) -> None:
        """Store the state after `positions` more positions."""
        self.state, self.length = state, self.length + positions

    def reorder(self, indices: Int[Tensor, " b"]) -> None:
        """Replace row b by row indices[b], for beam search."""
        check_indices(indices, self.batch_size)
        self.batch_size = len(indices)
        if self.state is not None:
            self.state = LinearState(*(part.index_select(0, indices) for part in self.state))

    @property
    def bytes(self) -> int:
        return 0 if self.state is None else sum(part.numel() * part.element_size() for part in self.state)


class StackCache:
    """The caches of all layers of a model."""

    def __init__(self, layers: list[KeyValueCache | StateCache]) -> None:
        self.layers = layers

    @property
    def batch_size(self) -> int:
        return self.layers[0].batch_size

    @property
    def length(self) -> int:
        """Positions so far."""
        return self.layers[0].length

    def positions(self, new: int) -> Tensor | None:
        """The positions (B,N) of the next `new` tokens where rows differ in length; None: from `length` on."""
        first = self.layers[0]
        return first.positions(new) if isinstance(first, KeyValueCache) else None

    def reorder(self, indices: Int[Tensor, " b"]) -> None:
        """Replace row b by row indices[b], for beam search."""
        for layer in self.layers:
            layer.reorder(indices)

    @property
    def bytes(self) -> int:
        return sum(layer.bytes for layer in self.layers)


def check_indices(indices: object, batch_size: int) -> None:
    if not isinstance(indices, Tensor) or indices.dim() != 1 or indices.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"indices: expected an integer tensor (B,), got {check.describe(indices)}")
    if indices.device.type == "cpu" and not bool(((indices >= 0) & (indices < batch_size)).all()):
        raise ValueError(f"indices: expected numbers in [0, {batch_size}), got {indices.tolist()}")


def _joined(buffer: Tensor | None, new: Tensor, stop: int, before: int) -> Tensor:
    """The last `before` positions of a buffer (...,C,D) that ends at `stop`, and the new ones (...,n,D)."""
    new = new.detach()
    if buffer is None or not before:
        return new
    _check(buffer, new)
    return torch.cat([buffer[..., stop - before : stop, :], new], -2)


def check_same_dtype(buffer: Tensor, new: Tensor) -> None:
    if buffer.dtype != new.dtype:
        raise TypeError(f"cache: expected the dtype of the cached positions, {buffer.dtype}, got {new.dtype}")


def _check(buffer: Tensor, new: Tensor) -> None:
    check_same_dtype(buffer, new)
    check.check_shape("cache", new, "B,H,...,N,D", (*buffer.shape[:-2], *new.shape[-2:-1], buffer.shape[-1]))


def _write(buffer: Tensor | None, new: Tensor, start: int, capacity: int) -> Tensor:
    """Write `new` (...,n,D) at position `start` of a buffer (...,C,D), which is replaced if it is too small."""
    new = new.detach()
    if buffer is None:
        buffer = new.new_empty((*new.shape[:-2], capacity, new.shape[-1]))
    _check(buffer, new)
    if buffer.shape[-2] < capacity:
        larger = buffer.new_empty((*buffer.shape[:-2], capacity, buffer.shape[-1]))
        larger[..., :start, :] = buffer[..., :start, :]
        buffer = larger
    buffer[..., start : start + new.shape[-2], :] = new
    return buffer
