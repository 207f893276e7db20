"""`MixtureAttention` of packed batches: rows of tokens without padding, or documents within the rows of a batch.

B batch, N positions, T rows, E width of the model, D width of a head.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor

from mgk.nn import arguments, operators
from mgk.nn.documents import Documents
from mgk.nn.embeddings import Rotation, rotate
from mgk.nn.m_step import m_step
from mgk.nn.packing import Packing
from mgk.nn.projections import project
from mgk.ops import arguments as check

if TYPE_CHECKING:
    from jaxtyping import Float

    from mgk.nn.attention import MixtureAttention


def forward(
    module: MixtureAttention,
    x: Float[Tensor, "t e"] | Float[Tensor, "b n e"],
    packing: Packing | Documents,
    is_causal: bool,
    rotary: Rotation | None,
) -> Tensor:
    """Self-attention of a packed batch (T,E), or within documents (B,N,E). The rotation is that of positions (B,N)."""
    arguments.check_rotation(rotary, module.rotary_dim, packing.shape, module.head_dim, True)
    if isinstance(packing, Packing):
        if rotary is not None:
            rotary = Rotation(*(packing.pack(part.expand(*packing.shape, -1)) for part in rotary))
        return attend_rows(module, x, packing, rotary, is_causal=is_causal)
    if module._makes_m_step and len(packing.groups) > 1:
        raise ValueError("packing: expected Documents(..., together=True) for an M-step over all documents")
    return packing.attend(partial(attend_rows, module, is_causal=is_causal), x, rotary)


def attend_rows(
    module: MixtureAttention, x: Float[Tensor, "t e"], packing: Packing, rotary: Rotation | None, *, is_causal: bool
) -> Float[Tensor, "t e"]:
    """Self-attention of rows, with a rotation (T,D). They are padded only for operators that cannot read rows."""
    x = check.check_tensor("query", x, "T,E")[None]
    arguments.check_inputs(module, x, x, x)
    arguments.check_positions(module.log_prior, packing.max_seqlen)
    if not module._attention_hooks and not module._makes_m_step and operators.can_attend_packed(module, x, is_causal):
        q, k, v = project(module, x, x, x)
        if rotary is not None:
            rotary = Rotation(*(part[None] for part in rotary))
            q, k = rotate(q, rotary), rotate(k, rotary)
        heads = operators.attend_packed(module._inputs(q, k, v, is_causal, None, None, module.window), packing)
        return module.out_proj(heads.transpose(1, 2).flatten(2).squeeze(0))  # type: ignore[no-any-return]
    q, k, v = project(module, x, x, x, packing)
    if rotary is not None:
        rotary = Rotation(*(packing.unpack(part) for part in rotary))
        q, k = rotate(q, rotary), rotate(k, rotary)
    inputs = module._inputs(q, k, v, is_causal, packing.mask, packing.mask, module.window)
    heads = module._attend(inputs)
    if module._makes_m_step:
        m_step(module, inputs, packing.mask)
    return module.out_proj(packing.pack(heads.transpose(1, 2).flatten(2)))  # type: ignore[no-any-return]
