"""The token encoder that the classifier, the matcher and the language model share.

B batch, N positions of this call, Nk positions so far, T rows of a packed batch, E width of the model.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from mgk.models.config import TokenConfig, TransformerConfig
from mgk.nn import (
    Block,
    MixtureAttention,
    PagedCache,
    RotaryPositions,
    Rotation,
    SinusoidalPositions,
    Stack,
    StackCache,
)
from mgk.nn.arguments import loads_its_weight
from mgk.nn.documents import Documents
from mgk.nn.embeddings import Embedding
from mgk.nn.packing import Packing
from mgk.ops import arguments as check
from mgk.ops.common import autocasts
from mgk.ops.dtensor import is_dtensor
from mgk.ops.ring import Ring

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int

EMBEDDING_STD = 0.02


def make_attention(
    config: TransformerConfig, *, causal: bool = False, window: int | None = None, rotary_dim: int = 0
) -> MixtureAttention:
    """Return the attention of one layer of a configuration."""
    return MixtureAttention(
        config.width,
        config.heads,
        variant=config.attention,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        num_components=config.components,
        e_step=config.e_step,
        prior=config.prior,
        causal=causal,
        window=window,
        dropout=config.weight_dropout,
        bias=config.attention_bias,
        feature_map=config.feature_map,
        learn_variance=config.learn_variance,
        prior_positions=config.prior_positions,
        prior_momentum=config.prior_momentum,
        means=config.means,
        mixing=config.mixing,
        rotary_dim=rotary_dim,
        qk_norm=config.qk_norm,
        impl=config.impl,
    )


def make_stack(config: TransformerConfig, *, causal: bool = False, rotary_dim: int = 0) -> Stack:
    """Return the layers of a configuration."""
    layers = [
        Block(
            make_attention(config, causal=causal, window=window, rotary_dim=rotary_dim),
            config.hidden,
            dropout=config.dropout,
            activation=config.activation,
            norm=config.norm,
            norm_type=config.norm_type,
            bias=config.mlp_bias,
        )
        for window in config.windows
    ]
    return Stack(layers, recompute=config.recompute)


class TokenEncoder(nn.Module):
    """Token embedding with learned, sinusoidal or rotary positions, and the layers.

    With sinusoidal positions the embedding is multiplied by sqrt(E), as in Vaswani et al. (2017).
    """

    def __init__(self, config: TokenConfig, *, causal: bool = False) -> None:
        super().__init__()
        self.max_length, self.width = config.max_length, config.width
        self.ring: Ring | None = None  # see mgk.models.context_parallel
        self.tokens = Embedding(config.embedding_rows, config.width)
        nn.init.normal_(self.tokens.weight, std=EMBEDDING_STD)
        self.positions: nn.Module
        rotary_dim = 0
        if config.positions == "learned":
            self.positions = nn.Embedding(config.max_length, config.width)
            nn.init.normal_(self.positions.weight, std=EMBEDDING_STD)
        elif config.positions == "sinusoidal":
            self.positions = SinusoidalPositions(config.width)
        else:
            rotary_dim = rotary_width(config.rotary_share, config.width_of_head)
            self.positions = RotaryPositions(
                config.width_of_head, rotary_dim, base=config.rope_theta, scaling=config.rotary_scaling
            )
        self.scale = math.sqrt(config.width) if config.positions == "sinusoidal" else 1.0
        self.dropout = nn.Dropout(config.dropout)
        self.stack = make_stack(config, causal=causal, rotary_dim=rotary_dim)

    def forward(
        self,
        tokens: Int[Tensor, "b n"] | Int[Tensor, " t"] | Float[Tensor, "b n e"],
        mask: Bool[Tensor, "b nk"] | None = None,
        positions: Int[Tensor, "b n"] | None = None,
        cache: StackCache | None = None,
        documents: Documents | None = None,
    ) -> Float[Tensor, "b n e"]:
        """Return the output of the last layer for every token.

        Args:
            tokens: (B,N), of any integer type. Or packed, (T,): the tokens where `mask` is True, one after the other,
                and any tokens behind them. Layers then do not compute padding. Or embeddings (B,N,E) as those of
                `self.tokens`, before positions are added.
            mask: (B,Nk), True for real tokens; with a cache it covers the cached tokens and the new ones.
            positions: (B,N), of the new tokens; None continues from the cache.
            cache: from `new_cache`, with the tokens before these.
            documents: the documents in the rows, instead of a mask and a cache. The positions of each start again.
        """
        x, packing = self.rows(tokens, mask, positions, cache, documents)
        return x if packing is None else packing.unpack(x)

    def rows(
        self,
        tokens: Int[Tensor, "b n"] | Int[Tensor, " t"] | Float[Tensor, "b n e"],
        mask: Bool[Tensor, "b nk"] | None = None,
        positions: Int[Tensor, "b n"] | None = None,
        cache: StackCache | None = None,
        documents: Documents | None = None,
    ) -> tuple[Float[Tensor, "b n e"] | Float[Tensor, "t e"], Packing | None]:
        """Like `forward`, but the output of packed tokens stays packed. The second result is their packing, or None."""
        start = 0 if cache is None else cache.length
        if documents is not None and (mask is not None or cache is not None or positions is None):
            raise ValueError("documents: expected positions beside them, and neither a mask nor a cache, got others")
        if positions is None and self.ring is not None:
            positions = self._ring_positions(self.ring, tokens, mask)
        if positions is None and cache is not None and isinstance(tokens, Tensor) and len(tokens) == cache.batch_size:
            positions = cache.positions(tokens.shape[-1])
        length = self._check(tokens, mask, positions, start)
        packing = Packing(mask, len(tokens)) if mask is not None and tokens.dim() == 1 else None
        x = tokens if tokens.is_floating_point() else look_up("tokens", self.tokens, tokens.long())
        x = x if self.scale == 1 else x * self.scale
        rotary = None
        if isinstance(self.positions, RotaryPositions):
            rotary = self._rotation(self.positions, positions, start, length, x)
        else:
            added = self._added_positions(positions, start, length, x)
            x = x + (added if packing is None else packing.pack(added.expand(*packing.shape, -1)))
        padding = None if mask is None or packing is not None else ~mask
        return self.stack(self.dropout(x), padding, rotary, cache, packing or documents), packing

    def new_cache(self, batch_size: int, capacity: int = 0) -> StackCache:
        """Return an empty cache for `forward`, with memory reserved for `capacity` positions."""
        return self.stack.new_cache(batch_size, capacity)

    def new_paged_cache(
        self, rows: int, num_pages: int, page_size: int = 64, max_length: int | None = None
    ) -> PagedCache:
        """Return an empty cache in pages, for rows of different lengths that come and go; see `mgk.nn.PagedCache`."""
        return self.stack.new_paged_cache(rows, num_pages, page_size, max_length)

    def _ring_positions(self, ring: Ring, tokens: Tensor, mask: Tensor | None) -> Tensor:
        if mask is not None:
            raise ValueError("positions: expected those of the tokens beside a mask in context parallelism, got None")
        tokens = check_integers("tokens", tokens, None)
        ring.chunk_length("tokens", tokens, 1)
        return ring.positions(tokens.shape[1], tokens.device).expand(tokens.shape)

    def _added_positions(self, positions: Tensor | None, start: int, length: int, like: Tensor) -> Tensor:
        """Return the position embeddings, (N,E) or (B,N,E)."""
        if isinstance(self.positions, nn.Embedding) and positions is None and not loads_its_weight(self.positions):
            return self.positions.weight[start : start + length]
        if positions is None:
            positions = torch.arange(start, start + length, device=like.device)
        if self.scale == 1:
            return look_up("positions", self.positions, positions)
        return self.positions(positions, like.dtype)  # type: ignore[no-any-return]

    def _rotation(
        self, module: RotaryPositions, positions: Tensor | None, start: int, length: int, like: Tensor
    ) -> Rotation:
        dtype = like.dtype
        if autocasts(like):  # the dtype of queries and keys, which are the results of products
            dtype = torch.get_autocast_dtype(like.device.type)
        if positions is None:
            positions = torch.arange(start, start + length, device=like.device)[None]
        return module(positions, dtype)  # type: ignore[no-any-return]

    def _check(self, tokens: object, mask: object, positions: object, start: int) -> int:
        """Check the arguments of `forward`, and return the number of positions N."""
        if isinstance(tokens, Tensor) and tokens.dim() == 1 and isinstance(mask, Tensor):
            shape = check_packed(tokens, mask, positions, start)
        else:
            if isinstance(tokens, Tensor) and tokens.is_floating_point() and tokens.dim() == 3:
                check.check_shape("tokens", tokens, "B,N,E", (*tokens.shape[:2], self.width))
                tokens = tokens[..., 0]
            else:
                tokens = check_integers("tokens", tokens, None)
            shape = tokens.shape[0], tokens.shape[1]  # len() would be a constant of an exported model
            check.check_mask("mask", mask, "B,Nk", (shape[0], start + shape[1]), tokens)
        if positions is not None:
            check_integers("positions", positions, shape)
        elif isinstance(self.positions, nn.Embedding) and (stop := start + shape[1]) > self.max_length:
            raise ValueError(f"tokens: expected at most {self.max_length} positions (max_length), got {stop}")
        return shape[1]


def look_up(name: str, table: nn.Module, numbers: Tensor) -> Tensor:
    """Return rows of an embedding. On a CPU an index out of range is an error that names the argument."""
    if torch.compiler.is_compiling():
        return table(numbers)  # type: ignore[no-any-return]
    size = len(table.weight)  # type: ignore[arg-type]
    try:
        # A table that is sharded returns zeros for a number that no process has.
        if is_dtensor(table.weight) and check.readable(numbers) and bool(((numbers < 0) | (numbers >= size)).any()):
            raise IndexError
        return table(numbers)  # type: ignore[no-any-return]
    except IndexError:
        found = f"{int(numbers.min())} to {int(numbers.max())}"
        raise ValueError(f"{name}: expected numbers from 0 to {size - 1}, got {found}") from None


def check_packed(tokens: Tensor, mask: Tensor, positions: object, start: int) -> tuple[int, int]:
    """Check packed tokens, and return B and N."""
    require_integers("tokens", tokens, "T,")
    if mask.dim() != 2:
        raise ValueError(f"mask: expected 2 dimensions (B,N) to go with packed tokens, got {check.describe(mask)}")
    check.check_mask("mask", mask, "B,N", tuple(mask.shape), tokens)
    if positions is not None or start:
        raise ValueError("tokens: expected (B,N) where there are positions or a cache, got packed tokens (T,)")
    if check.readable(mask) and (count := int(mask.sum())) > len(tokens):  # otherwise the gather fails
        raise ValueError(f"tokens: expected at least the {count} that the mask has, got {len(tokens)}")
    return mask.shape[0], mask.shape[1]


def count_real(mask: Bool[Tensor, "*b n"]) -> Int[Tensor, "*b n"]:
    """Return the positions 0, 1, ... of the real tokens, with padding on either side."""
    return (mask.cumsum(-1) - 1).clamp(min=0)


def require_integers(name: str, value: object, axes: str) -> Tensor:
    if not isinstance(value, Tensor) or value.is_floating_point() or value.dtype == torch.bool:
        got = f"dtype {value.dtype}" if isinstance(value, Tensor) else check.describe(value)
        raise TypeError(f"{name}: expected an integer tensor ({axes}), got {got}")
    return value


def check_integers(name: str, value: object, shape: tuple[int, int] | None) -> Tensor:
    value = require_integers(name, value, "B,N")
    if value.dim() != 2:
        raise ValueError(f"{name}: expected 2 dimensions (B,N), got {check.describe(value)}")
    if shape is not None:
        check.check_shape(name, value, "B,N", shape)
    return value


def rotary_width(share: float, head_dim: int) -> int:
    """Return how many entries of a head are rotated: an even number close to `share` of them."""
    if not 0 < share <= 1:
        raise ValueError(f"rotary_share: expected above 0 and at most 1, got {share}")
    return max(2, 2 * round(share * head_dim / 2))
