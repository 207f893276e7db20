"""Several documents in the rows of a batch: attention stays within a document, every other layer works as always.

B batch, N positions, T = B*N rows, E width of the model, D width of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mgk.nn.embeddings import Rotation
from mgk.nn.packing import Packing, reorder
from mgk.ops import arguments as check

if TYPE_CHECKING:
    from jaxtyping import Float, Int

Attention = Callable[[Tensor, Packing, Rotation | None], Tensor]


class Documents:
    """Which positions of a batch (B,N) belong to one document. Passed as `packing` with tensors (B,N,E).

    Operators that need a padded batch get one for each group of documents of similar length, so that padding at most
    doubles the memory. M-steps and attention hooks need all documents at once, with `together`.

    Args:
        batch: B.
        length: N.
        starts: the first position of each document in the flattened batch, increasing.
        stops: the position behind each document. Positions in no document are padding, whose output is undefined.
        together: make one group of all documents.
        device: where the batch is.
    """

    def __init__(
        self, batch: int, length: int, starts: Sequence[int], stops: Sequence[int], *, together: bool = False,
        device: torch.device | str | None = None,
    ) -> None:  # fmt: skip
        rows, edge = batch * length, 0
        if not starts or len(starts) != len(stops):
            raise ValueError(f"starts, stops: expected as many of both, at least one, got {len(starts)}, {len(stops)}")
        for start, stop in zip(starts, stops, strict=True):
            if not edge <= start < stop <= rows:
                raise ValueError(f"starts, stops: expected documents within {rows} positions, in order, got others")
            edge = stop
        self.shape = (batch, length)
        spans = sorted(zip(starts, stops, strict=True), key=lambda span: span[0] - span[1])  # the longest first
        groups: list[list[int]] = []
        for start, stop in spans:
            if not groups or (not together and 2 * (stop - start) <= groups[-1][0]):
                groups.append([])
            groups[-1].append(stop - start)
        covered = torch.zeros(rows, dtype=torch.bool)
        places = [torch.arange(start, stop) for start, stop in spans]
        covered[torch.cat(places)] = True
        order = torch.cat((*places, (~covered).nonzero()[:, 0]))
        spare = rows - sum(map(sum, groups))
        self.sizes = [sum(group) for group in groups]
        self.sizes[-1] += spare
        self.groups = [group_packing(lengths, size, device) for lengths, size in zip(groups, self.sizes, strict=True)]
        self.order: Int[Tensor, " t"] = order.to(device)
        self.inverse: Int[Tensor, " t"] = order.argsort().to(device)

    def attend(
        self, attention: Attention, x: Float[Tensor, "b n e"], rotary: Rotation | None
    ) -> Float[Tensor, "b n e"]:
        """Return `attention(rows, packing, rotation)` of every group, in the places of its rows."""
        check.check_shape("query", check.check_tensor("query", x, "B,N,E"), "B,N,E", (*self.shape, x.shape[-1]))
        parts = split(reorder(x.flatten(0, 1), self.order, self.inverse), self.sizes)
        rotations: list[Rotation | None] = [None] * len(parts)
        if rotary is not None:
            moved = (part.expand(*self.shape, -1).flatten(0, 1)[self.order] for part in rotary)
            cos, sin = (split(part, self.sizes) for part in moved)
            rotations = [Rotation(*pair) for pair in zip(cos, sin, strict=True)]
        found = [attention(*each) for each in zip(parts, self.groups, rotations, strict=True)]
        return reorder(torch.cat(found), self.inverse, self.order).view(*self.shape, -1)


def group_packing(lengths: list[int], size: int, device: torch.device | str | None) -> Packing:
    """Return the packing of documents in `size` rows, one after the other; `lengths` falls."""
    longest = lengths[0]
    extra = size - sum(lengths)  # rows of padding: they need places in the padded batch
    counts = torch.tensor(lengths + [0] * -(-extra // longest), device=device)
    packing = Packing(torch.arange(longest, device=device) < counts[:, None], size)
    _ = packing.cu_seqlens, packing.spare  # computed now, not where a compiled model would
    return packing


def split(x: Float[Tensor, "t e"], sizes: list[int]) -> Sequence[Tensor]:
    return torch.split(x, sizes)  # type: ignore[no-any-return, no-untyped-call]
