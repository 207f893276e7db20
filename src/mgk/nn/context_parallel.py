"""Self-attention of a module over a sequence that is spread over the processes of a `Ring`.

The Gaussian variants and softmax exchange keys and values (`mgk.ops.ring`). The linear family exchanges sums: with a
causal mask, those of the keys before each chunk.

B batch, H heads, W processes, n positions of this process, D width of a head, F width of the features.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from mgk.nn.softmax import mixture_attention
from mgk.ops import api
from mgk.ops import linear_forms as forms
from mgk.ops.common import without_autocast
from mgk.ops.feature_maps import check_feature_map
from mgk.ops.linear import in_turn
from mgk.ops.options import Visibility
from mgk.ops.ring import Ring, chunks_of, ring_attention
from mgk.variants import LINEAR

if TYPE_CHECKING:
    from jaxtyping import Float

    from mgk.nn.attention import MixtureAttention
    from mgk.nn.operators import AttentionInputs


def attend(x: AttentionInputs, ring: Ring) -> Float[Tensor, "b h n d"]:
    """Return the heads of the positions of this process, zero where `query_mask` is False."""
    if x.variant in LINEAR:
        return _linear(x, ring)
    options: dict[str, Any] = {
        "ring": ring, "is_causal": x.is_causal, "window": x.window, "key_mask": x.key_mask, "query_mask": x.query_mask,
    }  # fmt: skip

    def piece(
        query: Tensor, key: Tensor, value: Tensor, key_mask: Tensor | None, query_mask: Tensor | None,
        is_causal: bool, window: int | None, *parameters: Tensor | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        if x.variant == "softmax":
            visibility = Visibility(is_causal, window, key_mask, query_mask)
            output, lse = mixture_attention(query, key, value, visibility, return_lse=True, impl=x.impl)
            assert lse is not None
            return output, lse
        shift, log_prior, variance = parameters
        seen: dict[str, Any] = {
            "variance": variance, "e_step": x.e_step, "is_causal": is_causal, "window": window, "key_mask": key_mask,
            "query_mask": query_mask, "impl": x.impl,
        }  # fmt: skip
        if shift is None:
            return api.mgk_attention(query, key, value, log_prior, return_lse=True, **seen)
        return api.smgk_attention(query, key, shift, value, log_prior, return_lse=True, **seen)

    parameters = () if x.variant == "softmax" else (x.shift, x.log_prior, x.variance)
    return ring_attention(piece, x.query, x.key, x.value, *parameters, **options)


def check_call(module: MixtureAttention, is_self: bool, need_weights: bool, cache: object, packing: object) -> None:
    """Require a call that a ring can compute."""
    refused = {
        "key": (is_self, "self-attention (key=None)", "another key"),
        "need_weights": (not need_weights, "False", "True"),
        "cache": (cache is None, "None", type(cache).__name__),
        "packing": (packing is None, "None", type(packing).__name__),
        "dropout": (not (module.training and module.dropout), "0", module.dropout),
        "prior": (module.log_prior is None or module.log_prior.dim() == 2, "one for all positions", "one for each"),
        "prior or means": (not module.em_buffers, "'sgd': an M-step needs all pairs of the sequence", "'em'"),
    }
    for name, (fits, expected, got) in refused.items():
        if not fits:
            raise ValueError(f"{name}: expected {expected} in context parallelism, got {got}")


def _linear(x: AttentionInputs, ring: Ring) -> Tensor:
    key = x.key if x.key.dim() == 5 or x.shift is not None else x.key[:, :, None]
    phi = check_feature_map(x.feature_map)
    chunk = ring.chunk_length("query", x.query, 2)
    value = forms.with_ones(x.value, x.key_mask, x.query)
    halves = slice(0, chunk), slice(chunk, 2 * chunk)

    def read(query: Tensor, shift: Tensor | None, log_prior: Tensor | None) -> Tensor:
        reads, keys = forms.prepare(query, key, shift, log_prior, x.key_mask, phi, with_state=True)
        empty = forms.state_sums(None, reads, value)
        sums, exponents = _gather([forms.add_keys(keys.at(each), value[:, :, each], *empty) for each in halves], ring)
        if not x.is_causal:
            total, exponent = _total(sums, exponents, empty)
            return reads.times_exp(exponent - forms.query_scale(reads.exponent + exponent)) @ total
        parts = []
        for each, number in zip(halves, ring.chunks, strict=True):
            before = _total(sums[:number], exponents[:number], empty)
            parts.append(forms.causal(reads.at(each), keys.at(each), value[:, :, each], *before)[0])
        return torch.cat(parts, 2)

    with without_autocast(x.query):
        group = x.query.shape[1] // key.shape[1]
        output = forms.quotient(in_turn(group, x.query, x.shift, x.log_prior, read)).to(x.query.dtype)
    return output if x.query_mask is None else output.masked_fill(~x.query_mask[:, None, :, None], 0)


def _gather(own: list[tuple[Tensor, Tensor]], ring: Ring) -> tuple[Tensor, Tensor]:
    """The sums of all chunks of the sequence, in order: (2W,B,H,F,Dv+1) and their exponents (2W,B,H,1,F)."""
    order = [number for rank in range(ring.size) for number in chunks_of(rank, ring.size)]
    place = torch.tensor(order).argsort()
    sums, exponents = (torch.stack(each) for each in zip(*own, strict=True))
    gathered = _AllGather.apply(sums, ring.group), _AllGather.apply(exponents.detach(), ring.group)  # type: ignore[no-untyped-call]
    sums, exponents = (each.flatten(0, 1)[place.to(each.device)] for each in gathered)
    return sums, exponents


def _total(sums: Tensor, exponents: Tensor, empty: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """The sum of some chunks, (B,H,F,Dv+1), and its exponents (B,H,1,F)."""
    if not len(sums):
        return empty
    c = exponents.amax(0)
    return (sums * (exponents - c).exp().mT).sum(0), c


class _AllGather(torch.autograd.Function):
    """(2,...) of each process -> (W,2,...). The gradients of all processes are added."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.stack(parts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.contiguous()
        dist.all_reduce(grad, group=ctx.group)
        return grad[dist.get_rank(ctx.group)], None
