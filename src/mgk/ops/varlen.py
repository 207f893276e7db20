"""Attention within packed sequences of different lengths, with the argument names of `torch.nn.attention.varlen`.

Sequence s has the queries cu_seq_q[s] to cu_seq_q[s+1] and the keys cu_seq_k[s] to cu_seq_k[s+1]. There is no padding.

H query heads, G heads of keys and values (H is a multiple of G), M components, Tq queries and Tk keys of all sequences,
S sequences, D width of a head, Dv width of a value.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Required, TypedDict, overload

import torch
from torch import Tensor

from mgk.ops import arguments as check
from mgk.ops.api import implementation, returned
from mgk.ops.common import without_autocast
from mgk.ops.dtensor import PACKED, Axes, accepts_dtensors
from mgk.ops.options import Options, Pages, Result, Rows, Visibility, check_options
from mgk.ops.pages import check_inference, check_pages, decode, decodes, gather

if TYPE_CHECKING:
    from types import ModuleType
    from typing import Unpack

    from jaxtyping import Float, Int


class VarlenOptions(TypedDict, total=False):
    """The keyword arguments of the functions below, for their overloads."""

    cu_seq_q: Required[Tensor]
    cu_seq_k: Tensor | None
    max_q: Required[int]
    max_k: Required[int]
    seqused_k: Tensor | None
    block_table: Tensor | None
    variance: float | Tensor | None
    e_step: str
    is_causal: bool
    window: int | None
    dropout_p: float
    impl: str


@overload
def mgk_varlen_attention(
    query: Tensor, key: Tensor, value: Tensor, log_prior: Tensor | None = None, *, return_lse: Literal[True],
    **options: Unpack[VarlenOptions],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def mgk_varlen_attention(
    query: Tensor, key: Tensor, value: Tensor, log_prior: Tensor | None = None, *, return_lse: Literal[False] = False,
    **options: Unpack[VarlenOptions],
) -> Tensor: ...  # fmt: skip
@accepts_dtensors(Axes(None, 1), Axes(None, 0), arguments=PACKED)
def mgk_varlen_attention(
    query: Float[Tensor, "tq h d"],
    key: Float[Tensor, "tk g m d"],
    value: Float[Tensor, "tk g dv"],
    log_prior: Float[Tensor, "h m"] | Float[Tensor, "h m n"] | None = None,
    *,
    cu_seq_q: Int[Tensor, " s+1"],
    cu_seq_k: Int[Tensor, " s+1"] | None = None,
    max_q: int,
    max_k: int,
    seqused_k: Int[Tensor, " s"] | None = None,
    block_table: Int[Tensor, "s pages"] | None = None,
    variance: float | Float[Tensor, "h m"] | None = None,
    e_step: str = "soft",
    is_causal: bool = False,
    window: int | None = None,
    dropout_p: float = 0.0,
    return_lse: bool = False,
    impl: str = "auto",
) -> Float[Tensor, "tq h dv"] | tuple[Float[Tensor, "tq h dv"], Float[Tensor, "h tq"]]:
    """`mgk_attention` within each of several packed sequences.

    Args:
        query: (Tq,H,D).
        key: (Tk,G,M,D). H is a multiple of G, as in `mgk_attention`.
        value: (Tk,G,Dv).
        log_prior: (H,M), or one per position within a sequence (H,M,N) with N >= max_k.
        cu_seq_q, cu_seq_k: int32 (S+1,), where each sequence starts, and at the end Tq and Tk. The lengths of a
            sequence's queries and keys may differ. Their values are checked on a CPU only.
        max_q, max_k: at least the largest number of queries and of keys of a sequence.
        block_table, seqused_k: for a cache, in inference: keys and values are in pages of a pool, key (P,page,G,M,D)
            and value (P,page,G,Dv), in place of `cu_seq_k`. Sequence s has seqused_k[s] keys in the pages
            block_table[s,0], block_table[s,1], ..., int32 (S,) and (S,pages). For a cache (S,C,G,M,D) with a length
            for each row, block_table is arange(S)[:, None]. On a GPU a kernel reads up to 16 queries' keys where they
            are; otherwise the keys in use are copied first.
        is_causal, window: within each sequence, whose last query sees its last key.
        variance, e_step, dropout_p, return_lse, impl: as in `mgk_attention`.

    Returns:
        The output (Tq,H,Dv). With `return_lse` also lse (H,Tq), heads first as PyTorch's kernel returns it.
    """
    query = check.check_tensor("query", query, "Tq,H,D").transpose(0, 1)[None]
    key = _heads_first("key", key, "G,M,D", block_table)
    query, _, _ = check.check_query_key(query, key[:1], None)
    rows, pages = check_rows(query, key, cu_seq_q, cu_seq_k, max_q, max_k, seqused_k, block_table)
    visibility = _visibility(is_causal, window, rows)
    positions = _positions(log_prior, rows)
    options = check_options(
        query, positions, key.shape[2], log_prior, variance, visibility, e_step, dropout_p, return_lse
    )
    return _attention(query, key, None, value, options, rows, impl, pages)


@overload
def smgk_varlen_attention(
    query: Tensor, key: Tensor, shift: Tensor, value: Tensor, log_prior: Tensor | None = None, *,
    return_lse: Literal[True], **options: Unpack[VarlenOptions],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def smgk_varlen_attention(
    query: Tensor, key: Tensor, shift: Tensor, value: Tensor, log_prior: Tensor | None = None, *,
    return_lse: Literal[False] = False, **options: Unpack[VarlenOptions],
) -> Tensor: ...  # fmt: skip
@accepts_dtensors(Axes(None, 1), Axes(None, 0), arguments=PACKED)
def smgk_varlen_attention(
    query: Float[Tensor, "tq h d"],
    key: Float[Tensor, "tk g d"],
    shift: Float[Tensor, "h m d"],
    value: Float[Tensor, "tk g dv"],
    log_prior: Float[Tensor, "h m"] | Float[Tensor, "h m n"] | None = None,
    *,
    cu_seq_q: Int[Tensor, " s+1"],
    cu_seq_k: Int[Tensor, " s+1"] | None = None,
    max_q: int,
    max_k: int,
    seqused_k: Int[Tensor, " s"] | None = None,
    block_table: Int[Tensor, "s pages"] | None = None,
    variance: float | Float[Tensor, "h m"] | None = None,
    e_step: str = "soft",
    is_causal: bool = False,
    window: int | None = None,
    dropout_p: float = 0.0,
    return_lse: bool = False,
    impl: str = "auto",
) -> Float[Tensor, "tq h dv"] | tuple[Float[Tensor, "tq h dv"], Float[Tensor, "h tq"]]:
    """`smgk_attention` within each of several packed sequences.

    Args:
        key: (Tk,G,D).
        shift: b, (H,M,D).
        query, value, log_prior and the rest: as in `mgk_varlen_attention`.
    """
    query = check.check_tensor("query", query, "Tq,H,D").transpose(0, 1)[None]
    key = _heads_first("key", key, "G,D", block_table)
    check.check_tensor("shift", shift, "H,M,D")
    query, _, _ = check.check_query_key(query, key[:1], shift)
    rows, pages = check_rows(query, key, cu_seq_q, cu_seq_k, max_q, max_k, seqused_k, block_table)
    visibility = _visibility(is_causal, window, rows)
    positions = _positions(log_prior, rows)
    options = check_options(
        query, positions, shift.shape[1], log_prior, variance, visibility, e_step, dropout_p, return_lse
    )
    return _attention(query, key, shift, value, options, rows, impl, pages)


def check_rows(
    query: Tensor, key: Tensor, cu_seq_q: object, cu_seq_k: object, max_q: object, max_k: object, seqused_k: object,
    block_table: object,
) -> tuple[Rows, Pages | None]:  # fmt: skip
    """Check the packing of query (1,H,Tq,D) and key (1,G,[M,]Tk,D), or of the pages of key (P,G,[M,]page,D)."""
    most_q, most_k = check.check_count("max_q", max_q, 0), check.check_count("max_k", max_k, 0)
    queries = check_starts("cu_seq_q", cu_seq_q, query, "max_q", most_q)
    pages = check_pages(block_table, seqused_k, cu_seq_k, most_k, len(queries) - 1, key)
    if pages is not None:
        return Rows(queries, queries, most_q, most_k), pages
    keys = check_starts("cu_seq_k", cu_seq_k, key, "max_k", most_k)
    check.check_shape("cu_seq_k", keys, "S+1", tuple(queries.shape), ", as cu_seq_q")
    return Rows(queries, keys, most_q, most_k), None


def check_starts(name: str, starts: object, packed: Tensor, name_of_most: str, most: int) -> Tensor:
    """Require int32 (S+1,). Where the values can be read, they lead from 0 to the length of `packed`."""
    if not isinstance(starts, Tensor):
        raise TypeError(f"{name}: expected an int32 tensor (S+1,), got {check.describe(starts)}")
    if starts.dtype != torch.int32:
        raise TypeError(f"{name}: expected dtype torch.int32, got {starts.dtype}")
    if starts.dim() != 1 or starts.numel() < 2:
        raise ValueError(f"{name}: expected a shape (S+1,) for S >= 1 sequences, got {check.describe(starts)}")
    check.check_same(name, starts, packed, dtype=False)
    if not check.readable(starts):
        return starts
    lengths, total = starts.diff(), packed.shape[-2]
    if int(starts[0]) != 0 or int(starts[-1]) != total or bool((lengths < 0).any()):
        raise ValueError(f"{name}: expected numbers from 0 to {total} that do not decrease, got {starts.tolist()}")
    if int(lengths.max()) > most:
        raise ValueError(f"{name_of_most}: expected at least {int(lengths.max())}, the longest sequence, got {most}")
    return starts


def _visibility(is_causal: object, window: object, rows: Rows) -> Visibility:
    is_causal = check.check_flag("is_causal", is_causal)
    return Visibility(is_causal, check.check_window(window, is_causal, rows.max_k))


def _positions(log_prior: object, rows: Rows) -> int:
    """How many positions a prior (H,M,N) must have."""
    given = log_prior.shape[2] if isinstance(log_prior, Tensor) and log_prior.dim() == 3 else 0
    return max(given, rows.max_k)


def _heads_first(name: str, tensor: object, axes: str, block_table: object) -> Tensor:
    """(Tk,G,...) -> (1,G,...,Tk,D), or of pages (P,page,G,...) -> (P,G,...,page,D)."""
    if block_table is None:
        return check.check_tensor(name, tensor, f"Tk,{axes}").movedim(0, -2)[None]
    pool = check.check_tensor(name, tensor, f"P,page,{axes}")
    if 0 in pool.shape[:2]:
        raise ValueError(f"{name}: expected at least one page (P,page,{axes}) of one position, got {tuple(pool.shape)}")
    return pool.movedim(1, -2)


def _attention(
    query: Tensor, key: Tensor, shift: Tensor | None, value: object, options: Options, rows: Rows, impl: str,
    pages: Pages | None,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Query (1,H,Tq,D), key (1,G,[M,]Tk,D), value (Tk,G,Dv); or key (P,G,[M,]page,D) and value (P,page,G,Dv)."""
    axes = "Tk,G,Dv" if pages is None else "P,page,G,Dv"
    value = check.check_tensor("value", value, axes)
    positions = (key.shape[-2],) if pages is None else (len(key), key.shape[-2])
    check.check_shape("value", value, axes, (*positions, key.shape[1], value.shape[-1]), " to go with query and key")
    check.check_same("value", value, query)
    value = value.movedim(-3, -2) if pages is not None else value.transpose(0, 1)[None]
    module = implementation(impl, query, value)
    components = key.shape[2] if shift is None else shift.shape[1]
    if pages is not None:
        variance = options.variance if isinstance(options.variance, Tensor) else None
        check_inference(options, query, key, shift, value, options.log_prior, variance)
    with without_autocast(query):
        if pages is not None and decodes(module, rows.max_q):
            output, lse = decode(module, query, key, shift, value, options, rows, pages)
        else:
            if pages is not None:
                key, value, rows = gather(key, value, rows, pages, read=module.__name__ != "mgk.ops.triton")
            output, lse = _packed(module, query, key, shift, value, options, rows)
    output = output[0].transpose(0, 1)
    return returned((output, None if lse is None else lse[0]), options, components)


def _packed(
    module: ModuleType, query: Tensor, key: Tensor, shift: Tensor | None, value: Tensor, options: Options, rows: Rows
) -> Result:
    if module.__name__ != "mgk.ops.triton":
        return _one_by_one(module, query, key, shift, value, options, rows)
    # Its kernels read packed sequences as they are.
    inputs = (query, key, value) if shift is None else (query, key, shift, value)
    result: Result = (module.mgk_attention if shift is None else module.smgk_attention)(*inputs, options, rows)
    return result


def _one_by_one(
    module: ModuleType, query: Tensor, key: Tensor, shift: Tensor | None, value: Tensor, options: Options, rows: Rows
) -> Result:
    """Compute one sequence after the other, in memory linear in their lengths for "blockwise"."""
    queries = torch.split(query, rows.queries.diff().tolist(), 2)
    keys, values = (torch.split(x, rows.keys.diff().tolist(), -2) for x in (key, value))
    outputs, lses = [], []
    for q, k, v in zip(queries, keys, values, strict=True):
        own, prior = options, options.log_prior
        if prior is not None and prior.dim() == 3:
            own = own._replace(log_prior=prior[..., : k.shape[-2]])
        result = module.mgk_attention(q, k, v, own) if shift is None else module.smgk_attention(q, k, shift, v, own)
        outputs.append(result[0])
        lses.append(result[1])
    return torch.cat(outputs, 2), torch.cat(lses, 2) if options.return_lse else None
