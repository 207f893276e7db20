"""The softmax baseline, with memory linear in N.

A padded batch on a GPU is packed: its tokens are moved to the front, and FlashAttention's kernel for sequences of
different lengths computes them alone. The result is that of softmax attention with a mask, without the work for the
padding (5/6 of all work on bytes of reviews) and without the mask, which would keep SDPA from its fast kernels. All
shapes are those of the padded batch and nothing is read on the host, so a CUDA graph can capture it.

B batch, H heads, N positions (Nq queries, Nk keys), T rows of a packed batch, D width of a head, Dv width of a value.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from mgk.nn.packing import Packing
from mgk.ops import api, reference
from mgk.ops import arguments as check
from mgk.ops.common import compute_dtype, for_each_query_head, without_autocast, zero_masked
from mgk.ops.options import Options, Visibility

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int

FLASH_WIDTH = 256  # the widest head of the flash kernel; a multiple of 8


def softmax_attention(
    query: Float[Tensor, "b h nq d"],
    key: Float[Tensor, "b h nk d"],
    value: Float[Tensor, "b h nk dv"],
    *,
    is_causal: bool,
    key_mask: Bool[Tensor, "b nk"] | None,
    dropout_p: float,
    impl: str,
    query_mask: Bool[Tensor, "b nq"] | None = None,
    window: int | None = None,
) -> Float[Tensor, "b h nq dv"]:
    """PyTorch's scaled dot-product attention, wherever it needs no Nq x Nk mask or weights in memory.

    It needs them for causal attention that is padded or not square or has a window, and on a CPU for dropout. In these
    cases `impl` computes softmax attention as MGK with one component; for a window without padding on a GPU it is the
    flash kernel. `is_causal` is lower-right aligned, as everywhere in mgk.

    The output is undefined where `query_mask` is False. If it is the same object as `key_mask`, padding is skipped.
    """
    grouped = key.shape[1] != query.shape[1]
    num_queries, num_keys = query.shape[2], key.shape[2]
    window = check.check_window(window, is_causal, num_keys)
    if window is not None and num_queries == 1:
        key, value = key[:, :, -window:], value[:, :, -window:]
        key_mask, num_keys, window = None if key_mask is None else key_mask[:, -window:], window, None
    flash_takes = can_be_packed(query, value) and not grouped
    if key_mask is not None and query_mask is key_mask and flash_takes and window is None:
        return packed_attention(query, key, value, key_mask, is_causal=is_causal, dropout_p=dropout_p)
    if num_queries == 1:  # the last one, which sees every key
        is_causal = False
    if window is not None and key_mask is None and flash_takes:
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        return flash(q, k, v, None, max(num_queries, num_keys), is_causal, dropout_p, window).transpose(1, 2)
    square = not is_causal or (key_mask is None and num_queries == num_keys and window is None)
    if square and (dropout_p == 0 or query.is_cuda):
        mask = None if key_mask is None else key_mask[:, None, None]
        return scaled_dot_product_attention(query, key, value, mask, dropout_p, is_causal, enable_gqa=grouped)
    visibility = Visibility(is_causal, window, key_mask)
    return mixture_attention(query, key, value, visibility, dropout_p=dropout_p, impl=impl)[0]


def mixture_attention(
    query: Float[Tensor, "b h nq d"],
    key: Float[Tensor, "b g nk d"],
    value: Float[Tensor, "b g nk dv"],
    visibility: Visibility,
    *,
    dropout_p: float = 0.0,
    return_lse: bool = False,
    impl: str,
) -> tuple[Float[Tensor, "b h nq dv"], Float[Tensor, "b h nq"] | None]:
    """Softmax attention computed as MGK with one component, and the log of its row sums if asked for.

    Only the differences of these logs between sets of keys are those of softmax attention (`as_mixture`).
    """
    is_causal, window, key_mask, query_mask = visibility
    query_of_heads, component, log_prior, variance = as_mixture(zero_masked(query, query_mask), key, key_mask)
    module = api.implementation(impl, query, value)
    with without_autocast(query):
        options = Options(log_prior, variance, Visibility(is_causal, window), False, dropout_p, return_lse)
        output, lse = module.mgk_attention(query_of_heads, component, value.flatten(0, 1)[None], options)
    output = zero_masked(output.view(*query.shape[:3], value.shape[-1]), query_mask)
    if lse is None:
        return output, None
    lse = lse.view(query.shape[:3])
    return output, lse if query_mask is None else lse.masked_fill(~query_mask[:, None], -math.inf)


def can_be_packed(query: Tensor, value: Tensor) -> bool:
    """Whether the flash kernel supports the device, the dtype and the widths."""
    width = query.shape[-1]
    fits = width == value.shape[-1] and width % 8 == 0 and width <= FLASH_WIDTH
    return fits and query.is_cuda and torch.version.hip is None and query.dtype in (torch.bfloat16, torch.float16)


def packed_attention(
    query: Float[Tensor, "b h n d"],
    key: Float[Tensor, "b h n d"],
    value: Float[Tensor, "b h n d"],
    mask: Bool[Tensor, "b n"],
    *,
    is_causal: bool,
    dropout_p: float,
) -> Float[Tensor, "b h n d"]:
    """Self-attention of the tokens where `mask` is True, at any place in a row; zero at the others."""
    packing = Packing(mask, mask.numel())
    q, k, v = (pack_heads(x, packing) for x in (query, key, value))
    output = row_attention(q, k, v, packing, is_causal=is_causal, dropout_p=dropout_p)
    return unpack_heads(output, packing).masked_fill(~mask[:, None, :, None], 0)


def pack_heads(x: Float[Tensor, "b h n d"], packing: Packing) -> Float[Tensor, "t h d"]:
    return packing.pack(x.transpose(1, 2).flatten(2)).unflatten(1, (x.shape[1], x.shape[3]))  # type: ignore[no-any-return, no-untyped-call]


def unpack_heads(x: Float[Tensor, "t h d"], packing: Packing) -> Float[Tensor, "b h n d"]:
    return packing.unpack(x.flatten(1)).unflatten(2, x.shape[1:]).transpose(1, 2)  # type: ignore[no-any-return, no-untyped-call]


def row_attention(
    query: Float[Tensor, "t h d"],
    key: Float[Tensor, "t h d"],
    value: Float[Tensor, "t h d"],
    packing: Packing,
    *,
    is_causal: bool,
    dropout_p: float,
    window: int | None = None,
) -> Float[Tensor, "t h d"]:
    """Self-attention of a packed batch, with zeros in the spare rows."""
    # The kernel leaves spare rows unwritten, in its output and in its gradients.
    q, k, v = (ClearGradient.apply(x, packing.spare) for x in (query, key, value))  # type: ignore[no-untyped-call]
    output = flash(q, k, v, packing.cu_seqlens, packing.max_seqlen, is_causal, dropout_p, window)
    return output.masked_fill(packing.spare[:, None, None], 0)


class ClearGradient(torch.autograd.Function):
    """The identity; its backward sets the gradient of the spare rows to zero."""

    @staticmethod
    def forward(ctx: Any, x: Float[Tensor, "t h d"], spare: Bool[Tensor, " t"]) -> Tensor:
        ctx.save_for_backward(spare)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (spare,) = ctx.saved_tensors
        return grad.masked_fill(spare[:, None, None], 0), None


def packed_softmax_attention(
    query: Float[Tensor, "1 h t d"],
    key: Float[Tensor, "1 h t d"],
    value: Float[Tensor, "1 h t d"],
    packing: Packing,
    *,
    is_causal: bool,
    window: int | None,
    dropout_p: float,
    impl: str,
) -> Float[Tensor, "1 h t d"]:
    """`softmax_attention` of a packed batch; the flash kernel needs no padding."""
    q, k, v = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
    if can_be_packed(query, value) and key.shape[1] == query.shape[1]:
        output = row_attention(q, k, v, packing, is_causal=is_causal, dropout_p=dropout_p, window=window)
        return output.transpose(0, 1)[None]
    q, k, v = (unpack_heads(x, packing) for x in (q, k, v))
    mask = packing.mask
    output = softmax_attention(
        q, k, v, is_causal=is_causal, key_mask=mask, dropout_p=dropout_p, impl=impl, query_mask=mask, window=window
    )
    return pack_heads(output, packing).transpose(0, 1)[None]


def flash(
    query: Float[Tensor, "*b t h d"],
    key: Float[Tensor, "*b t h d"],
    value: Float[Tensor, "*b t h d"],
    cu_seqlens: Int[Tensor, " b+1"] | None,
    max_seqlen: int,
    is_causal: bool,
    dropout_p: float,
    window: int | None = None,
) -> Float[Tensor, "*b t h d"]:
    """Attention within the rows cu_seqlens[b] to cu_seqlens[b+1] for each b; other rows are not written.

    Without `cu_seqlens`, attention of (B,N,H,D). PyTorch calls this operator for nested tensors. The public function
    for packed rows (`varlen_attn`) has no dropout.
    """
    left = None if window is None else window - 1
    lengths = (query.shape[-3], key.shape[-3]) if cu_seqlens is None else (max_seqlen, max_seqlen)
    return torch.ops.aten._flash_attention_forward(  # type: ignore[no-any-return]
        query, key, value, cu_seqlens, cu_seqlens, *lengths, dropout_p, is_causal, False,
        window_size_left=left, window_size_right=None if window is None else 0,
    )[0]  # fmt: skip


def softmax_weights(
    query: Float[Tensor, "b h nq d"],
    key: Float[Tensor, "b h nk d"],
    *,
    is_causal: bool,
    key_mask: Bool[Tensor, "b nk"] | None,
    window: int | None = None,
) -> Float[Tensor, "b h nq nk"]:
    """Return the dense weights (B,H,Nq,Nk), for inspection."""
    visible = reference.visible_pairs(query, key.shape[2], Visibility(is_causal, window))
    with without_autocast(query):
        queries, keys, log_prior, variance = as_mixture(query, key, key_mask)
        keys = for_each_query_head(keys, queries.shape[1])
        weights, _ = reference.attention_weights(queries, keys, log_prior, variance, False, visible)
    return weights.view(*query.shape[:3], key.shape[2]).to(query.dtype)


def as_mixture(query: Tensor, key: Tensor, key_mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor, float]:
    """Write softmax attention as MGK with one component, s2 = sqrt(D) and the prior exp(|k_j|^2 / 2 s2) (Eqns 5 and 6).

    Then l[i,j] = q_i.k_j / sqrt(D) - |q_i|^2 / 2 s2, and the last term cancels. The prior differs from sample to
    sample, so the samples become heads: query (1,B*H,Nq,D), key (1,B*H,1,Nk,D), prior (B*H,1,Nk). A NaN in a key gives
    a prior that the public functions would reject, so the caller uses an implementation that does not check it.
    """
    variance = math.sqrt(key.shape[-1])
    log_prior = key.to(compute_dtype(key.dtype)).square().sum(-1) / (2 * variance)
    if key_mask is not None:
        log_prior = log_prior.masked_fill(~key_mask[:, None], -math.inf)
    log_prior = log_prior.repeat_interleave(query.shape[1] // key.shape[1], 1)
    return query.flatten(0, 1)[None], key.flatten(0, 1)[None, :, None], log_prior.flatten(0, 1)[:, None], variance
