"""Packed documents: from the arguments by which Transformers' collators say where documents begin, to `Documents`.

`DataCollatorWithFlattening` and the padding-free collator of TRL put several documents into one row. They pass
`position_ids` that start again, or `cu_seq_lens_q`, or `seq_idx`. Attention stays within a document.

B batch, N positions, S documents.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from mgk.nn import MixtureAttention
from mgk.nn.documents import Documents
from mgk.ops import arguments as check

if TYPE_CHECKING:
    from jaxtyping import Bool, Int

LENGTHS = ("cu_seq_lens_q", "cu_seq_lens_k")
OPTIONS = (*LENGTHS, "seq_idx", "max_length_q", "max_length_k")


class Packed(NamedTuple):
    """The documents of a batch, and the position of every token in its document (B,N)."""

    documents: Documents
    positions: Tensor


def find(
    model: torch.nn.Module, shape: torch.Size, positions: Int[Tensor, "b n"] | None, mask: Bool[Tensor, "b n"] | None,
    options: dict[str, Any], *, cached: bool = False,
) -> Packed | None:  # fmt: skip
    """Return the documents that are packed into a batch, or None if every row is one text.

    Removes the arguments that describe packing from `options`.

    Args:
        model: the model; one with M-steps or attention hooks needs all documents at once.
        shape: (B,N).
        positions: (B,N), `position_ids`. A document begins where they do not increase.
        mask: (B,N), True for real tokens.
        options: the keyword arguments of the call.
        cached: whether the call has a cache, through which documents cannot be packed.
    """
    given = {name: value for name in OPTIONS if (value := options.pop(name, None)) is not None}
    said = [name for name in (*LENGTHS, "seq_idx") if name in given]
    if not said and (positions is None or shape[1] == 1):
        return None
    if torch.compiler.is_exporting():
        if said:
            raise ValueError(f"{said[0]}: expected None in an exported model, which has one text in a row")
        _require_one_text(positions, mask)
        return None
    found: Packed | None = _find(model, shape, positions, mask, given, cached)
    return found


def _require_one_text(positions: Tensor | None, mask: Tensor | None) -> None:
    """Make an exported model check its `position_ids`, as it cannot build another graph for packed documents."""
    assert positions is not None
    ahead = positions[:, 1:] > positions[:, :-1]
    if mask is not None:
        ahead = ahead | ~mask[:, -ahead.shape[1] :] | ~mask[:, -positions.shape[1] : -1]
    torch._assert_async(ahead.all(), "position_ids: expected one text in a row of an exported model")


@torch.compiler.disable  # reads numbers: a compiled model continues with the documents it finds
def _find(
    model: torch.nn.Module, shape: torch.Size, positions: Tensor | None, mask: Tensor | None, given: dict[str, Any],
    cached: bool,
) -> Packed | None:  # fmt: skip
    batch, length = shape
    device = next(iter(t.device for t in (positions, *given.values()) if isinstance(t, Tensor)))
    real = torch.ones(batch * length, dtype=torch.bool) if mask is None else mask[:, -length:].flatten().cpu()
    places = real.nonzero()[:, 0]
    rows = places // length
    if not len(places):
        return None
    numbers = _numbers(shape, given)
    if numbers is None:
        assert positions is not None
        again = positions.flatten().cpu()[places].diff() <= 0
    else:
        again = numbers[places].diff() != 0
    new_row = rows.diff() > 0
    if not bool((again & ~new_row).any()):
        return None
    if cached:
        raise ValueError("position_ids: expected one text in a row with a cache, got packed documents; use_cache=False")
    begins = torch.cat((torch.tensor([True]), again | new_row))
    starts = places[begins]
    lengths = torch.cat((begins.nonzero()[:, 0], torch.tensor([len(places)]))).diff()
    stops = starts + lengths
    if not torch.equal(places[lengths.cumsum(0) - 1] + 1, stops):
        raise ValueError("attention_mask: expected no padding inside a packed document, got some")
    if positions is None:
        positions = torch.zeros(batch * length, dtype=torch.long)
        positions[places] = torch.arange(len(places)) - (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
        positions = positions.view(batch, length).to(device)
    attentions = [module for module in model.modules() if isinstance(module, MixtureAttention)]
    together = any(module.em_buffers or module._attention_hooks for module in attentions)
    spans = starts.tolist(), stops.tolist()
    return Packed(Documents(batch, length, *spans, together=together, device=device), positions)


def _numbers(shape: torch.Size, given: dict[str, Any]) -> Int[Tensor, " t"] | None:
    """Return a number for each position that differs between neighbouring documents, if the caller says so."""
    rows = shape[0] * shape[1]
    found = None
    if (number := given.get("seq_idx")) is not None:
        number = check.check_tensor("seq_idx", number, "B,N") if number.is_floating_point() else number
        check.check_shape("seq_idx", number, "B,N", tuple(shape))
        found = number.flatten().cpu()
    if (keys := given.get("cu_seq_lens_k")) is not None:
        queries = given.setdefault("cu_seq_lens_q", keys)
        if not torch.equal(queries, keys):
            raise ValueError("cu_seq_lens_k: expected the same numbers as cu_seq_lens_q, got others")
    if (edges := given.get("cu_seq_lens_q")) is not None:
        edges = edges.flatten().cpu().long()
        if len(edges) < 2 or int(edges[0]) or int(edges[-1]) != rows or bool((edges.diff() < 0).any()):
            raise ValueError(f"cu_seq_lens_q: expected numbers from 0 to {rows} that do not fall, got {edges.tolist()}")
        lengths = edges.diff()
        found = torch.arange(len(lengths)).repeat_interleave(lengths)
    return found
