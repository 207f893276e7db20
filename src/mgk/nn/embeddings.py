"""Tables of few symbols; positions: added to the embedding (sinusoidal), or a rotation of queries and keys (rotary).

Rotary positions and mixtures. A position i turns the two numbers of each plane of a head by an angle proportional to i,
R_i. Queries and keys are turned, R_i q_i and R_j k_j, so that their product depends on j - i alone. With mixtures:

- projected keys (MGK): every component key is turned, |R_i q_i - R_j k_jr|^2, and depends on j - i alone;
- shifted keys (sMGK): the shift is added after the turn, |R_i q_i - R_j k_j - b_r|^2. That keeps the factors
  u[i,r] = exp(R_i q_i.b_r / s2) and w[j,r] that make sMGK cost one product per pair (docs/math.md); turning k_j + b_r
  would leave a term q_i.R_(j-i) b_r that belongs to the pair. But where b_r lies in a plane that turns, R_i q_i.b_r
  depends on the position i itself. So b_r lives in the planes that do not turn, and only a part of a head turns: then
  both hold, one product per pair and j - i alone. No other b_r will do: every R_i would have to leave it in place.
- the linear family: phi is not linear, so phi(R_i q_i).phi(R_j k_j) is a function of i and j, with or without mixtures.

B batch, N positions, T tokens, V symbols, E width of the model, D width of a head.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from mgk.nn.packing import sums_of
from mgk.ops import arguments as check

if TYPE_CHECKING:
    from jaxtyping import Float, Int

BASE = 10_000.0
FEW = 64


class Embedding(nn.Embedding):
    """`nn.Embedding(vocabulary, width)`; the gradient of a table of few symbols needs no sorting of the tokens."""

    def forward(self, input: Int[Tensor, "*b"]) -> Float[Tensor, "*b e"]:
        if self.num_embeddings > FEW or torch.compiler.is_compiling():  # which has a way of its own
            return super().forward(input)
        return LookUp.apply(self.weight, input)  # type: ignore[no-untyped-call, no-any-return]


class LookUp(torch.autograd.Function):
    """table[index] of V rows, where V is small."""

    generate_vmap_rule = True

    @staticmethod
    def forward(table: Tensor, index: Tensor) -> Tensor:
        return nn.functional.embedding(index, table)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        table, index = inputs
        ctx.save_for_backward(index)
        ctx.vocabulary = len(table)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (index,) = ctx.saved_tensors
        return sums_of(grad.reshape(-1, grad.shape[-1]), index.reshape(-1), ctx.vocabulary), None


class SinusoidalPositions(nn.Module):
    """[sin(i w), cos(i w)] with w = 10000^(-2a/E), a < E/2, as Vaswani et al. (2017) have it, the sines first."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = check.check_count("width", width)
        if width % 2:
            raise ValueError(f"width: expected an even number for sinusoidal positions, got {width}")

    def forward(self, positions: Int[Tensor, "*b n"], dtype: torch.dtype) -> Float[Tensor, "*b n e"]:
        angle = _angles(positions, self.width // 2, dtype)
        return torch.cat((angle.sin(), angle.cos()), -1).to(dtype)


class Rotation(NamedTuple):
    """Cosines, and sines with the sign of the half of a head that they multiply: both (B,N,D), or (1,N,D)."""

    cos: Tensor
    sin: Tensor


class RotaryPositions(nn.Module):
    """R_i for all positions of a batch, once for all layers.

    Entry a of a head turns with entry a + D/2. Only the first `rotary_dim / 2` of these planes turn, with frequencies
    10000^(-2a/rotary_dim); the others have the frequency 0, and cost what they would cost if they turned.
    """

    def __init__(self, head_dim: int, rotary_dim: int) -> None:
        super().__init__()
        self.head_dim = check.check_count("head_dim", head_dim)
        self.rotary_dim = check_rotary_dim(rotary_dim, head_dim)

    def forward(self, positions: Int[Tensor, "b n"], dtype: torch.dtype) -> Rotation:
        angle = _angles(positions, self.rotary_dim // 2, dtype)
        angle = nn.functional.pad(angle, (0, (self.head_dim - self.rotary_dim) // 2))
        cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
        return Rotation(torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1))


def rotate(x: Float[Tensor, "b *h n d"], rotation: Rotation) -> Float[Tensor, "b *h n d"]:
    """R_i x_i for every head, and component: x (B,H,N,D) or (B,H,M,N,D)."""
    heads = (1,) * (x.dim() - 3)
    cos, sin = (part.to(x.dtype).view(len(part), *heads, *part.shape[1:]) for part in rotation)
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


def still_part(shift: Float[Tensor, "h m s"], head_dim: int) -> Float[Tensor, "h m d"]:
    """A shift of the planes that do not turn, (H,M,D - rotary_dim), as one of the whole head."""
    turning = (head_dim - shift.shape[-1]) // 2
    return nn.functional.pad(shift.view(*shift.shape[:2], 2, -1), (turning, 0)).flatten(-2)


def check_rotary_dim(rotary_dim: object, head_dim: int) -> int:
    if isinstance(rotary_dim, bool) or not isinstance(rotary_dim, int):
        raise TypeError(f"rotary_dim: expected an integer, got {check.describe(rotary_dim)}")
    if not 0 <= rotary_dim <= head_dim or rotary_dim % 2 or (rotary_dim and head_dim % 2):
        raise ValueError(
            f"rotary_dim: expected an even number up to head_dim = {head_dim}, itself even, got {rotary_dim}"
        )
    return rotary_dim


def _angles(positions: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    """i * 10000^(-a/count), in float32 at least: no buffer that a model in half precision would round."""
    wide = torch.promote_types(dtype, torch.float32)
    frequency = torch.exp(torch.arange(count, device=positions.device, dtype=wide) * (-math.log(BASE) / max(count, 1)))
    return positions[..., None] * frequency
