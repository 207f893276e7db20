"""Constants, addresses and masked loads that the decode, M-step and linear-attention kernels share.

Strides travel as tuples, and compile-time constants as one tuple S with named fields; see `constants`.

B batch, H heads, M components, Nq queries, Nk keys, D width of a head. Logarithms are to the base 2.
"""

from __future__ import annotations

from collections import namedtuple
from functools import cache
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from mgk.ops.triton.primitives import INTERPRETED, LOG2E, load_tile

NO_STRIDES = (0, 0, 0)  # of a tensor that was not passed


def constants(**values: Any) -> Any:
    """Return compile-time constants as a named tuple, for a kernel's parameter `S: tl.constexpr`.

    Equal values give the same object, which `launch` then need not compare field by field.
    """
    return constants_of(tuple(values.items()))


@cache
def constants_of(items: tuple[tuple[str, Any], ...]) -> Any:
    fields = namedtuple("Constants", [name for name, _ in items])  # type: ignore[misc]
    if INTERPRETED:
        return fields(*(value for _, value in items))
    return fields(*(tl.constexpr(value) for _, value in items))  # Triton 3.6 needs each field to be a constexpr


def num_components(key: Tensor, shift: Tensor | None) -> int:
    return key.shape[2] if shift is None else shift.shape[1]


def key_strides(key: Tensor) -> tuple[int, int, int, int]:
    """Return the strides of batch, head, position and component, 0 for shifted keys, which have one component."""
    return key.stride(0), key.stride(1), key.stride(-2), key.stride(2) if key.dim() == 5 else 0


def split_variance(variance: float | Tensor) -> tuple[float, Tensor | None]:
    """Return a variance as a number and a tensor per component; the number is 1 if there is a tensor."""
    return (1.0, variance.contiguous()) if isinstance(variance, Tensor) else (variance, None)


def per_position(log_prior: Tensor, num_keys: int) -> Tensor:
    """View a prior (H,M) as (H,M,Nk)."""
    return log_prior if log_prior.dim() == 3 else log_prior[..., None].expand(-1, -1, num_keys)


@triton.jit
def head_pointer(base, strides, i_b, i_h, first=0):
    """Return the address of row `first` of a head. `strides` are those of batch, head, row (and component)."""
    return base + i_b * strides[0] + i_h * strides[1] + first * strides[2]


@triton.jit
def offset(pointer, distance):
    """Return `pointer + distance`, or None for a tensor that was not passed.

    Assign the result to one name: Triton 3.6 does not unpack a tuple with None.
    """
    result = pointer
    if pointer is not None:
        result = pointer + distance
    return result


@triton.jit
def active_rows(p_mask, o_rows, num_rows):
    """Return which keys or queries exist and are not masked. The kernels do not read the others."""
    active = o_rows < num_rows
    if p_mask is not None:
        active = active & (tl.load(p_mask + o_rows, mask=active, other=0) != 0)
    return active


@triton.jit
def load_active(p_base, start, active, stride, ROWS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Load ROWS rows of a matrix from `start` on, zero where `active` is false (None: all are).  # [ROWS, BLOCK]"""
    if active is None:
        tile = load_tile(p_base, start, 0, stride, ROWS, WIDTH, BLOCK, False)
    else:
        o_row, o_column = tl.arange(0, ROWS), tl.arange(0, BLOCK)
        p_tile = p_base + tl.cast(start, tl.int64) * stride + (o_row[:, None] * stride + o_column[None, :])
        tile = tl.load(p_tile, mask=active[:, None] & (o_column < WIDTH)[None, :], other=0.0)
    return tile


@triton.jit
def load_shift(SHIFT, i_component, D: tl.constexpr, BD: tl.constexpr):
    """Load the shift b_r of component `i_component` = h M + r in float32.  # [BD]"""
    o_d = tl.arange(0, BD)
    return tl.load(SHIFT + i_component * D + o_d, mask=o_d < D, other=0.0).to(tl.float32)


@triton.jit
def component_scale(variance, VARIANCE, i_component):
    """Return log2(e) / s2 of a component: from the tensor VARIANCE, or from the number `variance` without one."""
    if VARIANCE is not None:
        variance = tl.load(VARIANCE + i_component).to(tl.float32)
    return LOG2E / variance


@triton.jit
def add_log_prior(x, p_prior, strides, r, o_n, num_keys):
    """Add log2 prior[j,r] to a vector over keys. `strides` are those of head, component and key."""
    if p_prior is not None:
        b_prior = tl.load(p_prior + r * strides[1] + o_n * strides[2], mask=o_n < num_keys, other=0.0)
        x += b_prior.to(tl.float32) * LOG2E
    return x
