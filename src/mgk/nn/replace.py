"""Replace the attention of models built with `torch.nn` by attention with mixture keys."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from mgk.nn.attention import MixtureAttention
from mgk.ops import arguments as check
from mgk.variants import LINEAR

T = TypeVar("T", bound=nn.Module)


class SequenceFirstAttention(MixtureAttention):
    """`MixtureAttention` for inputs (N,B,E), like `nn.MultiheadAttention` with `batch_first=False`."""

    batch_first = False

    def forward(
        self, query: Tensor, key: Tensor | None = None, value: Tensor | None = None, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        if not isinstance(query, Tensor) or query.dim() != 3:  # without a batch dimension, or an error
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
    """Replace every `nn.MultiheadAttention` by `MixtureAttention`, also in PyTorch's own layers.

    >>> model = mgk.nn.replace_attention(nn.TransformerEncoder(nn.TransformerEncoderLayer(256, 8, batch_first=True), 6))

    Half the heads means half as many of the same width: for `nn.MultiheadAttention(256, 8)`, with 263,168 parameters,
    MixtureAttention(256, 4, head_dim=32), with 131,976.

    The new modules are initialised and must be trained. The exception is `variant="softmax"` with the same number of
    heads, which copies the old weights. The new modules return attention weights only if called with
    `need_weights=True`, and accept only `key_padding_mask` and the causal mask.

    Args:
        model: changed in place, and returned. For an `nn.MultiheadAttention` the new module is returned.
        variant: of `MixtureAttention`.
        num_heads: number of heads of the new modules; the width of a head stays. None keeps the number for "softmax"
            and "linear", and halves it for the others.
        options: further options of `MixtureAttention`, e.g. num_components=3, prior="em", e_step="hard".
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, got {check.describe(model)}")
    if isinstance(model, nn.MultiheadAttention):
        return _replacement(model, variant, num_heads, options)
    found = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent._modules.items()  # named_children skips a module's second name
        if isinstance(child, nn.MultiheadAttention)
    ]
    if not found:
        raise ValueError(f"model: expected a module with nn.MultiheadAttention in it, got {type(model).__name__}")
    made: dict[nn.MultiheadAttention, MixtureAttention] = {}  # a module that is used twice is replaced once
    for parent, name, child in found:
        if child not in made:
            made[child] = _replacement(child, variant, num_heads, options)
        setattr(parent, name, made[child])
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoder):  # its fused path computes softmax attention only
            module.enable_nested_tensor = module.use_nested_tensor = False
    return model


def _replacement(
    old: nn.MultiheadAttention, variant: str, num_heads: int | None, options: dict[str, Any]
) -> MixtureAttention:
    if old.bias_k is not None or old.add_zero_attn:
        raise ValueError("model: expected nn.MultiheadAttention without add_bias_kv and add_zero_attn, got one with it")
    if num_heads is None:
        num_heads = old.num_heads if variant in ("softmax", "linear") else max(1, old.num_heads // 2)
    given: dict[str, Any] = {
        "variant": variant,
        "head_dim": old.head_dim,
        "dropout": 0.0 if variant in LINEAR else old.dropout,  # the linear family has no weights to drop
        "bias": old.in_proj_bias is not None,
        "kdim": old.kdim,
        "vdim": old.vdim,
        "device": old.out_proj.weight.device,
        "dtype": old.out_proj.weight.dtype,
    }
    kind = MixtureAttention if old.batch_first else SequenceFirstAttention
    new = kind(old.embed_dim, num_heads, **(given | options)).train(old.training)
    if variant == "softmax" and num_heads == old.num_heads:
        _copy_weights(old, new)
    return new


@torch.no_grad()
def _copy_weights(old: nn.MultiheadAttention, new: MixtureAttention) -> None:
    separate = (old.q_proj_weight, old.k_proj_weight, old.v_proj_weight)
    weights = old.in_proj_weight.chunk(3) if old.in_proj_weight is not None else separate
    biases = (None,) * 3 if old.in_proj_bias is None else old.in_proj_bias.chunk(3)
    for linear, weight, bias in zip((new.query_proj, new.key_proj, new.value_proj), weights, biases, strict=True):
        linear.weight.copy_(weight)
        if bias is not None:
            linear.bias.copy_(bias)
    new.out_proj.load_state_dict(old.out_proj.state_dict())
