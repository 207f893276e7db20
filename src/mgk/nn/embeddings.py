"""Token embeddings, and positions: added to the embedding (sinusoidal) or rotating queries and keys (rotary).

Rotary positions with mixtures. The rotation R_i of position i turns each pair of entries of a head by an angle
proportional to i. Queries and keys are rotated, R_i q_i and R_j k_j, so that their product depends on j - i only.

- Projected keys (MGK): every component key is rotated, and |R_i q_i - R_j k_jr|^2 depends on j - i only.
- Shifted keys (sMGK): the shift is added after the rotation, |R_i q_i - R_j k_j - b_r|^2. This keeps the factors
  u[i,r] = exp(R_i q_i.b_r / s2) and w[j,r], by which sMGK needs one product per pair (docs/math.md). Rotating k_j + b_r
  would leave a term q_i.R_(j-i) b_r for each pair. But if b_r has entries that are rotated, R_i q_i.b_r depends on the
  position i itself. So only a part of a head is rotated, and b_r is zero there: then the cost stays one product per
  pair, and the result depends on j - i only. No other b_r will do, because every R_i would have to leave it unchanged.
- The linear family: phi is not linear, so phi(R_i q_i).phi(R_j k_j) depends on i and j, with or without mixtures.

Longer texts than a model was trained on: `RotaryScaling` lowers its frequencies.

B batch, N positions, T tokens, V vocabulary, E width of the model, D width of a head, F frequencies.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from mgk.nn.packing import group_sums
from mgk.ops import arguments as check
from mgk.ops.dtensor import is_dtensor

if TYPE_CHECKING:
    from jaxtyping import Float, Int

BASE = 10_000.0
SMALL_VOCABULARY = 64


class Embedding(nn.Embedding):
    """`nn.Embedding(vocabulary, width)`, with a faster gradient for a small vocabulary: it does not sort the tokens."""

    def forward(self, input: Int[Tensor, "*b"]) -> Float[Tensor, "*b e"]:
        if self.num_embeddings > SMALL_VOCABULARY or torch.compiler.is_compiling() or is_dtensor(self.weight):
            return super().forward(input)
        return LookUp.apply(self.weight, input)  # type: ignore[no-untyped-call, no-any-return]


class LookUp(torch.autograd.Function):
    """table[index], for a table with few rows."""

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
        return group_sums(grad.reshape(-1, grad.shape[-1]), index.reshape(-1), ctx.vocabulary), None


class SinusoidalPositions(nn.Module):
    """[sin(i w), cos(i w)] with w = 10000^(-2a/E), a < E/2, as in Vaswani et al. (2017), with the sines first."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = check.check_count("width", width)
        if width % 2:
            raise ValueError(f"width: expected an even number for sinusoidal positions, got {width}")

    def forward(self, positions: Int[Tensor, "*b n"], dtype: torch.dtype) -> Float[Tensor, "*b n e"]:
        angle = positions[..., None] * _frequencies(self.width // 2, BASE, positions.device, dtype)
        return torch.cat((angle.sin(), angle.cos()), -1).to(dtype)


class Rotation(NamedTuple):
    """Cosines, and sines with the sign of the half of the head that they multiply; both (B,N,D) or (1,N,D)."""

    cos: Tensor
    sin: Tensor


@dataclass(frozen=True)
class RotaryScaling:
    """How rotary frequencies are lowered for texts that are `factor` times as long as `original_length` positions.

    - "linear": all frequencies are divided by `factor` (position interpolation).
    - "llama3": those with a wavelength of more than `original_length` positions are, those with less than a quarter of
      it are not, and between the two the change is gradual, as in Llama 3.1.
    - "yarn": the same with a wavelength of `original_length` and a 32nd of it, gradual in the number of the frequency;
      cosines and sines are multiplied by 0.1 log(factor) + 1, so scores are larger by its square, as in YaRN.

    "linear" does not need `original_length`.
    """

    kind: str
    factor: float
    original_length: int | None = None

    def __post_init__(self) -> None:
        check.check_choice("rope_type", self.kind, ("linear", "llama3", "yarn"))
        if self.kind != "linear" or self.original_length is not None:
            check.check_count("rope_original_length", self.original_length)
        if isinstance(self.factor, bool) or not isinstance(self.factor, int | float) or not self.factor >= 1:
            raise ValueError(f"rope_factor: expected a number of at least 1, got {self.factor!r}")

    @property
    def amplitude(self) -> float:
        """The factor of cosines and sines."""
        return 0.1 * math.log(self.factor) + 1 if self.kind == "yarn" else 1.0

    def apply(self, frequency: Float[Tensor, " f"], base: float) -> Float[Tensor, " f"]:
        """Return the frequencies of a model for longer texts."""
        if self.original_length is None or self.kind == "linear":
            return frequency / self.factor
        if self.kind == "llama3":
            turns = frequency * (self.original_length / (2 * math.pi))  # in a text of the original length
            kept = ((turns - 1) / (4 - 1)).clamp(0, 1)
        else:
            # The numbers of the frequencies that turn 32 times and once in a text of the original length.
            count = len(frequency)
            low, high = (
                count * math.log(self.original_length / (2 * math.pi * turns)) / math.log(base) for turns in (32, 1)
            )
            low, high = max(math.floor(low), 0), min(math.ceil(high), 2 * count - 1)
            number = torch.arange(count, device=frequency.device, dtype=frequency.dtype)
            kept = 1 - ((number - low) / max(high - low, 1e-3)).clamp(0, 1)
        return frequency * (kept + (1 - kept) / self.factor)


class RotaryPositions(nn.Module):
    """The rotations R_i of all positions of a batch, computed once for all layers.

    Entries a and a + D/2 of a head form a pair. The first `rotary_dim / 2` pairs are rotated with the frequencies
    base^(-2a/rotary_dim). The others have the frequency 0, which saves no time.
    """

    def __init__(
        self, head_dim: int, rotary_dim: int, *, base: float = BASE, scaling: RotaryScaling | None = None
    ) -> None:
        super().__init__()
        self.head_dim = check.check_count("head_dim", head_dim)
        self.rotary_dim = check_rotary_dim(rotary_dim, head_dim)
        self.base, self.scaling = check_base("base", base), scaling

    def forward(self, positions: Int[Tensor, "b n"], dtype: torch.dtype) -> Rotation:
        frequency, amplitude = _frequencies(self.rotary_dim // 2, self.base, positions.device, dtype), 1.0
        if self.scaling is not None:
            frequency, amplitude = self.scaling.apply(frequency, self.base), self.scaling.amplitude
        still = (0, (self.head_dim - self.rotary_dim) // 2)
        angle = positions[..., None] * frequency
        cos = nn.functional.pad(angle.cos() * amplitude, still, value=1.0).to(dtype)
        sin = nn.functional.pad(angle.sin() * amplitude, still).to(dtype)
        return Rotation(torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1))


def rotate(x: Float[Tensor, "b *h n d"], rotation: Rotation) -> Float[Tensor, "b *h n d"]:
    """Return R_i x_i for every head and component: x (B,H,N,D) or (B,H,M,N,D)."""
    heads = (1,) * (x.dim() - 3)
    cos, sin = (part.to(x.dtype).view(part.shape[0], *heads, *part.shape[1:]) for part in rotation)
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


def pad_shift(shift: Float[Tensor, "h m s"], head_dim: int) -> Float[Tensor, "h m d"]:
    """Pad a shift (H,M,D - rotary_dim) of the entries that are not rotated with zeros for those that are."""
    rotated = (head_dim - shift.shape[-1]) // 2
    return nn.functional.pad(shift.view(*shift.shape[:2], 2, -1), (rotated, 0)).flatten(-2)


def check_base(name: str, base: float) -> float:
    if isinstance(base, bool) or not isinstance(base, int | float) or not base > 1:
        raise ValueError(f"{name}: expected a number above 1, got {base!r}")
    return base


def check_rotary_dim(rotary_dim: object, head_dim: int) -> int:
    if isinstance(rotary_dim, bool) or not isinstance(rotary_dim, int):
        raise TypeError(f"rotary_dim: expected an integer, got {check.describe(rotary_dim)}")
    if not 0 <= rotary_dim <= head_dim or rotary_dim % 2 or (rotary_dim and head_dim % 2):
        raise ValueError(
            f"rotary_dim: expected an even number up to head_dim = {head_dim}, itself even, got {rotary_dim}"
        )
    return rotary_dim


def _frequencies(count: int, base: float, device: torch.device, dtype: torch.dtype) -> Float[Tensor, " f"]:
    """Return base^(-a/count) in float32 or wider. It is not a buffer: half precision would round it."""
    wide = torch.promote_types(dtype, torch.float32)
    return torch.exp(torch.arange(count, device=device, dtype=wide) * (-math.log(base) / max(count, 1)))
