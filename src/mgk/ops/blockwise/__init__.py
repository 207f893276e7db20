"""Mixture-key attention on the CPU, block by block: memory is linear in N, forward and backward.

    forms.py        arguments as queries, keys and biases (ordinary differentiable code)
    operators.py    the torch.library operators for forward and backward; flops.py: their FLOP formulas
    attend.py       the loops over blocks
    kernels.py      the exponents and weights of a block for component keys; shifted.py: for shifted keys
    weights.py      dropout, and the gradient with respect to the attention weights
    blocks.py       the partition of the work into blocks, and reusable buffers
    statistics.py   the sums of the M-steps

B batch, H query heads, G heads of keys and values (H is a multiple of G), M components, Nq queries, Nk keys, D width of
a head, Dv width of a value. Inside the operator there is one axis for batch and heads, and H and G count both.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mgk.ops.blockwise.flops import register_formulas
from mgk.ops.blockwise.forms import Form, flatten_heads, log_of_sums, mixture_form, require_cpu, shifted_form
from mgk.ops.blockwise.operators import attention
from mgk.ops.blockwise.statistics import component_statistics, prior_statistics
from mgk.ops.common import unused, zero_masked
from mgk.ops.options import Options, Result

__all__ = ["component_statistics", "mgk_attention", "prior_statistics", "smgk_attention"]


def mgk_attention(query: Tensor, key: Tensor, value: Tensor, options: Options) -> Result:
    require_cpu(query)
    query, key, value = _without_masked(query, key, value, options)
    return _attend(mixture_form(query, key, options), query, value, options)


def smgk_attention(query: Tensor, key: Tensor, shift: Tensor, value: Tensor, options: Options) -> Result:
    require_cpu(query)
    query, key, value = _without_masked(query, key, value, options)
    return _attend(shifted_form(query, key, shift, options), query, value, options)


def _without_masked(query: Tensor, key: Tensor, value: Tensor, options: Options) -> tuple[Tensor, Tensor, Tensor]:
    key_mask, query_mask = options.visibility.key_mask, options.visibility.query_mask
    return zero_masked(query, query_mask), zero_masked(key, key_mask), zero_masked(value, key_mask)


def _attend(form: Form, query: Tensor, value: Tensor, options: Options) -> Result:
    """Run the operator on a form (see forms.py)."""
    log_prior, variance, (is_causal, window, _, query_mask), hard, dropout_p, return_lse = options
    seed = torch.randint(1 << 62, ()) if dropout_p else torch.zeros((), dtype=torch.long)
    register_formulas()
    output, lse, _ = attention(*form.terms, flatten_heads(value), form.bound, hard, is_causal, window, dropout_p, seed)
    if hard and log_prior is not None and log_prior.requires_grad:
        output, lse = (x + unused(log_prior).to(x.dtype) for x in (output, lse))
    output = zero_masked(output.view(*query.shape[:3], value.shape[-1]).to(query.dtype), query_mask)
    if not return_lse:
        return output, None
    lse = log_of_sums(lse, query, variance)
    return output, lse if query_mask is None else lse.masked_fill(~query_mask[:, None], -torch.inf)
