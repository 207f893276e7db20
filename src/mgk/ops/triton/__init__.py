"""Mixture-key attention on a GPU: the launchers, their operators for PyTorch, and the functions `ops/api.py` calls.

B batch, H heads, M components, Nq queries, Nk keys, D width of a head, Dv width of a value.
"""

from __future__ import annotations

import math
import os
from functools import partial
from typing import Any

import torch
import triton
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from mgk.ops.common import MAX_QUERIES
from mgk.ops.operator import operator
from mgk.ops.triton import mixture, primitives, shifted, short
from mgk.ops.triton.bias import key_bias, prior_positions, shifted_bias, side_by_side, spans
from mgk.ops.triton.decode import decode_attention
from mgk.ops.triton.host import as_bytes, block_width, dense, dot_precision, draw_seed, dropout_numbers
from mgk.ops.triton.launch import launch
from mgk.ops.triton.prior import prior_statistics
from mgk.ops.triton.repeat import repeated
from mgk.ops.triton.tiles import Tile, choose

__all__ = ["mgk_attention", "prior_statistics", "smgk_attention"]

GLUON = triton.__version__.startswith("3.6.") and os.environ.get("TRITON_INTERPRET") != "1"  # the one it was run with
if GLUON:
    from mgk.ops.triton import hopper, hopper_mixture, hopper_short

LOG2E = math.log2(math.e)
MAX_WIDTH = 256
PAD = primitives.PAD.value
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def mgk_attention(
    query: Tensor, key: Tensor, value: Tensor, log_prior: Tensor | None, variance: float | Tensor, e_step: str,
    is_causal: bool, key_mask: Tensor | None, dropout_p: float, query_mask: Tensor | None = None,
    ends: Tensor | None = None, longest: int = 0,
) -> Tensor:  # fmt: skip
    """Query (B,H,Nq,D), key (B,H,M,Nk,D), value (B,H,Nk,Dv) -> (B,H,Nq,Dv).

    With `ends`, int32 (B+1,), these are batches of one with packed rows: sequence b has the rows ends[b] to ends[b+1],
    no more than `longest`, and attends to itself. There are no masks then, and a prior per position (H,M,Np) has
    Np >= longest. What is behind the last sequence does not matter; it gets zeros.
    """
    require_support(query, value)
    if ends is None and decodes(dropout_p, query_mask, query, key, value, log_prior, variance):
        return decode_few(query, key, None, value, log_prior, variance, e_step, is_causal, key_mask)
    per_component = variance.float() if isinstance(variance, Tensor) else None
    number = 1.0 if isinstance(variance, Tensor) else variance
    seed = draw_seed(dropout_p, query)
    result = mixture_forward(
        dense(query), dense(key), dense(value), contiguous(log_prior), contiguous(per_component), contiguous(key_mask),
        contiguous(query_mask), seed, contiguous(ends), number, e_step == "hard", is_causal, dropout_p, longest,
    )  # fmt: skip
    return result[0]


def smgk_attention(
    query: Tensor, key: Tensor, shift: Tensor, value: Tensor, log_prior: Tensor | None, variance: float | Tensor,
    e_step: str, is_causal: bool, key_mask: Tensor | None, dropout_p: float, query_mask: Tensor | None = None,
    ends: Tensor | None = None, longest: int = 0,
) -> Tensor:  # fmt: skip
    """`mgk_attention` on the keys k_j + b_r, of key (B,H,Nk,D) and shift (H,M,D)."""
    require_support(query, value)
    if ends is None and decodes(dropout_p, query_mask, query, key, shift, value, log_prior, variance):
        return decode_few(query, key, shift, value, log_prior, variance, e_step, is_causal, key_mask)
    if isinstance(variance, Tensor):  # q.k / s2_r differs between the components: nothing factors
        keys = (key.float()[:, :, None] + shift.float()[None, :, :, None]).to(key.dtype)
        return mgk_attention(
            query, keys, value, log_prior, variance, e_step, is_causal, key_mask, dropout_p, query_mask, ends, longest
        )
    result = shifted_forward(
        dense(query), dense(key), shift.contiguous(), dense(value), contiguous(log_prior), contiguous(key_mask),
        contiguous(query_mask), draw_seed(dropout_p, query), contiguous(ends), variance, e_step == "hard", is_causal,
        dropout_p, longest,
    )  # fmt: skip
    return result[0]


def decodes(dropout_p: float, query_mask: Tensor | None, query: Tensor, *others: object) -> bool:
    """A few queries, nothing to differentiate: the kernel that splits the keys between programs."""
    if query.shape[2] > MAX_QUERIES or dropout_p or query_mask is not None:
        return False
    tensors = [tensor for tensor in (query, *others) if isinstance(tensor, Tensor)]
    return not (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors))


def decode_few(
    query: Tensor, key: Tensor, shift: Tensor | None, value: Tensor, log_prior: Tensor | None,
    variance: float | Tensor, e_step: str, is_causal: bool, key_mask: Tensor | None,
) -> Tensor:  # fmt: skip
    number, own = (1.0, variance) if isinstance(variance, Tensor) else (variance, None)
    return decode_forward(query, key, shift, value, log_prior, own, key_mask, number, e_step == "hard", is_causal)


@operator("triton_decode")
def decode_forward(
    query: Tensor, key: Tensor, shift: Tensor | None, value: Tensor, log_prior: Tensor | None, own: Tensor | None,
    key_mask: Tensor | None, variance: float, hard: bool, causal: bool,
) -> Tensor:  # fmt: skip
    each = variance if own is None else own
    return decode_attention(query, key, shift, value, log_prior, each, hard, causal, key_mask)


@decode_forward.register_fake
def _(query: Tensor, key: Tensor, shift: Tensor | None, value: Tensor, *_: Any) -> Tensor:
    return query.new_empty(*query.shape[:3], value.shape[-1])


def require_support(query: Tensor, value: Tensor) -> None:
    if query.device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError(f"impl: expected CUDA tensors for 'triton', got {query.device}")
    if query.dtype not in DTYPES:
        raise TypeError(f"query: expected bfloat16, float16 or float32 for impl='triton', got {query.dtype}")
    if max(query.shape[-1], value.shape[-1]) > MAX_WIDTH:
        raise ValueError(
            f"query: expected head widths D and Dv up to {MAX_WIDTH} for impl='triton', "
            f"got {query.shape[-1]} and {value.shape[-1]}"
        )


def contiguous(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()


def like(tensor: Tensor, *shape: int) -> Tensor:
    """Fresh memory with `shape`, laid out as `tensor` is: (B,N,H,D) in memory stays so."""
    strides, step = [0] * len(shape), 1
    for axis in sorted(range(len(shape)), key=lambda axis: (tensor.stride(axis), -axis)):
        strides[axis], step = step, step * max(1, shape[axis])
    return torch.empty_strided(shape, strides, device=tensor.device, dtype=tensor.dtype)


def tile(family: str, kernel: str, query: Tensor, value: Tensor, components: int) -> Tile:
    width = max(block_width(query.shape[-1]), block_width(value.shape[-1]))
    return choose(family, kernel, width, components, query.element_size())


def padded(length: int) -> int:
    """Vectors along the queries or keys are padded to whole tiles of any size in use."""
    return -(-length // PAD) * PAD


def lengths(query: Tensor, key: Tensor, ends: Tensor | None, longest: int) -> tuple[int, int, int]:
    """B, and how many queries and keys each has, or where they are packed has at most."""
    return (query.shape[0], query.shape[2], key.shape[-2]) if ends is None else (ends.shape[0] - 1, longest, longest)


def common(query: Tensor, key: Tensor, value: Tensor, components: int, packed: bool = False) -> dict[str, Any]:
    width, value_width, sizes = query.shape[-1], value.shape[-1], (query.shape[2], key.shape[-2])
    return {
        "D": width, "DV": value_width, "BD": block_width(width), "BV": block_width(value_width), "M": components,
        "EVEN": not packed and min(sizes) > 0 and not any(size % PAD for size in sizes), "PRECISION": dot_precision(),
    }  # fmt: skip


def options(choice: Tile) -> dict[str, int]:
    result = {"BM": choice.queries, "BN": choice.keys, "num_warps": choice.warps, "num_stages": choice.stages}
    return result if choice.registers is None else result | {"maxnreg": choice.registers}


# A launch: the road, the heads it is for, and whether it fixes the row maximum beforehand; see shifted.py.
LIGHT, SAFE, HARD = (road.value for road in (shifted.LIGHT, shifted.SAFE, shifted.HARD))
LIGHT_HARD = shifted.LIGHT_HARD.value
EVERY, NEAR, FAR = (heads.value for heads in (primitives.EVERY, primitives.NEAR, primitives.FAR))
COLUMNS = primitives.COLUMNS.value
FEW = 264
SHORT = 256
CACHE_BYTES = 48 * 2**20


def is_narrow(query: Tensor, components: int) -> bool:
    """Whether weights are mixed in bfloat16 and summed by products, a column for each component."""
    return query.dtype == torch.bfloat16 and components <= primitives.SUMS.value


def forward_launches(hard: bool, query: Tensor, components: int) -> list[dict[str, Any]]:
    """float16 has too few exponents for a maximum that is fixed beforehand."""
    fixed, narrow = query.dtype != torch.float16, is_narrow(query, components)
    far = {"ROAD": HARD if hard else SAFE, "HEADS": FAR, "FIXED": False, "NARROW": False}
    if hard and not fixed:
        return [far | {"HEADS": EVERY}]
    road = LIGHT if not hard else LIGHT_HARD if narrow else HARD
    return [{"ROAD": road, "HEADS": NEAR, "FIXED": fixed, "NARROW": narrow}, far]


def backward_launches(hard: bool, query: Tensor, components: int) -> list[dict[str, Any]]:
    narrow = is_narrow(query, components)
    if hard and not (narrow and components == 2):
        return [{"ROAD": HARD, "HEADS": EVERY, "NARROW": narrow}]
    return [
        {"ROAD": LIGHT_HARD if hard else LIGHT, "HEADS": NEAR, "NARROW": narrow},
        {"ROAD": HARD if hard else SAFE, "HEADS": FAR, "NARROW": hard},
    ]


def lanes(choice: Tile) -> int:
    """How many numbers of each query of a key side's tile make as many as there are threads; see `load_columns`."""
    return max(1, 32 * choice.warps // choice.queries)


def programs(blocks: int, how: dict[str, Any]) -> tuple[int]:
    """As many as there are blocks; few for the heads that reach far, since mostly there are none."""
    return (min(blocks, FEW) if how.get("HEADS") == FAR else blocks,)


def section(key: Tensor, value: Tensor, num_keys: int, causal: bool) -> int:
    """How many heads are worked on at once: one, or where rows differ in length as many as half the cache holds."""
    if not causal:
        return 1
    per_key = (math.prod(key.shape[2:-2]) * key.shape[-1] + value.shape[-1]) * key.element_size()
    return max(1, CACHE_BYTES // 2 // max(1, per_key * num_keys))


def strides(*tensors: Tensor, packed: bool = False) -> list[int]:
    """All but the last, which is 1; of packed rows that of a row in place of the batch's, see `sequence`."""
    return [stride for tensor in tensors for stride in (tensor.stride(-2 if packed else 0), *tensor.stride()[1:-1])]


@operator("triton_shifted")
@repeated
def shifted_forward(
    query: Tensor, key: Tensor, shift: Tensor, value: Tensor, log_prior: Tensor | None, key_mask: Tensor | None,
    query_mask: Tensor | None, seed: Tensor | None, ends: Tensor | None, variance: float, hard: bool, causal: bool,
    dropout_p: float, longest: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Output; what is known of the queries (G,1+2M,Nq') and the keys (G,1+2M,Nk'), of which some in bfloat16 (G,M,Nk');
    the heads that reach far, seen beforehand and on the way (G,2).
    """
    heads, components, packed = query.shape[1], shift.shape[1], ends is not None
    batch, num_queries, num_keys = lengths(query, key, ends, longest)
    output, rows, keys, narrow_keys, far = shifted_results(query, key, shift, value, ends, longest)
    if output.numel():
        prior, masks = None if hard else log_prior, spans(query_mask, key_mask, num_queries, num_keys, ends)
        settings = {
            **common(query, key, value, components, packed), "CAUSAL": causal, "SPANS": masks is not None,
            "KEY_MASK": key_mask is not None, "MASK_QUERIES": query_mask is not None, "DROPOUT": dropout_p > 0,
        }  # fmt: skip
        if not packed and is_short(query, key, value, components):
            near = GLUON and masks is None and not dropout_p and hopper_short.fits(components, query, key, value)
            if near:
                hopper_short.forward(
                    query, key, shift, value, prior, keys, output, rows, far, LOG2E / variance, 1 / variance, hard,
                    causal,
                )  # fmt: skip
            launch(
                short.forward_kernel, (batch * heads,), query, key, shift, value, prior, as_bytes(key_mask), keys,
                narrow_keys, output, rows, far, masks, as_bytes(query_mask), seed, LOG2E / variance,
                *dropout_numbers(dropout_p), 1 / variance, *strides(query, key, value, output), heads, num_queries,
                num_keys, rows.shape[-1], keys.shape[-1], **settings, BEST=hard, HEADS=FAR if near else EVERY,
                PRIOR_AXES=0 if prior is None else prior.dim(),
                **options(tile("shifted", "short forward", query, value, components)),
            )  # fmt: skip
            return output, rows, keys, narrow_keys, far
        choice = tile("shifted", "forward", query, value, components)
        shifted_bias(
            keys, narrow_keys, rows, far.zero_(), query, key, shift, prior, 1 / variance, key_mask, hard,
            masks if packed else None,
        )  # fmt: skip
        arguments = (
            query, key, value, keys, narrow_keys, output, rows, far, masks, as_bytes(query_mask), seed,
            LOG2E / variance, *dropout_numbers(dropout_p), *strides(query, key, value, output, packed=packed), batch,
            section(key, value, num_keys, causal), heads, num_queries, num_keys, rows.shape[-1], keys.shape[-1],
        )  # fmt: skip
        settings |= {"PACKED": packed, **options(choice)}
        blocks = rows.shape[-1] // choice.queries * batch * heads
        launches = forward_launches(hard, query, components)
        if GLUON and masks is None and not dropout_p and hopper.fits(64, components, query, key, value):
            del launches[0]
            hopper.forward(
                query, key, value, narrow_keys, output, rows, far, LOG2E / variance, hard, causal,
                section(key, value, num_keys, causal),
            )  # fmt: skip
        for how in launches:
            launch(shifted.forward_kernel, programs(blocks, how), *arguments, **settings, **how)
    return output, rows, keys, narrow_keys, far


def shifted_results(
    query: Tensor, key: Tensor, shift: Tensor, value: Tensor, ends: Tensor | None, longest: int
) -> tuple[Tensor, ...]:
    heads, components, (batch, *sizes) = query.shape[1], shift.shape[1], lengths(query, key, ends, longest)
    queries, keys = map(padded, sizes)
    narrow_keys = (batch * heads, components, keys) if is_narrow(query, components) else (0,)
    empty = partial(torch.empty, device=query.device, dtype=torch.float32)
    return (
        new_output(query, value, ends), empty(batch * heads, 1 + 2 * components, queries),
        empty(batch * heads, 1 + 2 * components, keys), empty(narrow_keys, dtype=torch.bfloat16),
        empty(batch * heads, 2),
    )  # fmt: skip


def new_output(query: Tensor, value: Tensor, ends: Tensor | None) -> Tensor:
    output = like(query, *query.shape[:3], value.shape[-1])
    return output if ends is None else output.zero_()  # no program writes to spare rows


def new_gradients(
    query: Tensor, key: Tensor, value: Tensor, log_prior: Tensor | None, hard: bool, ends: Tensor | None
) -> list[Tensor]:
    """Room for those of query, key and value, and of a prior per position (B,H,M,Nk), (0,) where there is none."""
    batch = query.shape[0] if ends is None else ends.shape[0] - 1
    shape = (batch, *log_prior.shape) if log_prior is not None and log_prior.dim() == 3 and not hard else (0,)
    grads = [*map(torch.empty_like, (query, key, value)), query.new_empty(shape, dtype=torch.float32)]
    return grads if ends is None else [grad.zero_() for grad in grads]  # spare rows, and positions after a sequence


@operator("triton_shifted_backward")
@repeated
def shifted_backward(
    grad: Tensor, query: Tensor, key: Tensor, shift: Tensor, value: Tensor, log_prior: Tensor | None,
    key_mask: Tensor | None, query_mask: Tensor | None, seed: Tensor | None, ends: Tensor | None, output: Tensor,
    rows: Tensor, keys: Tensor, narrow_keys: Tensor, far: Tensor, variance: float, hard: bool, causal: bool,
    dropout_p: float, longest: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of query, key and value; (H,M,BD+1), those of shift and, last, of the prior of a head; and those of a
    prior per position (B,H,M,Nk), empty where there is none.
    """
    return shifted_gradients(
        new_gradients(query, key, value, log_prior, hard, ends), grad, query, key, shift, value, log_prior, key_mask,
        query_mask, seed, ends, output, rows, keys, narrow_keys, far, variance, hard, causal, dropout_p, longest,
    )  # fmt: skip


def shifted_gradients(
    room: list[Tensor], grad: Tensor, query: Tensor, key: Tensor, shift: Tensor, value: Tensor,
    log_prior: Tensor | None, key_mask: Tensor | None, query_mask: Tensor | None, seed: Tensor | None,
    ends: Tensor | None, output: Tensor, rows: Tensor, keys: Tensor, narrow_keys: Tensor, far: Tensor, variance: float,
    hard: bool, causal: bool, dropout_p: float, longest: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """`shifted_backward` into the `room` of `new_gradients`."""
    heads, width, components, packed = query.shape[1], query.shape[-1], shift.shape[1], ends is not None
    batch, num_queries, num_keys = lengths(query, key, ends, longest)
    if not packed and is_short(query, key, value, components):
        return short_gradients(
            room, grad, query, key, shift, value, key_mask, seed, output, rows, keys, far, variance, hard, causal,
            dropout_p,
        )  # fmt: skip
    on_queries = tile("shifted", "query", query, value, components)
    on_keys = tile("shifted", "key", query, value, components)
    query_blocks, key_blocks = rows.shape[-1] // on_queries.queries, keys.shape[-1] // on_keys.keys
    masks = spans(query_mask, key_mask, num_queries, num_keys, ends)
    wide = GLUON and masks is None and not dropout_p and hopper.fits(32, components, query, key, value, grad)
    parts = (rows.shape[-1] + keys.shape[-1]) // hopper.HALF.value if wide else query_blocks + key_blocks
    *grads, grad_bias = room
    empty = partial(torch.empty, device=query.device, dtype=torch.float32)
    known = empty(rows.shape[0], rows.shape[-1], max(1 << components.bit_length(), lanes(on_keys)))
    part = empty(batch, heads, parts, components, block_width(width) + 1)
    if packed or wide:  # no program is for blocks behind a sequence; those of heads that reach far have other sizes
        part.zero_()
    settings = {
        **common(query, key, value, components, packed), "CAUSAL": causal, "SPANS": masks is not None,
        "KEY_MASK": key_mask is not None, "DROPOUT": dropout_p > 0, "WIDTH": known.shape[-1], "PACKED": packed,
    }  # fmt: skip
    numbers = LOG2E / variance, *dropout_numbers(dropout_p), 1 / variance
    sizes = (
        batch, section(key, value, num_keys, causal), heads, num_queries, prior_positions(log_prior, num_keys),
        rows.shape[-1], keys.shape[-1],
    )  # fmt: skip
    key_columns, row_columns = None, None
    if hard and narrow_keys.numel() and components == 2:  # what a query must lead by for the second component to win
        key_columns = (keys[:, 3] - keys[:, 4]).clamp(-6e4, 6e4).half()
    elif not hard and narrow_keys.numel():
        key_columns = side_by_side(narrow_keys, COLUMNS)
        row_columns = narrow_keys.new_empty(rows.shape[0], rows.shape[-1], COLUMNS)
    launches = backward_launches(hard, query, components) if batch * heads else []
    on_query_side = [how | {"AS_VECTORS": wide and how["HEADS"] == NEAR} for how in launches]
    if wide:
        launches, order = launches[1:], section(key, value, num_keys, causal)
    if wide and width > 32:  # the query side of narrower heads is faster in Triton
        del on_query_side[0]
        hopper.query_side(
            grad, query, key, shift, value, output, rows, narrow_keys, key_columns, row_columns, far, known, grads[0],
            part, numbers[0], numbers[-1], hard, causal, order,
        )  # fmt: skip
    for how in on_query_side if query_blocks else ():
        launch(
            shifted.query_kernel, programs(batch * heads * query_blocks, how), query, key, shift, value, keys,
            narrow_keys, key_columns, output, rows, far, masks, seed, grad, known, row_columns, grads[0], part,
            *numbers, *strides(query, key, value, output, grad, grads[0], packed=packed), *sizes, parts, **settings,
            **how, **options(on_queries),
        )  # fmt: skip
    if wide:
        hopper.key_side(
            grad, query, key, shift, value, keys, row_columns, far, known, grads[1], grads[2], grad_bias, part,
            numbers[0], numbers[-1], hard, causal, order, sizes[4],
        )  # fmt: skip
    for how in launches if key_blocks else ():
        launch(
            shifted.key_kernel, programs(batch * heads * key_blocks, how), query, key, shift, value, keys, rows,
            row_columns, far, masks, seed, grad, known, grads[1], grads[2], grad_bias, part, *numbers,
            *strides(query, key, value, grad, grads[1], grads[2], packed=packed), *sizes, query_blocks, parts,
            **settings, **how, POSITIONS=grad_bias.dim() > 1, **options(on_keys),
        )  # fmt: skip
    return grads[0], grads[1], grads[2], part.sum((0, 2)), grad_bias


def is_short(query: Tensor, key: Tensor, value: Tensor, components: int) -> bool:
    """Whether one program does a head: few tiles, and sums over a key tile that fit into registers."""
    width = components * max(block_width(query.shape[-1]), block_width(value.shape[-1]))
    return 0 < max(query.shape[2], key.shape[2]) <= SHORT and width <= 64 and query.dtype == torch.bfloat16


def short_gradients(
    room: list[Tensor], grad: Tensor, query: Tensor, key: Tensor, shift: Tensor, value: Tensor,
    key_mask: Tensor | None, seed: Tensor | None, output: Tensor, rows: Tensor, keys: Tensor, far: Tensor,
    variance: float, hard: bool, causal: bool, dropout_p: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    (batch, heads, num_queries, _), num_keys, components = query.shape, key.shape[2], shift.shape[1]
    *grads, grad_bias = room
    empty = partial(torch.empty, device=query.device, dtype=torch.float32)
    settings = common(query, key, value, components)
    del settings["PRECISION"]
    width, sizes = settings["BD"], (rows.shape[0], rows.shape[-1])
    rest = COLUMNS + (0 if hard else components - 1) * (width + settings["BV"])
    part = empty(batch, heads, components, width + 1)
    if batch * heads:
        near = GLUON and key_mask is None and not dropout_p and hopper_short.fits(components, query, key, value)
        if near:
            hopper_short.backward(
                grad, query, key, shift, value, keys, output, rows, far, grads, grad_bias, part, LOG2E / variance,
                1 / variance, hard, causal,
            )  # fmt: skip
        launch(
            short.backward_kernel, (batch * heads,), query, key, shift, value, keys, output, rows, far, seed, grad,
            empty(sizes), empty(*sizes, rest, dtype=query.dtype), empty(*sizes, width), *grads, grad_bias, part,
            LOG2E / variance, *dropout_numbers(dropout_p), 1 / variance,
            *strides(query, key, value, output, grad, *grads), heads, num_queries, num_keys, rows.shape[-1],
            keys.shape[-1], **settings, BEST=hard, CAUSAL=causal, KEY_MASK=key_mask is not None, DROPOUT=dropout_p > 0,
            POSITIONS=grad_bias.dim() > 1, WIDTH=rest, HEADS=FAR if near else EVERY,
            **options(tile("shifted", "short backward", query, value, components)),
        )  # fmt: skip
    return grads[0], grads[1], grads[2], part.sum(0), grad_bias


@operator("triton_mixture")
@repeated
def mixture_forward(
    query: Tensor, key: Tensor, value: Tensor, log_prior: Tensor | None, per_component: Tensor | None,
    key_mask: Tensor | None, query_mask: Tensor | None, seed: Tensor | None, ends: Tensor | None, variance: float,
    hard: bool, causal: bool, dropout_p: float, longest: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Output; row sums (G,Nq'); key biases (G,M,Nk'), and as factors in bfloat16; the heads that reach far (G,2)."""
    heads, components, packed = query.shape[1], key.shape[2], ends is not None
    batch, num_queries, num_keys = lengths(query, key, ends, longest)
    choice = tile("mixture", "forward", query, value, components)
    output, rows, keys, narrow_keys, far = mixture_results(query, key, value, per_component, hard, ends, longest)
    if output.numel():
        masks = spans(query_mask, key_mask, num_queries, num_keys, ends)
        key_bias(
            keys, narrow_keys, far, key, None if hard else log_prior, per_component, 1 / variance, key_mask,
            masks if packed else None,
        )  # fmt: skip
        fixed = per_component is None and query.dtype != torch.float16
        near = {"HEADS": NEAR, "FIXED": True, "NARROW": is_narrow(query, components)}
        rest = {"HEADS": FAR if fixed else EVERY, "FIXED": False, "NARROW": False}
        arguments = (
            query, key, value, keys, narrow_keys, per_component, output, rows, far, masks, as_bytes(query_mask), seed,
            1 / variance, *dropout_numbers(dropout_p), *strides(query, key, value, output, packed=packed), batch,
            section(key, value, num_keys, causal), heads, num_queries, num_keys, rows.shape[-1], keys.shape[-1],
        )  # fmt: skip
        settings = {
            **common(query, key, value, components, packed), "HARD": hard, "VARIANCES": per_component is not None,
            "CAUSAL": causal, "SPANS": masks is not None, "KEY_MASK": key_mask is not None,
            "MASK_QUERIES": query_mask is not None, "DROPOUT": dropout_p > 0, "PACKED": packed, **options(choice),
        }  # fmt: skip
        blocks = rows.shape[-1] // choice.queries * batch * heads
        launches = [near, rest][not fixed :]
        if GLUON and fixed and masks is None and not dropout_p and hopper.fits(32, components, query, key, value):
            del launches[0]
            hopper_mixture.forward(
                query, key, value, keys, narrow_keys, output, rows, far, LOG2E / variance, hard, causal,
                section(key, value, num_keys, causal),
            )  # fmt: skip
        for how in launches:
            launch(mixture.forward_kernel, programs(blocks, how), *arguments, **settings, **how)
    return output, rows, keys, narrow_keys, far


def mixture_results(
    query: Tensor, key: Tensor, value: Tensor, per_component: Tensor | None, hard: bool, ends: Tensor | None,
    longest: int,
) -> tuple[Tensor, ...]:  # fmt: skip
    heads, components = query.shape[1], key.shape[2]
    batch, num_queries, num_keys = lengths(query, key, ends, longest)
    empty = partial(torch.empty, device=query.device, dtype=torch.float32)
    known, light = (batch * heads, components, padded(num_keys)), per_component is None and not hard
    return (
        new_output(query, value, ends), empty(batch * heads, padded(num_queries)), empty(known),
        empty(known if light and is_narrow(query, components) else (0,), dtype=torch.bfloat16),
        torch.zeros(batch * heads, 2, device=query.device),
    )  # fmt: skip


@operator("triton_mixture_backward")
@repeated
def mixture_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, log_prior: Tensor | None, per_component: Tensor | None,
    key_mask: Tensor | None, query_mask: Tensor | None, seed: Tensor | None, ends: Tensor | None, output: Tensor,
    rows: Tensor, keys: Tensor, narrow_keys: Tensor, far: Tensor, variance: float, hard: bool, causal: bool,
    dropout_p: float, longest: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of query, key and value; (H,M,2), those of the prior and the variance of a head; and those of a prior
    per position (B,H,M,Nk), empty where there is none.
    """
    return mixture_gradients(
        new_gradients(query, key, value, log_prior, hard, ends), grad, query, key, value, log_prior, per_component,
        key_mask, query_mask, seed, ends, output, rows, keys, narrow_keys, far, variance, hard, causal, dropout_p,
        longest,
    )  # fmt: skip


def mixture_gradients(
    room: list[Tensor], grad: Tensor, query: Tensor, key: Tensor, value: Tensor, log_prior: Tensor | None,
    per_component: Tensor | None, key_mask: Tensor | None, query_mask: Tensor | None, seed: Tensor | None,
    ends: Tensor | None, output: Tensor, rows: Tensor, keys: Tensor, narrow_keys: Tensor, far: Tensor, variance: float,
    hard: bool, causal: bool, dropout_p: float, longest: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """`mixture_backward` into the `room` of `new_gradients`."""
    heads, components, packed = query.shape[1], key.shape[2], ends is not None
    batch, num_queries, num_keys = lengths(query, key, ends, longest)
    on_queries = tile("mixture", "query", query, value, components)
    on_keys = tile("mixture", "key", query, value, components)
    query_blocks, key_blocks = rows.shape[-1] // on_queries.queries, keys.shape[-1] // on_keys.keys
    varied = per_component is not None
    query_parts = query_blocks if varied else 0  # only then do queries contribute
    masks = spans(query_mask, key_mask, num_queries, num_keys, ends)
    wide = GLUON and masks is None and not dropout_p and not varied
    wide = wide and hopper.fits(32 if hard else 64, components, query, key, value, grad)
    *grads, grad_bias = room
    empty = partial(torch.empty, device=query.device, dtype=torch.float32)
    known = empty(*rows.shape, max(2, lanes(on_keys)))
    parts = query_parts + (keys.shape[-1] // hopper.HALF.value if wide else key_blocks)
    part = empty(batch, heads, parts, components, 2)
    if packed or wide:  # no program is for blocks behind a sequence; those of heads that reach far have other sizes
        part.zero_()
    settings = {
        **common(query, key, value, components, packed), "HARD": hard, "VARIANCES": varied, "CAUSAL": causal,
        "SPANS": masks is not None, "KEY_MASK": key_mask is not None, "DROPOUT": dropout_p > 0,
        "WIDTH": known.shape[-1], "PACKED": packed,
    }  # fmt: skip
    launches = [{"HEADS": EVERY, "NARROW": hard and is_narrow(query, components) and not varied}]
    if narrow_keys.numel():
        launches = [{"HEADS": NEAR, "NARROW": True}, {"HEADS": FAR, "NARROW": False}]
    numbers = 1 / variance, *dropout_numbers(dropout_p)
    sizes = (
        batch, section(key, value, num_keys, causal), heads, num_queries, prior_positions(log_prior, num_keys),
        rows.shape[-1], keys.shape[-1],
    )  # fmt: skip
    if wide:  # the hard E-step is right for heads that reach far, too
        launches, order = launches[1:], section(key, value, num_keys, causal)
        hopper_mixture.query_side(
            grad, query, key, value, output, rows, keys, narrow_keys, far, known, grads[0], LOG2E / variance,
            1 / variance, hard, causal, order,
        )  # fmt: skip
        hopper_mixture.key_side(
            grad, query, key, value, keys, narrow_keys, far, known, grads[1], grads[2], grad_bias, part,
            LOG2E / variance, 1 / variance, hard, causal, order, sizes[4],
        )  # fmt: skip
    for how in launches if batch * heads * query_blocks else ():
        launch(
            mixture.query_kernel, programs(batch * heads * query_blocks, how), query, key, value, keys, narrow_keys,
            per_component, output, rows, far, masks, seed, grad, known, grads[0], part, *numbers,
            *strides(query, key, value, output, grad, grads[0], packed=packed), *sizes, part.shape[2], **settings,
            **how, **options(on_queries),
        )  # fmt: skip
    for how in launches if batch * heads * key_blocks else ():
        launch(
            mixture.key_kernel, programs(batch * heads * key_blocks, how), query, key, value, keys, narrow_keys,
            per_component, far, masks, seed, grad, known, grads[1], grads[2], grad_bias, part, *numbers,
            *strides(query, key, value, grad, grads[1], grads[2], packed=packed), *sizes, query_parts, part.shape[2],
            **settings, **how, POSITIONS=grad_bias.dim() > 1, **options(on_keys),
        )  # fmt: skip
    return grads[0], grads[1], grads[2], part.sum((0, 2)), grad_bias


@shifted_forward.register_fake
def _(
    query: Tensor, key: Tensor, shift: Tensor, value: Tensor, log_prior: Any, key_mask: Any, query_mask: Any, seed: Any,
    ends: Tensor | None, *rest: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    return shifted_results(query, key, shift, value, ends, rest[-1])


@mixture_forward.register_fake
def _(
    query: Tensor, key: Tensor, value: Tensor, log_prior: Any, own: Tensor | None, key_mask: Any, query_mask: Any,
    seed: Any, ends: Tensor | None, variance: float, hard: bool, *rest: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    return mixture_results(query, key, value, own, hard, ends, rest[-1])


def fake_grads(
    query: Tensor, key: Tensor, value: Tensor, log_prior: Tensor | None, components: int, width: int, hard: bool,
    ends: Tensor | None,
) -> tuple[Tensor, ...]:  # fmt: skip
    *grads, grad_bias = new_gradients(query, key, value, log_prior, hard, ends)
    return *grads, query.new_empty(query.shape[1], components, width, dtype=torch.float32), grad_bias


@shifted_backward.register_fake
def _(
    grad: Tensor, query: Tensor, key: Tensor, shift: Tensor, value: Tensor, log_prior: Tensor | None, key_mask: Any,
    query_mask: Any, seed: Any, ends: Tensor | None, *rest: Any,
) -> Any:  # fmt: skip
    width = block_width(query.shape[-1]) + 1
    return fake_grads(query, key, value, log_prior, shift.shape[1], width, rest[-4], ends)


@mixture_backward.register_fake
def _(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, log_prior: Tensor | None, own: Any, key_mask: Any,
    query_mask: Any, seed: Any, ends: Tensor | None, *rest: Any,
) -> Any:  # fmt: skip
    return fake_grads(query, key, value, log_prior, key.shape[2], 2, rest[-4], ends)


def keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, variance, hard, causal, dropout_p, longest = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, *output)
    ctx.options = variance, hard, causal, dropout_p, longest
    ctx.mark_non_differentiable(*output[1:])


def prior_grad(total: Tensor, positions: Tensor, log_prior: Tensor | None, hard: bool) -> Tensor | None:
    """Of what the keys' biases received; the hard E-step knows no prior."""
    if log_prior is None:
        return None
    if hard:
        return torch.zeros_like(log_prior)
    return (positions.sum(0) if log_prior.dim() == 3 else total).to(log_prior.dtype)


def no_gradient(*tensors: Tensor | None) -> list[Tensor | None]:
    """An output without entries: it depends on nothing."""
    return [None if tensor is None else torch.zeros_like(tensor) for tensor in tensors]


def shifted_autograd(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    query, key, shift, value, log_prior, *rest = ctx.saved_tensors
    if not grad.numel():
        return *no_gradient(query, key, shift, value, log_prior), *[None] * 9
    grads = shifted_backward(dense(grad), query, key, shift, value, log_prior, *rest, *ctx.options)
    grad_query, grad_key, grad_value, total, positions = grads
    grad_shift = total[..., : query.shape[-1]].to(shift.dtype)
    grad_prior = prior_grad(total[..., -1], positions, log_prior, ctx.options[1])
    return grad_query, grad_key, grad_shift, grad_value, grad_prior, *[None] * 9


def mixture_autograd(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    query, key, value, log_prior, own, *rest = ctx.saved_tensors
    if not grad.numel():
        return *no_gradient(query, key, value, log_prior, own), *[None] * 9
    *grads, total, positions = mixture_backward(dense(grad), query, key, value, log_prior, own, *rest, *ctx.options)
    grad_variance = None if own is None else total[..., 1].to(own.dtype)
    return *grads, prior_grad(total[..., 0], positions, log_prior, ctx.options[1]), grad_variance, *[None] * 9


shifted_forward.register_autograd(shifted_autograd, setup_context=keep_for_backward)
mixture_forward.register_autograd(mixture_autograd, setup_context=keep_for_backward)


def pairs(query_shape: tuple[int, ...], key_shape: tuple[int, ...]) -> int:
    return math.prod(query_shape[:3]) * key_shape[-2]


@register_flop_formula(torch.ops.mgk.triton_shifted)
def _(query: tuple[int, ...], key: tuple[int, ...], shift: Any, value: tuple[int, ...], *_: Any, **__: Any) -> int:
    """One score product and one with the values."""
    return 2 * pairs(query, key) * (query[-1] + value[-1])


@register_flop_formula(torch.ops.mgk.triton_mixture)
def _(query: tuple[int, ...], key: tuple[int, ...], value: tuple[int, ...], *_: Any, **__: Any) -> int:
    """M score products and one with the values."""
    return 2 * pairs(query, key) * (key[2] * query[-1] + value[-1])


@register_flop_formula(torch.ops.mgk.triton_shifted_backward)
def _(
    grad: Any, query: tuple[int, ...], key: tuple[int, ...], shift: Any, value: tuple[int, ...], *_: Any, **__: Any
) -> int:
    """Scores, dq and dk; dA and dv. What the two kernels compute twice is not counted twice."""
    return 2 * pairs(query, key) * (3 * query[-1] + 2 * value[-1])


@register_flop_formula(torch.ops.mgk.triton_mixture_backward)
def _(grad: Any, query: tuple[int, ...], key: tuple[int, ...], value: tuple[int, ...], *_: Any, **__: Any) -> int:
    return 2 * pairs(query, key) * (3 * key[2] * query[-1] + 2 * value[-1])
