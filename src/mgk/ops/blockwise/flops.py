"""FLOP formulas of the operators for `torch.utils.flop_counter`."""

from __future__ import annotations

from typing import Any

import torch

from mgk.ops.cost import Dimensions, Flops, pair_flops
from mgk.ops.operator import count_flops

Shape = tuple[int, ...]


def register_formulas() -> None:
    """Let active counters count the operators. Call it before an operator is called."""
    count_flops(torch.ops.mgk.blockwise_attention, forward)
    count_flops(torch.ops.mgk.blockwise_attention_backward, backward)


def forward(query: Shape, key: Shape, row_bias: Any, key_bias: Shape, value: Shape, *rest: Any, **_: Any) -> int:
    _bound, _hard, causal, *_more = rest
    return count(query, key, key_bias, value, causal).forward


def backward(
    grad: Any, query: Shape, key: Shape, row_bias: Any, key_bias: Shape, value: Shape, *rest: Any, **_: Any
) -> int:
    _output, _rows, _hard, causal, *_more = rest
    return count(query, key, key_bias, value, causal).backward


def count(query: Shape, key: Shape, key_bias: Shape, value: Shape, causal: bool) -> Flops:
    """FLOPs from the shapes of the arguments. PyTorch counts the products with shifts."""
    if 0 in (*query, *key_bias, *value):
        return Flops(0, 0)
    return pair_flops(
        Dimensions(
            variant="smgk" if key[1] < key_bias[1] else "mgk", heads=query[0], head_dim=query[2], queries=query[1],
            keys=key_bias[2], components=key_bias[1], value_dim=value[2], causal=causal,
        )
    )  # fmt: skip
