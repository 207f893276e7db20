"""Join the results of attention over disjoint sets of keys.

B batch, H heads, Nq queries, Dv width of a value, Tq queries of all packed sequences.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mgk.ops import arguments as check
from mgk.ops.common import compute_dtype, without_autocast

if TYPE_CHECKING:
    from jaxtyping import Float


def merge_attention(
    *parts: tuple[
        Float[Tensor, "b h nq dv"] | Float[Tensor, "tq h dv"], Float[Tensor, "b h nq"] | Float[Tensor, "h tq"]
    ],
) -> tuple[Float[Tensor, "b h nq dv"] | Float[Tensor, "tq h dv"], Float[Tensor, "b h nq"] | Float[Tensor, "h tq"]]:
    """Join (output, lse) of the same queries over disjoint sets of keys: the result over all of these keys.

        lse = log sum_p exp lse_p,   output = sum_p exp(lse_p - lse) output_p

    Each part is what `mgk_attention` or `smgk_attention` returns with `return_lse=True`, or one of the functions for
    packed sequences. The result is exact and differentiable, so parts can come from other devices, from a cache, or
    from another mixture. A query that sees no key in any part gets zeros and lse = -inf.
    """
    outputs, lses = check_parts(parts)
    dtype = lses[0].dtype
    with without_autocast(lses[0]):
        lse = torch.stack(lses)
        largest = lse.detach().amax(0)
        largest = largest.masked_fill(largest == -torch.inf, 0)
        weights = (lse - largest).exp()
        total = weights.sum(0)
        empty = total == 0
        shares = weights / total.masked_fill(empty, 1)
        if outputs[0].dim() == 3:  # packed
            shares = shares.mT
        output = sum(share[..., None] * part.to(dtype) for share, part in zip(shares, outputs, strict=True))
        merged = (largest + total.masked_fill(empty, 1).log()).masked_fill(empty, -torch.inf)
        return torch.as_tensor(output).to(outputs[0].dtype), merged


def check_parts(parts: tuple[object, ...]) -> tuple[list[Tensor], list[Tensor]]:
    """Require pairs (B,H,Nq,Dv), (B,H,Nq), or packed (Tq,H,Dv), (H,Tq), all of the same shapes, dtypes and devices."""
    if not parts:
        raise ValueError("parts: expected at least one pair (output, lse), got none")
    outputs: list[Tensor] = []
    lses: list[Tensor] = []
    for place, part in enumerate(parts):
        name = f"parts[{place}]"
        if not isinstance(part, tuple | list) or len(part) != 2:
            raise TypeError(f"{name}: expected a pair (output, lse), got {check.describe(part)}")
        packed = isinstance(part[0], Tensor) and part[0].dim() == 3
        axes = "Tq,H,Dv" if packed else "B,H,Nq,Dv"
        output = check.check_tensor(f"{name}[0]", part[0], axes)
        lse = check.check_tensor(f"{name}[1]", part[1], "H,Tq" if packed else "B,H,Nq")
        rows = (output.shape[1], output.shape[0]) if packed else tuple(output.shape[:3])
        check.check_shape(f"{name}[1]", lse, "H,Tq" if packed else "B,H,Nq", rows, " to go with the output")
        if lse.dtype != compute_dtype(output.dtype):
            raise TypeError(f"{name}[1]: expected {compute_dtype(output.dtype)}, as returned, got {lse.dtype}")
        outputs.append(output)
        lses.append(lse)
        check.check_shape(f"{name}[0]", output, axes, tuple(outputs[0].shape), ", the shape of the first part")
        check.check_same(f"{name}[0]", output, outputs[0], whose="the first part")
        check.check_same(f"{name}[1]", lse, output, dtype=False, whose="the output")
    return outputs, lses
