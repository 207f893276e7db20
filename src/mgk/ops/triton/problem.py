"""What the launchers of the attention kernels share: a call's tensors and options, and the sizes that follow from them.

B batch, H query heads, H/GROUP heads of keys and values, G = B H, M components, Nq queries, Nk keys (padded to whole
tiles: Nq', Nk'), D width of a head, Dv width of a value.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from mgk.ops import dispatch
from mgk.ops.common import capability, dtype_name
from mgk.ops.dispatch import OVERFLOWING, Call, Launch, Plan
from mgk.ops.tiles import HOPPER, Tile, block_width
from mgk.ops.triton import self_check
from mgk.ops.triton.bias import prior_positions, spans
from mgk.ops.triton.host import dot_precision, dropout_numbers, empty_like_layout, lengths
from mgk.ops.triton.loads import constants
from mgk.ops.triton.primitives import PAD

LOG2E = math.log2(math.e)
CACHE_BYTES = 48 * 2**20  # of an H200's second-level cache
FEW_PROGRAMS = 264  # for the heads that would overflow, of which there are mostly none


@dataclass(frozen=True, eq=False)
class Problem:
    """The inputs of one call. Packed sequences (`cu_seq_q` and `cu_seq_k`, int32 (B+1,)) are rows of a batch of one."""

    query: Tensor  # (B,H,Nq,D)
    key: Tensor  # (B,H/GROUP,Nk,D) with a shift, else (B,H/GROUP,M,Nk,D)
    shift: Tensor | None  # (H,M,D)
    value: Tensor  # (B,H/GROUP,Nk,Dv)
    log_prior: Tensor | None  # (H,M) or (H,M,Nk)
    variances: Tensor | None  # (H,M), in place of `variance`
    key_mask: Tensor | None  # (B,Nk)
    query_mask: Tensor | None  # (B,Nq)
    seed: Tensor | None  # of dropout
    cu_seq_q: Tensor | None
    cu_seq_k: Tensor | None
    variance: float
    hard: bool
    causal: bool
    window: int  # 0: none
    dropout_p: float
    max_q: int
    max_k: int
    lse: bool = False  # whether the log of the row sums is returned

    @property
    def narrow(self) -> bool:
        """Whether factors of the keys are kept in bfloat16, see `mgk.ops.dispatch`."""
        return dispatch.is_narrow(dtype_name(self.query.dtype), self.components)

    @property
    def kind(self) -> tuple[object, ...]:
        """What its kernels depend on, and a little more."""
        optional = self.shift, self.variances, self.key_mask, self.query_mask, self.seed, self.cu_seq_q
        shapes = self.query.shape[1:], self.key.shape[1:], self.value.shape[-1]
        prior = None if self.log_prior is None else self.log_prior.dim()
        given = [each is not None for each in optional]
        numbers = self.hard, self.causal, self.window, self.lse, self.max_q, self.max_k
        return self.query.device, self.query.dtype, *shapes, prior, *given, *numbers

    @property
    def packed(self) -> bool:
        return self.cu_seq_q is not None

    @property
    def shared(self) -> bool:
        """Whether components with variances of their own share shifted keys."""
        return self.shift is not None and self.variances is not None

    @property
    def components(self) -> int:
        return self.key.shape[2] if self.shift is None else self.shift.shape[1]

    @property
    def heads(self) -> int:
        return self.query.shape[1]

    @property
    def group(self) -> int:
        """How many query heads read the same head of keys and values."""
        return self.heads // max(1, self.key.shape[1])

    @property
    def width(self) -> int:
        return self.query.shape[-1]

    @property
    def block(self) -> int:
        """The width of blocks in registers: one for heads and values. Where the values are narrower, with blocks of
        their own, Triton 3.6 compiles products for Hopper GPUs that read beyond the shared memory.
        """
        return max(block_width(self.width), block_width(self.value.shape[-1]))

    @cached_property
    def lengths(self) -> tuple[int, int, int]:
        """B, Nq and Nk; of packed sequences their number and the greatest length."""
        return lengths(self.query, self.key, self.cu_seq_q, self.max_q, self.max_k)

    @property
    def groups(self) -> int:
        return self.lengths[0] * self.heads

    @cached_property
    def spans(self) -> Tensor | None:
        """Where the real queries and keys of each sequence begin and end; None where all of them are real."""
        _, num_queries, num_keys = self.lengths
        return spans(self.query_mask, self.key_mask, num_queries, num_keys, self.cu_seq_q, self.cu_seq_k)

    @property
    def positions(self) -> int:
        return prior_positions(self.log_prior, self.lengths[2])

    @property
    def section(self) -> int:
        """How many heads are worked on at a time: one, or with causal masks as many as half of the cache holds."""
        if not self.causal:
            return 1
        numbers = math.prod(self.key.shape[2:-2]) * self.width + self.value.shape[-1]
        return max(1, CACHE_BYTES // 2 // max(1, numbers * self.key.element_size() * self.lengths[2]))

    def plan(self, *others: Tensor) -> Plan:
        """What runs. `others` are further tensors that the kernels read in tiles."""
        family, device = "projected" if self.shift is None or self.shared else "shifted", self.query.device
        on_hopper = capability(device) == HOPPER
        short = max(self.query.shape[2], self.key.shape[-2]) <= dispatch.SHORT
        gluon = on_hopper and self_check.trusted("shared" if self.shared else family, short, device)
        call = Call(
            family=family, dtype=dtype_name(self.query.dtype), capability=capability(device),
            hip=bool(torch.version.hip), gluon=gluon, queries=self.query.shape[2], keys=self.key.shape[-2],
            width=self.width, value_width=self.value.shape[-1], components=self.components, hard=self.hard,
            masked=self.key_mask is not None or self.query_mask is not None, packed=self.packed,
            dropout=self.dropout_p > 0, variances=self.variances is not None, shared=self.shared,
            group=self.group, window=self.window, lse=self.lse,
            aligned=gluon and all(map(is_aligned, (self.query, self.key, self.value, *others))),
        )  # fmt: skip
        return dispatch.plan(call, "triton")

    def settings(self, launch: Launch, **others: Any) -> Any:
        """The compile-time constants C of a generic kernel.

        D and DV are the widths of a head and a value, BD and BV these rounded up to powers of two, BM and BN the
        queries and keys of a tile. EVEN: both lengths are whole tiles. SPANS: sequences differ in length, or masks hide
        some queries or keys. POSITIONS: a prior per position needs its gradient. WIDTH: how many numbers per query one
        pass leaves for the next. GROUP: how many query heads read a head of keys. WINDOW: 0 without one. LSE: the log
        of the row sums has a gradient. PATH, HEADS, FIXED, NARROW and AS_VECTORS are explained in `mgk.ops.dispatch`.
        """
        width, value_width, tile = self.width, self.value.shape[-1], generic(launch.tile)
        sizes = self.query.shape[2], self.key.shape[-2]
        rest = {"MASK_QUERIES": False, "POSITIONS": False, "AS_VECTORS": False, "WIDTH": 0, "LSE": False} | others
        return constants(
            D=width, DV=value_width, BD=self.block, BV=self.block, M=self.components,
            BM=tile.queries, BN=tile.keys, PATH=launch.path, HEADS=launch.heads, FIXED=launch.fixed,
            NARROW=launch.narrow, CAUSAL=self.causal, SPANS=self.spans is not None, PACKED=self.packed,
            KEY_MASK=self.key_mask is not None, DROPOUT=self.dropout_p > 0, VARIANCES=self.variances is not None,
            SHARED=self.shared, GROUP=self.group, WINDOW=self.window,
            EVEN=not self.packed and min(sizes) > 0 and not any(size % PAD.value for size in sizes),
            PRECISION=dot_precision(self.query), HARD=self.hard, **rest,
        )  # fmt: skip

    def grid(self, blocks: int, launch: Launch) -> tuple[int]:
        """One program per block; few for the heads that would overflow, which share the blocks."""
        return (min(blocks, FEW_PROGRAMS) if launch.heads == OVERFLOWING else blocks,)

    @property
    def numbers(self) -> tuple[float, int, float]:
        """The score scale in base 2, and the threshold and the scale of dropout."""
        return (LOG2E / self.variance, *dropout_numbers(self.dropout_p))

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, device=self.query.device, dtype=dtype)

    def new_output(self) -> Tensor:
        output = empty_like_layout(self.query, *self.query.shape[:3], self.value.shape[-1])
        return output.zero_() if self.packed else output  # no program writes to the rows after the last sequence

    def new_gradients(self) -> list[Tensor]:
        """Memory for the gradients of query, key, value and a prior per position: (B,H,M,Nk), or (0,) without one."""
        by_position = self.log_prior is not None and self.log_prior.dim() == 3 and not self.hard
        shape = (self.lengths[0], *self.log_prior.shape) if by_position else (0,)  # type: ignore[union-attr]
        grads = [*map(torch.empty_like, (self.query, self.key, self.value)), self.empty(*shape)]
        return [grad.zero_() for grad in grads] if self.packed else grads


def is_aligned(tensor: Tensor) -> bool:
    strides = tensor.stride()[:-1]
    return tensor.data_ptr() % 16 == 0 and all(0 < stride < 2**31 and stride % 8 == 0 for stride in strides)


def compile_options(launch: Launch) -> dict[str, int]:
    tile = generic(launch.tile)
    result = {"num_warps": tile.warps, "num_stages": tile.stages}
    return result if tile.registers is None or torch.version.hip else result | {"maxnreg": tile.registers}


def generic(tile: Tile | None) -> Tile:
    """The tile of a generic kernel, which always has one."""
    assert tile is not None
    return tile


def lanes(tile: Tile) -> int:
    """How many numbers per query of a key pass's tile give every thread one; see `load_columns`."""
    return max(1, 32 * tile.warps // tile.queries)


def padded(length: int) -> int:
    """A length padded to whole tiles of any size in use."""
    return -(-length // PAD.value) * PAD.value


def strides(*tensors: Tensor, packed: bool = False) -> tuple[int, ...]:
    """All strides but the last, which is 1. Packed rows have the stride of a row in place of the batch's."""
    return tuple(stride for each in tensors for stride in (each.stride(-2 if packed else 0), *each.stride()[1:-1]))
