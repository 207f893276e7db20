"""Components with values of their own: h_i = sum_j sum_r A[i,j,r] v_jr, with A normalised over j and r.

In MGK the components of a key share its value, so a head cannot tell which of them matched. Here each has a value of
its own, which makes the mixture softmax attention over M Nk keys with a prior each. Every component alone is an
operator of `mgk.ops` with one component, which returns its output and the log of its row sums; `merge_attention` joins
them. So nothing Nq x Nk is in memory, and the cost is that of M times the heads.

B batch, H heads, G heads of keys and values, M components, N positions, D width of a head, E width of the model.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from mgk.models.config import TransformerConfig
from mgk.nn import MixtureAttention
from mgk.nn.operators import AttentionInputs
from mgk.ops import merge_attention, mgk_attention
from mgk.ops.cost import Dimensions, attention_flops
from mgk.variants import GAUSSIAN

if TYPE_CHECKING:
    from jaxtyping import Float


def own_value_attention(
    query: Float[Tensor, "b h n d"],
    key: Float[Tensor, "b h m n d"],
    value: Float[Tensor, "b h m n dv"],
    log_prior: Float[Tensor, "h m"] | None,
    *,
    is_causal: bool,
    impl: str = "auto",
) -> Float[Tensor, "b h n dv"]:
    """Attention with the component keys k_jr and a value for each of them."""
    parts = []
    for r in range(key.shape[2]):
        prior = key.new_zeros(key.shape[1], 1, dtype=torch.float32) if log_prior is None else log_prior[:, r : r + 1]
        component = key[:, :, r : r + 1]
        parts.append(
            mgk_attention(query, component, value[:, :, r], prior, is_causal=is_causal, return_lse=True, impl=impl)
        )
    return merge_attention(*parts)[0]  # type: ignore[arg-type]


class OwnValueAttention(MixtureAttention):
    """Self-attention of MGK or sMGK whose components have values of their own, made from an ordinary module.

    The value projection is M times as wide, with the initialisation of the one it replaces. For training and scoring:
    without cache, packed rows and padding.
    """

    @classmethod
    def of(cls, module: MixtureAttention) -> OwnValueAttention:
        """Change a module in place."""
        if module.variant not in GAUSSIAN or module.num_kv_heads != module.num_heads or module.em_buffers:
            raise ValueError(
                "variant: expected mgk or smgk with learned priors and shifts and without grouped queries, got "
                f"{module.variant}"
            )
        if module.e_step != "soft" or module.log_variance is not None or module.dropout:
            raise ValueError("e_step: expected soft, with the fixed variance and no attention dropout")
        old = module.value_proj
        spread = float(old.weight.detach().std())
        new = nn.Linear(old.in_features, old.out_features * module.num_components, old.bias is not None)
        nn.init.normal_(new.weight, std=spread)
        if new.bias is not None:
            nn.init.zeros_(new.bias)
        module.value_proj = new.to(old.weight)
        module.__class__ = cls
        return module  # type: ignore[return-value]

    def _attend(self, inputs: AttentionInputs) -> Float[Tensor, "b h n d"]:
        if inputs.key_mask is not None or inputs.query_mask is not None:
            raise ValueError("key_padding_mask: expected none with own values, got one")
        value = inputs.value.unflatten(1, (self.num_heads, self.num_components))  # type: ignore[no-untyped-call]
        key = inputs.key if inputs.shift is None else inputs.key[:, :, None] + inputs.shift[:, :, None].to(inputs.key)
        return own_value_attention(
            inputs.query, key, value, inputs.log_prior, is_causal=inputs.is_causal, impl=inputs.impl
        )


def give_own_values(model: nn.Module) -> None:
    """Let the components of every mixture attention of a model have values of their own."""
    for module in list(model.modules()):
        if isinstance(module, MixtureAttention):
            OwnValueAttention.of(module)


def more_flops(config: TransformerConfig, positions: int) -> int:
    """Return the FLOPs, forward and backward, that own values add to the layers of a causal model for one sequence."""
    sizes = {"head_dim": config.width_of_head, "queries": positions, "keys": positions, "causal": True}
    shared = Dimensions(variant=config.attention, heads=config.heads, components=config.components, **sizes)  # type: ignore[arg-type]
    own = Dimensions(variant="softmax", heads=config.heads * config.components, **sizes)  # type: ignore[arg-type]
    more = (config.components - 1) * config.heads * config.width_of_head * config.width  # weights of the projection
    return config.layers * (attention_flops(own).total - attention_flops(shared).total + 6 * positions * more)


def dense_own_values(
    query: Float[Tensor, "b h n d"],
    key: Float[Tensor, "b h m n d"],
    value: Float[Tensor, "b h m n dv"],
    log_prior: Float[Tensor, "h m"],
    *,
    is_causal: bool,
) -> Float[Tensor, "b h n dv"]:
    """The formula, with all weights (B,H,M,N,N) in memory: for tests."""
    distance = (query[:, :, None, :, None] - key[:, :, :, None]).square().sum(-1)  # (B,H,M,N,N)
    weight = log_prior[:, :, None, None] - distance / (2 * math.sqrt(query.shape[-1]))
    if is_causal:
        hidden = torch.ones(weight.shape[-2:], dtype=torch.bool, device=weight.device).triu(1)
        weight = weight.masked_fill(hidden, -math.inf)
    shares = weight.transpose(2, 3).flatten(3).softmax(-1)
    shares = shares.view(*weight.shape[:2], query.shape[2], *weight.shape[2::2])  # (B,H,N,M,N)
    return torch.einsum("bhnmk,bhmkd->bhnd", shares, value)
