"""Pure functions of tensors: no module, no configuration, no file."""

from mgk.ops.api import (
    attention_weights,
    mgk_attention,
    prior_statistics,
    responsibilities,
    smgk_attention,
    update_components,
    update_prior,
)
from mgk.ops.linear import LinearState, linear_attention, linear_step, mlk_attention, smlk_attention

__all__ = [
    "LinearState",
    "attention_weights",
    "linear_attention",
    "linear_step",
    "mgk_attention",
    "mlk_attention",
    "prior_statistics",
    "responsibilities",
    "smgk_attention",
    "smlk_attention",
    "update_components",
    "update_prior",
]
