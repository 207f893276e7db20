"""Keys and values in pages of a pool: checks of a block table, and what to do where no kernel reads pages.

S sequences, P pages of the pool, H query heads, G heads of keys and values, M components, Tq queries and Tk keys of all
sequences, D width of a head, Dv width of a value.
"""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mgk.ops import arguments as check
from mgk.ops.dispatch import MAX_DECODE_QUERIES
from mgk.ops.options import Options, Pages, Result, Rows

if TYPE_CHECKING:
    from jaxtyping import Float


def check_pages(
    block_table: object, seqused_k: object, cu_seq_k: object, max_k: int, sequences: int, key: Tensor
) -> Pages | None:
    """Check a block table for key (P,G,[M,]page,D). Where its values can be read, they are pages of the pool."""
    if block_table is None:
        if seqused_k is not None:
            raise ValueError(f"seqused_k: expected None without block_table, got {check.describe(seqused_k)}")
        return None
    if cu_seq_k is not None:
        raise ValueError(f"cu_seq_k: expected None with block_table, got {check.describe(cu_seq_k)}")
    table = _integers("block_table", block_table, "S,pages", key)
    used = _integers("seqused_k", seqused_k, "S", key)
    check.check_shape("block_table", table, "S,pages", (sequences, table.shape[1]), " to go with cu_seq_q")
    check.check_shape("seqused_k", used, "S", (sequences,), " to go with cu_seq_q")
    page, most = key.shape[-2], table.shape[1] * key.shape[-2]
    if max_k > most:
        raise ValueError(f"max_k: expected at most {most}, {table.shape[1]} pages of {page} keys, got {max_k}")
    if check.readable(used):
        if bool(((used < 0) | (used > max_k)).any()):
            raise ValueError(f"seqused_k: expected numbers from 0 to max_k = {max_k}, got {used.tolist()}")
        needed = torch.arange(table.shape[1])[None] * page < used[:, None]
        wrong = table[needed & ((table < 0) | (table >= len(key)))]
        if len(wrong):
            raise ValueError(f"block_table: expected pages from 0 to {len(key) - 1}, got {wrong.tolist()}")
    return Pages(table, used, max_k)


def check_inference(options: Options, *inputs: Tensor | None) -> None:
    """Require a call without dropout and gradients: pages are for inference."""
    if options.dropout_p:
        raise ValueError(f"dropout_p: expected 0 with block_table, got {options.dropout_p}")
    if torch.is_grad_enabled() and any(each is not None and each.requires_grad for each in inputs):
        raise ValueError("block_table: expected inputs that need no gradient; call it under torch.no_grad()")


def decodes(module: ModuleType, queries: int) -> bool:
    """Whether an implementation has a kernel that reads pages, for this number of queries of a sequence."""
    return hasattr(module, "attend_to_cache") and queries <= MAX_DECODE_QUERIES


def decode(
    module: ModuleType, query: Tensor, key: Tensor, shift: Tensor | None, value: Tensor, options: Options, rows: Rows,
    pages: Pages,
) -> Result:  # fmt: skip
    """Attention of packed queries (1,H,Tq,D), a few of each sequence, by that kernel."""
    total, sequences, most = query.shape[2], len(pages.used), rows.max_q
    packed = query[0].transpose(0, 1)  # (Tq,H,D)
    if total == sequences * most:  # all have equally many
        padded = packed.view(sequences, most, *packed.shape[1:]).transpose(1, 2)

        def unpadded(x: Tensor) -> Tensor:
            return x.transpose(1, 2).flatten(0, 1)
    else:  # the last queries of each sequence line up: the causal mask ends at its last key
        starts, ends = rows.queries[:-1].long(), rows.queries[1:].long()
        place = ends[:, None] - most + torch.arange(most, device=query.device)
        padded = packed[place.clamp(min=0)].masked_fill((place < starts[:, None])[..., None, None], 0).transpose(1, 2)
        token = torch.arange(total, device=query.device)
        sequence = torch.searchsorted(ends, token, right=True)
        slot = token - ends[sequence] + most

        def unpadded(x: Tensor) -> Tensor:
            return x.transpose(1, 2)[sequence, slot]

    output, lse = module.attend_to_cache(padded, key, shift, value, options, pages)
    return unpadded(output).transpose(0, 1)[None], None if lse is None else unpadded(lse).transpose(0, 1)[None]


def gather(
    key: Float[Tensor, "p g *m page d"], value: Float[Tensor, "p g page dv"], rows: Rows, pages: Pages, read: bool
) -> tuple[Tensor, Tensor, Rows]:
    """Copy the keys and values of all sequences, one after the other: (1,G,[M,]Tk,D), (1,G,Tk,Dv) and where they start.

    Unless the lengths are `read` on the host, Tk is that of the longest sequences possible; what is behind the last key
    is undefined.
    """
    page, table, used = value.shape[-2], pages.table.long(), pages.used.long()
    starts = torch.nn.functional.pad(used.cumsum(0), (1, 0))
    total = int(starts[-1]) if read else len(used) * pages.max_k
    token = torch.arange(total, device=value.device)
    sequence = torch.searchsorted(starts[1:], token, right=True).clamp(max=len(used) - 1)
    within = (token - starts[sequence]).clamp(max=table.shape[1] * page - 1)
    number = table[sequence, within // page].clamp(0, len(key) - 1)
    key, value = (x.movedim(-2, 1)[number, within % page].movedim(0, -2)[None] for x in (key, value))
    return key, value, rows._replace(keys=starts.int())


def _integers(name: str, value: object, axes: str, key: Tensor) -> Tensor:
    if not isinstance(value, Tensor) or value.dtype != torch.int32:
        got = f"dtype {value.dtype}" if isinstance(value, Tensor) else check.describe(value)
        raise TypeError(f"{name}: expected an int32 tensor ({axes}) with block_table, got {got}")
    if value.dim() != axes.count(",") + 1:
        raise ValueError(f"{name}: expected {axes.count(',') + 1} dimensions ({axes}), got {check.describe(value)}")
    check.check_same(name, value, key, dtype=False, whose="key")
    return value
