"""Attention over a sequence that is spread over processes: keys and values go round a ring (Liu et al. 2023).

Of W processes, each holds two of the 2W chunks of a sequence, r and 2W-1-r, one after the other: with a causal mask
all have the same number of visible pairs. In W steps every process meets the keys and values of every other, attends
with its own queries to those that they see, and merges the results by the log of their row sums, which is exact
(`mgk.merge_attention`). Backward, keys and values go round again with their gradients; each partial result is computed
again, because keeping it would take the memory of the whole sequence. So memory is that of a sequence of N/W positions.

PyTorch's `context_parallel` does this for its own softmax attention only.

B batch, H query heads, G heads of keys and values, N positions of the whole sequence, n = N/W of one process, D width
of a head, Dv width of a value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from mgk.ops import arguments as check
from mgk.ops.common import compute_dtype, without_autocast
from mgk.ops.partial import merge_attention

if TYPE_CHECKING:
    from jaxtyping import Bool, Float
    from torch.distributed.device_mesh import DeviceMesh

EVERYTHING = slice(None)


class Ring:
    """The processes of a one-dimensional mesh, each with its two chunks of a sequence."""

    def __init__(self, mesh: DeviceMesh) -> None:
        if mesh.ndim != 1:
            raise ValueError(f"mesh: expected one dimension, such as mesh['cp'], got {mesh}")
        self.group: dist.ProcessGroup = mesh.get_group()
        self.size, self.rank = mesh.size(), mesh.get_local_rank()

    @property
    def chunks(self) -> tuple[int, int]:
        """The numbers of this process's chunks."""
        return chunks_of(self.rank, self.size)

    def chunk_length(self, name: str, value: Tensor, dim: int) -> int:
        """How many positions a chunk has, of a tensor with the positions of this process."""
        if value.shape[dim] % 2:
            raise ValueError(
                f"{name}: expected an even number of positions, which two chunks of a sequence have, got "
                f"{check.describe(value)}"
            )
        return value.shape[dim] // 2

    def positions(self, length: int, device: torch.device | None = None) -> Tensor:
        """The positions in the sequence, (n,), of the `length` = n that this process holds."""
        chunk = length // 2
        return torch.cat([torch.arange(each * chunk, (each + 1) * chunk, device=device) for each in self.chunks])

    def exchange(self, tensors: Sequence[Tensor]) -> Callable[[], list[Tensor]]:
        """Begin to send tensors to the next process. The result waits for those of the one before, and returns them."""
        if self.size == 1:
            return lambda: list(tensors)
        following, before = (
            dist.get_global_rank(self.group, (self.rank + step) % self.size) for step in (1, self.size - 1)
        )
        received = [torch.empty_like(tensor) for tensor in tensors]
        operations = [dist.P2POp(dist.isend, tensor, following, self.group) for tensor in tensors]
        operations += [dist.P2POp(dist.irecv, tensor, before, self.group) for tensor in received]
        works = dist.batch_isend_irecv(operations)

        def wait() -> list[Tensor]:
            for work in works:
                work.wait()
            return received

        return wait


def chunks_of(rank: int, size: int) -> tuple[int, int]:
    return rank, 2 * size - 1 - rank


def shard_sequence(tensor: Tensor, mesh: DeviceMesh, dim: int = 1) -> Tensor:
    """Return the positions of this process, two chunks of the sequence along `dim`.

    Every process passes the whole tensor: tokens, targets and masks, or positions if they are not 0, 1, ...
    """
    ring = Ring(mesh)
    if tensor.shape[dim] % (2 * ring.size):
        raise ValueError(
            f"tensor: expected a multiple of 2 x {ring.size} processes along dimension {dim}, got "
            f"{check.describe(tensor)}"
        )
    parts = tensor.chunk(2 * ring.size, dim)
    return torch.cat([parts[each] for each in ring.chunks], dim)


def unshard_sequence(tensor: Tensor, mesh: DeviceMesh, dim: int = 1) -> Tensor:
    """Return the whole sequence on every process, of the parts that `shard_sequence` returned. It has no gradient."""
    ring = Ring(mesh)
    ring.chunk_length("tensor", tensor, dim)
    gathered = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(ring.size)]
    dist.all_gather(gathered, tensor.detach().contiguous(), group=ring.group)
    parts: dict[int, Tensor] = {}
    for rank, part in enumerate(gathered):
        parts |= dict(zip(chunks_of(rank, ring.size), part.chunk(2, dim), strict=True))
    return torch.cat([parts[number] for number in range(2 * ring.size)], dim)


class Piece(NamedTuple):
    """Queries of this process, keys of another, and which of these pairs are visible.

    Masks are lower-right aligned. `reverse`: they apply to queries and keys in the opposite order.
    """

    queries: slice
    keys: slice
    is_causal: bool = False
    window: int | None = None
    reverse: bool = False


def pieces(rank: int, source: int, size: int, chunk: int, is_causal: bool, window: int | None) -> list[Piece]:
    """What the queries of process `rank` see of the keys of process `source`, as disjoint pieces."""
    if not is_causal:
        return [Piece(EVERYTHING, EVERYTHING)]
    if window is not None and window < 2 * size * chunk:
        return [
            piece
            for i, query_chunk in enumerate(chunks_of(rank, size))
            for j, key_chunk in enumerate(chunks_of(source, size))
            for piece in _within_window(i * chunk, j * chunk, query_chunk - key_chunk, chunk, window)
        ]
    if rank == source:
        return [Piece(EVERYTHING, EVERYTHING, is_causal=True)]
    if source < rank:  # its first chunk is before both chunks of the queries, its second after them
        return [Piece(EVERYTHING, slice(0, chunk))]
    return [Piece(slice(chunk, 2 * chunk), EVERYTHING)]  # both are between the two chunks of the queries


def _within_window(first_query: int, first_key: int, distance: int, chunk: int, window: int) -> list[Piece]:
    """The pieces of a chunk of queries, `distance` chunks after a chunk of keys.

    In an earlier chunk, query i sees the keys j >= i + lost. In the opposite order that is a causal mask.
    """

    def piece(queries: tuple[int, int], keys: tuple[int, int], **mask: Any) -> Piece:
        rows, columns = (slice(first + a, first + b) for first, (a, b) in ((first_query, queries), (first_key, keys)))
        return Piece(rows, columns, **mask)

    if distance < 0:
        return []
    if distance == 0:
        return [piece((0, chunk), (0, chunk), is_causal=True, window=window if window < chunk else None)]
    lost = distance * chunk - window + 1
    if lost >= chunk:
        return []
    if lost <= 1 - chunk:
        return [piece((0, chunk), (0, chunk))]
    if lost >= 0:
        return [piece((0, chunk - lost), (lost, chunk), is_causal=True, reverse=True)]
    return [piece((0, -lost), (0, chunk)), piece((-lost, chunk), (0, chunk), is_causal=True, reverse=True)]


# (query, key, value, key_mask, query_mask, is_causal, window, *parameters) -> output (B,H,Nq,Dv), lse (B,H,Nq)
Attend = Callable[..., tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Call:
    """What all pieces of a call share."""

    attend: Attend
    ring: Ring
    is_causal: bool
    window: int | None
    key_mask: Tensor | None  # uint8 (B,n), of the keys that are here now
    query_mask: Tensor | None  # bool (B,n)

    def pieces(self, step: int, length: int) -> list[Piece]:
        source = (self.ring.rank - step) % self.ring.size
        return pieces(self.ring.rank, source, self.ring.size, length // 2, self.is_causal, self.window)

    def compute(self, piece: Piece, query: Tensor, key: Tensor, value: Tensor, parameters: Sequence[Any]) -> Any:
        """The output and lse of the queries of a piece."""
        key_mask = None if self.key_mask is None else self.key_mask[:, piece.keys].bool()
        query_mask = None if self.query_mask is None else self.query_mask[:, piece.queries]
        if piece.reverse:
            query, key, value = (x.flip(-2) for x in (query, key, value))
            key_mask, query_mask = (x if x is None else x.flip(1) for x in (key_mask, query_mask))
        output, lse = self.attend(query, key, value, key_mask, query_mask, piece.is_causal, piece.window, *parameters)
        return (output.flip(2), lse.flip(2)) if piece.reverse else (output, lse)


def ring_attention(
    attend: Attend,
    query: Float[Tensor, "b h n d"],
    key: Float[Tensor, "b g n d"] | Float[Tensor, "b g m n d"],
    value: Float[Tensor, "b g n dv"],
    *parameters: Tensor | None,
    ring: Ring,
    is_causal: bool,
    window: int | None = None,
    key_mask: Bool[Tensor, "b n"] | None = None,
    query_mask: Bool[Tensor, "b n"] | None = None,
) -> Float[Tensor, "b h n dv"]:
    """Attention to the whole sequence, of the queries of this process. It differentiates once.

    Args:
        attend: computes one piece, as `mgk.smgk_attention(..., return_lse=True)` does.
        query, key, value: of the positions of this process, as `shard_sequence` returns them.
        parameters: tensors that `attend` takes, with the same values on all processes. Their gradients are those of
            the queries of this process; the sum over the processes is that of the sequence.
        ring: the processes. All must make the same calls.
        is_causal, window, key_mask, query_mask: as in `mgk.mgk_attention`, for the whole sequence; the masks are those
            of the positions of this process.
    """
    length = 2 * ring.chunk_length("query", query, 2)
    if key.shape[-2] != length:
        raise ValueError(f"key: expected as many positions as query, {length}, got {check.describe(key)}")
    mask = None if key_mask is None else key_mask.to(torch.uint8)
    call = Call(attend, ring, is_causal, window, mask, query_mask)
    return RingAttention.apply(call, query, key, value, *parameters)  # type: ignore[no-any-return, no-untyped-call]


class RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Call, query: Tensor, key: Tensor, value: Tensor, *parameters: Tensor | None) -> Tensor:
        dtype = compute_dtype(query.dtype)
        output = query.new_zeros(*query.shape[:3], value.shape[-1], dtype=dtype)
        lse = query.new_full(query.shape[:3], -torch.inf, dtype=dtype)
        for step, now, held in _round(call, key, value):
            for piece in now.pieces(step, query.shape[2]):
                rows = piece.queries
                part, part_lse = now.compute(piece, query[:, :, rows], *_columns(held, piece), parameters)
                merged = merge_attention((output[:, :, rows], lse[:, :, rows]), (part.to(dtype), part_lse))
                output[:, :, rows], lse[:, :, rows] = merged
        ctx.call, ctx.present = call, [each is not None for each in parameters]
        ctx.save_for_backward(query, key, value, output, lse, *(each for each in parameters if each is not None))
        return output.to(query.dtype)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output, lse, *given = ctx.saved_tensors
        call: Call = ctx.call
        totals = [each.new_zeros(each.shape, dtype=output.dtype) for each in (query, key, value)]
        totals_given = [torch.zeros_like(each) for each in given]
        grad = grad.to(output.dtype)
        mean_gain = (grad * output).sum(-1)  # of a row's values, weighted as attention weights them
        for step, now, held in _round(call, key, value):
            for piece in now.pieces(step, query.shape[2]):
                rows, columns = piece.queries, piece.keys
                leaves = [query[:, :, rows], *_columns(held, piece), *given]
                leaves = [each.detach().requires_grad_() for each in leaves]
                with torch.enable_grad(), without_autocast(query):
                    rest = iter(leaves[3:])
                    parameters = [next(rest) if there else None for there in ctx.present]
                    part, part_lse = now.compute(piece, leaves[0], leaves[1], leaves[2], parameters)
                share = (part_lse.detach() - lse[:, :, rows]).exp().masked_fill(part_lse == -torch.inf, 0)
                upstream = share[..., None] * grad[:, :, rows]
                gain = (upstream * part.detach()).sum(-1) - share * mean_gain[:, :, rows]
                found = torch.autograd.grad(
                    (part, part_lse), leaves, (upstream.to(part.dtype), gain), allow_unused=True, materialize_grads=True
                )
                places = [totals[0][:, :, rows], totals[1][..., columns, :], totals[2][:, :, columns], *totals_given]
                for place, each in zip(places, found, strict=True):
                    place += each
            totals[1:] = call.ring.exchange(totals[1:])()  # they follow keys and values, and at last come home
        rest = iter(totals_given)
        return None, *(x.to(query.dtype) for x in totals), *(next(rest) if there else None for there in ctx.present)


def _round(call: Call, key: Tensor, value: Tensor) -> Iterator[tuple[int, Call, list[Tensor]]]:
    """Each step of a round: its number, the call with the mask of the keys that are here, and these keys and values.

    The next keys and values are under way while the caller computes.
    """
    held = [key.contiguous(), value.contiguous()] + ([] if call.key_mask is None else [call.key_mask.contiguous()])
    for step in range(call.ring.size):
        following = call.ring.exchange(held) if step + 1 < call.ring.size else None
        yield step, call if call.key_mask is None else replace(call, key_mask=held[2]), held[:2]
        if following is not None:
            held = following()


def _columns(held: list[Tensor], piece: Piece) -> tuple[Tensor, Tensor]:
    return held[0][..., piece.keys, :], held[1][..., piece.keys, :]
