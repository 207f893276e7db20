"""FLOP formulas of the CPU operators for `torch.utils.flop_counter`.

That module imports Triton, which `import mgk` must not do, and each counter copies the formulas when it is made. So the
formulas are registered when an operator runs under a counter, with PyTorch and with the active counters.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from mgk.ops.cost import Dimensions, Flops, attention_flops, pair_flops

Shape = tuple[int, ...]


def register_formulas() -> None:
    """Let active counters count the operators. Call it before an operator is called."""
    module = sys.modules.get("torch.utils.flop_counter")
    if module is None or torch.compiler.is_compiling() or not torch._C._len_torch_dispatch_stack():
        return
    formulas = {
        torch.ops.mgk.blockwise_attention: blockwise_forward,
        torch.ops.mgk.blockwise_attention_backward: blockwise_backward,
        torch.ops.mgk.native_attention: native_forward,
        torch.ops.mgk.native_attention_backward: native_backward,
    }
    for packet, formula in formulas.items():
        if packet not in module.flop_registry:
            module.register_flop_formula(packet)(formula)
        for mode in _get_current_dispatch_mode_stack():
            counter = getattr(mode, "counter", None)
            if isinstance(counter, module.FlopCounterMode):
                counter.flop_registry[packet] = module.flop_registry[packet]


def blockwise_forward(
    query: Shape, key: Shape, row_bias: Any, key_bias: Shape, scale: Any, *rest: Any, **_: Any
) -> int:
    value, _bound, _hard, causal, window, *_more = rest
    return count_blockwise((query, key, key_bias, value), scale, causal, window).forward


def blockwise_backward(
    grad: Any, grad_lse: Any, query: Shape, key: Shape, row_bias: Any, key_bias: Shape, scale: Any, *rest: Any, **_: Any
) -> int:
    value, _output, _lse, _rows, _hard, causal, window, *_more = rest
    return count_blockwise((query, key, key_bias, value), scale, causal, window).backward


def count_blockwise(shapes: tuple[Shape, Shape, Shape, Shape], scale: Any, causal: bool, window: int | None) -> Flops:
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


def native_forward(query: Shape, key: Shape, shift: Shape | None, value: Shape, *rest: Any, **_: Any) -> int:
    causal, window = rest[6:8]
    return count_native(query, key, shift, value, causal, window).forward


def native_backward(
    grad: Any, grad_lse: Any, query: Shape, key: Shape, shift: Shape | None, value: Shape, *rest: Any, **_: Any
) -> int:
    causal, window = rest[9:11]
    return count_native(query, key, shift, value, causal, window).backward


def count_native(
    query: Shape, key: Shape, shift: Shape | None, value: Shape, causal: bool, window: int | None
) -> Flops:
    """FLOPs from the shapes of the arguments."""
    if 0 in (*query, *key, *value):
        return Flops(0, 0)
    return attention_flops(
        Dimensions(
            variant="mgk" if shift is None else "smgk", batch=query[0], heads=query[1], head_dim=query[3],
            queries=query[2], keys=value[2], components=key[2] if shift is None else shift[1], value_dim=value[3],
            causal=causal, window=window,
        )
    )  # fmt: skip
