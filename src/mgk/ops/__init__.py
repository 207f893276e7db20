"""Pure functions of tensors: no module, no configuration, no file."""

from mgk.ops.api import attention_weights, mgk_attention, responsibilities, smgk_attention
from mgk.ops.linear import LinearState, linear_attention, linear_step, mlk_attention, smlk_attention
from mgk.ops.m_steps import prior_statistics, update_components, update_prior
from mgk.ops.partial import merge_attention
from mgk.ops.varlen import mgk_varlen_attention, smgk_varlen_attention

__all__ = [
    "LinearState",
    "attention_weights",
    "linear_attention",
    "linear_step",
    "merge_attention",
    "mgk_attention",
    "mgk_varlen_attention",
    "mlk_attention",
    "prior_statistics",
    "responsibilities",
    "smgk_attention",
    "smgk_varlen_attention",
    "smlk_attention",
    "update_components",
    "update_prior",
]
