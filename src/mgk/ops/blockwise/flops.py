"""FLOP formulas of the operators for `torch.utils.flop_counter`.

That module imports Triton, which `import mgk` must not do, and each counter copies the formulas when it is made. So the
formulas are registered when an operator runs under a counter, with PyTorch and with the active counters.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from mgk.ops.cost import Dimensions, Flops, pair_flops

Shape = tuple[int, ...]


def register_formulas() -> None:
    """Let active counters count the operators. Call it before an operator is called."""
    module = sys.modules.get("torch.utils.flop_counter")
    if module is None or torch.compiler.is_compiling() or not torch._C._len_torch_dispatch_stack():
        return
    formulas = {torch.ops.mgk.blockwise_attention: forward, torch.ops.mgk.blockwise_attention_backward: backward}
    for packet, formula in formulas.items():
        if packet not in module.flop_registry:
            module.register_flop_formula(packet)(formula)
        for mode in _get_current_dispatch_mode_stack():
            counter = getattr(mode, "counter", None)
            if isinstance(counter, module.FlopCounterMode):
                counter.flop_registry[packet] = module.flop_registry[packet]


def forward(query: Shape, key: Shape, row_bias: Any, key_bias: Shape, scale: Any, *rest: Any, **_: Any) -> int:
    value, _bound, _hard, causal, window, *_more = rest
    return count((query, key, key_bias, value), scale, causal, window).forward


def backward(
    grad: Any, grad_lse: Any, query: Shape, key: Shape, row_bias: Any, key_bias: Shape, scale: Any, *rest: Any, **_: Any
) -> int:
    value, _output, _lse, _rows, _hard, causal, window, *_more = rest
    return count((query, key, key_bias, value), scale, causal, window).backward


def count(shapes: tuple[Shape, Shape, Shape, Shape], scale: Any, causal: bool, window: int | None) -> Flops:
    """FLOPs from the shapes of the arguments. PyTorch counts the products with shifts."""
    query, key, key_bias, value = shapes
    if 0 in (*query, *key_bias, *value):
        return Flops(0, 0)
    return pair_flops(
        Dimensions(
            variant="smgk" if key[1] < key_bias[1] and scale is None else "mgk", heads=query[0], head_dim=query[2],
            queries=query[1], keys=key_bias[2], components=key_bias[1], value_dim=value[2], causal=causal,
            window=window,
        )
    )  # fmt: skip
