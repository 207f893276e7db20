"""Mixture keys in a model that somebody else wrote with `torch.nn`."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from mgk.nn.attention import MixtureAttention
from mgk.ops import arguments as check

T = TypeVar("T", bound=nn.Module)


class SequenceFirstAttention(MixtureAttention):
    """`MixtureAttention` for inputs (N,B,E), as `nn.MultiheadAttention` has them with `batch_first=False`."""

    batch_first = False

    def forward(
        self, query: Tensor, key: Tensor | None = None, value: Tensor | None = None, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        if not isinstance(query, Tensor) or query.dim() != 3:  # no batch, or an error
            return super().forward(query, key, value, *args, **kwargs)
        first = query.transpose(0, 1)
        second, third = (
            first if x is query else x.transpose(0, 1) if isinstance(x, Tensor) and x.dim() == 3 else x
            for x in (key, value)
        )
        output, weights = super().forward(first, second, third, *args, **kwargs)
        return output.transpose(0, 1), weights


def replace_attention(
    model: T, *, variant: str = "smgk", num_heads: int | None = None, **options: Any
) -> T | MixtureAttention:
    """Put `MixtureAttention` in the place of every `nn.MultiheadAttention`, also of those in PyTorch's own layers.

    >>> model = mgk.nn.replace_attention(nn.TransformerEncoder(nn.TransformerEncoderLayer(256, 8, batch_first=True), 6))

    The new modules have initial values of their own and are to be trained, but for `variant="softmax"` with all heads,
    which takes the old ones over. They return no attention weights unless called with `need_weights=True`, and of masks
    they take `key_padding_mask` and the causal one.

    Args:
        model: changed in place, and returned; an `nn.MultiheadAttention` itself gives the new module.
        variant: of `MixtureAttention`.
        num_heads: heads of the new modules, each of the width it had; None is all for "softmax" and "linear", else
            half as many.
        options: others of `MixtureAttention`, e.g. num_components=3, prior="em", e_step="hard".
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, got {check.describe(model)}")
    if isinstance(model, nn.MultiheadAttention):
        return _replacement(model, variant, num_heads, options)
    found = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent._modules.items()  # named_children leaves out the second name of one
        if isinstance(child, nn.MultiheadAttention)
    ]
    if not found:
        raise ValueError(f"model: expected a module with nn.MultiheadAttention in it, got {type(model).__name__}")
    made: dict[nn.MultiheadAttention, MixtureAttention] = {}  # one that is used twice stays one
    for parent, name, child in found:
        if child not in made:
            made[child] = _replacement(child, variant, num_heads, options)
        setattr(parent, name, made[child])
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoder):  # its fused path knows softmax alone
            module.enable_nested_tensor = module.use_nested_tensor = False
    return model


def _replacement(
    old: nn.MultiheadAttention, variant: str, num_heads: int | None, options: dict[str, Any]
) -> MixtureAttention:
    if old.bias_k is not None or old.add_zero_attn:
        raise ValueError("model: expected nn.MultiheadAttention without add_bias_kv and add_zero_attn, got one with it")
    if num_heads is None:
        num_heads = old.num_heads if variant in ("softmax", "linear") else max(1, old.num_heads // 2)
    linear = variant in ("linear", "mlk", "smlk")
    given: dict[str, Any] = {
        "variant": variant,
        "head_dim": old.head_dim,
        "dropout": 0.0 if linear else old.dropout,  # the linear family has no weights to drop
        "bias": old.in_proj_bias is not None,
        "kdim": old.kdim,
        "vdim": old.vdim,
        "device": old.out_proj.weight.device,
        "dtype": old.out_proj.weight.dtype,
    }
    kind = MixtureAttention if old.batch_first else SequenceFirstAttention
    new = kind(old.embed_dim, num_heads, **(given | options)).train(old.training)
    if variant == "softmax" and num_heads == old.num_heads:
        _take_over(old, new)
    return new


@torch.no_grad()
def _take_over(old: nn.MultiheadAttention, new: MixtureAttention) -> None:
    separate = (old.q_proj_weight, old.k_proj_weight, old.v_proj_weight)
    weights = old.in_proj_weight.chunk(3) if old.in_proj_weight is not None else separate
    biases = (None,) * 3 if old.in_proj_bias is None else old.in_proj_bias.chunk(3)
    for linear, weight, bias in zip((new.query_proj, new.key_proj, new.value_proj), weights, biases, strict=True):
        linear.weight.copy_(weight)
        if bias is not None:
            linear.bias.copy_(bias)
    new.out_proj.load_state_dict(old.out_proj.state_dict())
