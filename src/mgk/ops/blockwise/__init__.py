"""Mixture-key attention on the CPU, block by block: memory is linear in N, forward and backward.

    forms.py        arguments as queries, keys and biases (ordinary differentiable code)
    operators.py    the torch.library operators for forward and backward
    attend.py       the loops over blocks
    kernels.py      the exponents and weights of a block for component keys; shifted.py: for shifted keys
    weights.py      dropout, and the gradient with respect to the attention weights
    blocks.py       the partition of the work into blocks, and reusable buffers
    statistics.py   the sums of the M-steps

B batch, H heads, G = B*H, M components, Nq queries, Nk keys, D width of a head, Dv width of a value.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mgk.ops.blockwise.forms import flatten_heads, mixture_form, require_cpu, shifted_form
from mgk.ops.blockwise.operators import attention
from mgk.ops.blockwise.statistics import component_statistics, prior_statistics
from mgk.ops.common import Variance, shifted_keys, unused, zero_masked
from mgk.ops.flops import register_formulas

__all__ = ["component_statistics", "mgk_attention", "prior_statistics", "smgk_attention"]


def mgk_attention(
    query: Tensor, key: Tensor, value: Tensor, log_prior: Tensor | None, variance: Variance, e_step: str,
    is_causal: bool, key_mask: Tensor | None, dropout_p: float, query_mask: Tensor | None = None,
) -> Tensor:  # fmt: skip
    require_cpu(query)
    query, key, value = zero_masked(query, query_mask), zero_masked(key, key_mask), zero_masked(value, key_mask)
    form = mixture_form(query, key, log_prior if e_step == "soft" else None, variance, key_mask)
    return _attend(form, query, value, log_prior, e_step, is_causal, dropout_p, query_mask)


def smgk_attention(
    query: Tensor, key: Tensor, shift: Tensor, value: Tensor, log_prior: Tensor | None, variance: Variance, e_step: str,
    is_causal: bool, key_mask: Tensor | None, dropout_p: float, query_mask: Tensor | None = None,
) -> Tensor:  # fmt: skip
    require_cpu(query)
    if isinstance(variance, Tensor) or shift.shape[1] == 1:  # scores q.k / s2_r differ by component, or M = 1
        keys = shifted_keys(key, shift)
        return mgk_attention(
            query, keys, value, log_prior, variance, e_step, is_causal, key_mask, dropout_p, query_mask
        )
    query, key, value = zero_masked(query, query_mask), zero_masked(key, key_mask), zero_masked(value, key_mask)
    form = shifted_form(query, key, shift, log_prior if e_step == "soft" else None, variance, key_mask)
    return _attend(form, query, value, log_prior, e_step, is_causal, dropout_p, query_mask)


def _attend(
    form: tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor], query: Tensor, value: Tensor, log_prior: Tensor | None,
    e_step: str, is_causal: bool, dropout_p: float, query_mask: Tensor | None,
) -> Tensor:  # fmt: skip
    """Run the operator on a form (see forms.py). Return the output in the shape and dtype of `query`."""
    *tensors, bound = form
    seed = torch.randint(1 << 62, ()) if dropout_p else torch.zeros((), dtype=torch.long)
    register_formulas()
    output: Tensor
    output, _ = attention(*tensors, flatten_heads(value), bound, e_step == "hard", is_causal, dropout_p, seed)
    if e_step == "hard" and log_prior is not None and log_prior.requires_grad:
        output = output + unused(log_prior).to(output.dtype)
    return zero_masked(output.view(*query.shape[:3], value.shape[-1]).to(query.dtype), query_mask)
