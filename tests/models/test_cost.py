"""The FLOPs and parameters of a layer are those of the layer that is built."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from mgk.models import TransformerConfig
from mgk.models.cost import dimensions, layer_flops, layer_parameters
from mgk.models.encoder import make_stack
from mgk.ops.cost import attention_flops, projection_flops
from mgk.variants import GAUSSIAN, VARIANTS
from tests.models.common import MODERN

FIELDS = ("norm_type", "activation", "mlp_bias", "qk_norm")


@pytest.mark.parametrize("attention", VARIANTS)
@pytest.mark.parametrize("options", [{}, {name: MODERN[name] for name in FIELDS} | {"attention_bias": False}])
def test_a_layer_costs_what_the_formula_says(attention: Any, options: dict[str, Any]) -> None:
    config = TransformerConfig(
        attention=attention, heads=2, head_dim=6, width=12, hidden=20, layers=1,
        learn_variance=attention in GAUSSIAN, **options,
    )  # fmt: skip
    layer: Any = make_stack(config).layers[0]
    assert sum(parameter.numel() for parameter in layer.parameters()) == layer_parameters(config)
    x = torch.randn(7, 12, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        output = layer._feed_forward(x)
        forward = counter.get_total_flops()
        output.sum().backward()
    total, d = layer_flops(config, 7, causal=False), dimensions(config, 7)
    inside = attention_flops(d), projection_flops(d)
    assert total.forward - sum(part.forward for part in inside) == forward
    assert total.total - sum(part.total for part in inside) == counter.get_total_flops()
