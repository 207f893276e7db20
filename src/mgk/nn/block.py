"""A transformer layer around any attention, and a stack of layers.

B batch, N positions of this call, Nk positions so far, T rows of a packed batch, E width of the model, D width of a
head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mgk.nn.attention import MixtureAttention
from mgk.nn.cache import KeyValueCache, StackCache, StateCache
from mgk.nn.documents import Documents
from mgk.nn.dropout import relu_dropout
from mgk.nn.embeddings import Rotation
from mgk.nn.norm import make_norm
from mgk.nn.packing import Packing
from mgk.nn.pages import PagedCache
from mgk.ops import arguments as check
from mgk.variants import LINEAR

if TYPE_CHECKING:
    from jaxtyping import Bool, Float

ACTIVATIONS: dict[str, type[nn.Module]] = {"gelu": nn.GELU, "relu": nn.ReLU, "swiglu": nn.SiLU}
GATED = ("swiglu",)


class Block(nn.Module):
    """Attention and a feed-forward network f, each with a residual connection.

        norm="pre":   x + f(Norm(x))      norm="post":   Norm(x + f(x))

    Args:
        attention: the attention module; its `embed_dim` is E.
        hidden: width inside the feed-forward network.
        dropout: probability of dropout before each sum and inside the feed-forward network.
        activation: "gelu" or "relu", down(activation(up(x))), or "swiglu", down(silu(gate(x)) * up(x)).
        norm: "pre" or "post".
        norm_type: "layer" (LayerNorm) or "rms" (RMSNorm).
        bias: whether the feed-forward network has biases.
    """

    def __init__(
        self, attention: MixtureAttention, hidden: int, *, dropout: float = 0.0, activation: str = "gelu", norm: str,
        norm_type: str = "layer", bias: bool = True,
    ) -> None:  # fmt: skip
        super().__init__()
        width = attention.embed_dim
        self.norm = check.check_choice("norm", norm, ("pre", "post"))
        self.norm_type = norm_type
        self.attention = attention
        self.attention_norm = make_norm(norm_type, width)
        self.feed_forward_norm = make_norm(norm_type, width)
        self.up = nn.Linear(width, check.check_count("hidden", hidden), check.check_flag("bias", bias))
        self.activation = ACTIVATIONS[check.check_choice("activation", activation, ACTIVATIONS)]()
        self.down = nn.Linear(hidden, width, bias)
        self.gate = nn.Linear(width, hidden, bias) if activation in GATED else None
        self.dropout = nn.Dropout(check.check_probability("dropout", dropout))

    def forward(
        self,
        x: Float[Tensor, "b n e"] | Float[Tensor, "t e"],
        padding: Bool[Tensor, "b nk"] | None = None,
        rotary: Rotation | None = None,
        cache: KeyValueCache | StateCache | None = None,
        packing: Packing | Documents | None = None,
    ) -> Float[Tensor, "b n e"] | Float[Tensor, "t e"]:
        """Apply the layer.

        Args:
            x: (B,N,E), or (T,E) with a `Packing`.
            padding: (B,Nk), True where a position is padding; the output there is undefined.
            rotary: the rotation of the positions, for an attention with rotary positions.
            cache: from `attention.new_cache`, with the positions before x.
            packing: describes a packed batch, or the documents in x; it replaces `padding`.
        """
        if self.norm == "pre":
            x = x + self.dropout(self._attend(self.attention_norm(x), padding, rotary, cache, packing))
            return x + self.dropout(self._feed_forward(self.feed_forward_norm(x)))  # type: ignore[no-any-return]
        x = self.attention_norm(x + self.dropout(self._attend(x, padding, rotary, cache, packing)))
        return self.feed_forward_norm(x + self.dropout(self._feed_forward(x)))  # type: ignore[no-any-return]

    def _attend(
        self, x: Tensor, padding: Tensor | None, rotary: Rotation | None, cache: KeyValueCache | StateCache | None,
        packing: Packing | Documents | None,
    ) -> Tensor:  # fmt: skip
        if packing is not None:
            return self.attention(x, rotary=rotary, packing=packing)[0]  # type: ignore[no-any-return]
        queries = None
        # The linear family saves nothing by skipping queries, and the single query of a decoding step is never padding.
        if padding is not None and self.attention.variant not in LINEAR and x.shape[1] > 1:
            queries = padding if padding.shape[1] == x.shape[1] else padding[:, -x.shape[1] :]
        output, _ = self.attention(x, key_padding_mask=padding, query_padding_mask=queries, rotary=rotary, cache=cache)
        return output  # type: ignore[no-any-return]

    def _feed_forward(self, x: Tensor) -> Tensor:
        p = self.dropout.p if self.dropout.training else 0.0
        if self.gate is not None:
            x = self.dropout(self.activation(self.gate(x)) * self.up(x))
        elif p > 0 and type(self.activation) is nn.ReLU and x.is_cuda and torch.compiler.is_compiling():
            x = relu_dropout(self.up(x), p)  # torch.compile fuses it into one pass over memory
        else:
            x = self.dropout(self.activation(self.up(x)))
        return self.down(x)  # type: ignore[no-any-return]


class Stack(nn.Module):
    """A sequence of layers, with a final normalisation if they have norm="pre".

    Args:
        layers: the layers, all of one kind.
        recompute: activation checkpointing: in training keep only the input of each layer, and compute the rest again
            in backward.
    """

    def __init__(self, layers: list[Block], *, recompute: bool = False) -> None:
        super().__init__()
        if not layers:
            raise ValueError("layers: expected at least one Block, got none")
        self.layers = nn.ModuleList(layers)
        first = layers[0]
        pre = first.norm == "pre"
        self.final_norm = make_norm(first.norm_type, first.attention.embed_dim) if pre else nn.Identity()
        self.recompute = check.check_flag("recompute", recompute)

    def new_cache(self, batch_size: int, capacity: int = 0) -> StackCache:
        """Return an empty cache for `forward`, with memory reserved for `capacity` positions."""
        return StackCache([layer.attention.new_cache(batch_size, capacity) for layer in self._blocks()])

    def new_paged_cache(
        self, rows: int, num_pages: int, page_size: int = 64, max_length: int | None = None
    ) -> PagedCache:
        """Return an empty cache in pages, for rows of different lengths that come and go.

        Args:
            rows: how many texts it can hold at a time.
            num_pages: pages of all rows together.
            page_size: positions of a page. On a GPU a multiple of 64 is fastest.
            max_length: positions of the longest row; None is as many as all pages have.
        """
        attentions = [layer.attention for layer in self._blocks()]
        if (variant := attentions[0].variant) in LINEAR:
            raise ValueError(f"variant: expected softmax, mgk or smgk for a cache in pages, got {variant!r}")
        windows = [attention.window for attention in attentions]
        return PagedCache(windows, rows, num_pages, page_size, max_length, attentions[0].query_proj.weight.device)

    def forward(
        self,
        x: Float[Tensor, "b n e"] | Float[Tensor, "t e"],
        padding: Bool[Tensor, "b nk"] | None = None,
        rotary: Rotation | None = None,
        cache: StackCache | None = None,
        packing: Packing | Documents | None = None,
    ) -> Float[Tensor, "b n e"] | Float[Tensor, "t e"]:
        """Apply all layers; the arguments are those of `Block.forward`."""
        for index, layer in enumerate(self._blocks()):
            inputs = x, padding, rotary, None if cache is None else cache.layers[index], packing
            recompute = self.recompute and self.training and cache is None
            x = recomputed(layer, layer.attention, inputs) if recompute else layer(*inputs)
        return self.final_norm(x)  # type: ignore[no-any-return]

    def _blocks(self) -> Iterator[Block]:
        return iter(self.layers)  # type: ignore[arg-type]


def recomputed(layer: Callable[..., Tensor], attention: MixtureAttention, inputs: tuple[Any, ...]) -> Tensor:
    """Apply a layer that keeps only its inputs, and compute it again in backward, without another M-step."""
    if not attention.em_buffers:
        return checkpoint(layer, *inputs, use_reentrant=False)  # type: ignore[no-any-return]
    before = {name: getattr(attention, name).clone() for name in attention.em_buffers}

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), _restored(attention, before)

    return checkpoint(layer, *inputs, use_reentrant=False, context_fn=contexts)  # type: ignore[no-any-return]


@contextmanager
def _restored(attention: MixtureAttention, before: dict[str, Tensor]) -> Iterator[None]:
    """Use the buffers of the first forward pass while it is repeated, without another M-step."""
    now = {name: getattr(attention, name) for name in before}
    _set(attention, before, m_step_enabled=False)
    try:
        yield
    finally:
        _set(attention, now, m_step_enabled=True)


def _set(attention: MixtureAttention, buffers: dict[str, Tensor], *, m_step_enabled: bool) -> None:
    for name, value in buffers.items():
        setattr(attention, name, value)
    attention.m_step_enabled = m_step_enabled
