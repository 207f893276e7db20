"""Keys and values in the quantised cache of Transformers: `cache_implementation="quantized"`.

B batch, H heads of keys and values, M components, N positions, D width of a head, Dv width of a value.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor
from transformers.cache_utils import QuantizedCache

from mgk.nn import KeyValueCache, StackCache, StateCache
from mgk.nn.cache import check_indices

if TYPE_CHECKING:
    from jaxtyping import Float, Int


class QuantisedKeyValueCache(KeyValueCache):
    """A `KeyValueCache` whose numbers are in a quantised layer of Transformers, which reads them back for each step."""

    def __init__(self, batch_size: int, layer: Any) -> None:
        super().__init__(batch_size)
        self.layer = layer

    def append(
        self, key: Float[Tensor, "b h *m n d"], value: Float[Tensor, "b h n dv"]
    ) -> tuple[Float[Tensor, "b h *m nk d"], Float[Tensor, "b h nk dv"]]:
        """Add new positions, and return keys and values of all positions; those of the first call are exact."""
        heads = key.shape[1:-2]  # the layer concatenates tensors with four dimensions: components count as heads
        keys, values = self.layer.update(key.flatten(1, -3).detach(), value.detach())
        self.length += key.shape[-2]
        return keys.unflatten(1, heads), values

    def reorder(self, indices: Int[Tensor, " b"]) -> None:
        """Replace row b by row indices[b], for beam search."""
        check_indices(indices, self.batch_size)
        self.batch_size = len(indices)
        self.layer.reorder_cache(indices)

    @property
    def bytes(self) -> int:
        """Bytes of the stored positions, with the scales of the quantised ones."""
        layer: Any = self.layer
        return number_of_bytes((layer._quantized_keys, layer._quantized_values, layer.keys, layer.values))


def quantised(stack: StackCache, cache: QuantizedCache) -> StackCache:
    """Return the caches of all layers with their numbers in the layers of an empty `QuantizedCache`."""
    if any(isinstance(layer, StateCache) for layer in stack.layers):
        raise ValueError("past_key_values: the linear family has no keys and values to quantise; leave it out")
    pairs = zip(stack.layers, cache.layers, strict=True)
    return StackCache([QuantisedKeyValueCache(inner.batch_size, layer) for inner, layer in pairs])


def number_of_bytes(stored: object) -> int:
    """Of a tensor, of the parts of a quantised one, or of tuples and dictionaries of them."""
    if isinstance(stored, Tensor):
        if type(stored) is not Tensor and hasattr(stored, "__tensor_flatten__"):
            return sum(number_of_bytes(getattr(stored, name)) for name in stored.__tensor_flatten__()[0])
        return stored.numel() * stored.element_size()
    parts = stored.values() if isinstance(stored, dict) else stored if isinstance(stored, tuple | list) else ()
    return sum(map(number_of_bytes, parts))
