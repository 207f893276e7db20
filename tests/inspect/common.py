"""Small models and known weights for tests of the page."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor

from mgk.inspect import Factors, Model, collect
from mgk.nn import MixtureAttention

WICKED = (
    "</script><script>alert(1)</script> \"quotes' & <b>tags</b> <!-- \u2028 😀 שלום עולם مرحبا \x00\x07 {{data}} \ud800"
)


def attention(variant: str, heads: int, size: int, *, layers: int = 2, causal: bool = False, **options: Any) -> Model:
    """Untrained attention on random inputs, large enough to show a pattern."""
    torch.manual_seed(heads)
    modules = [MixtureAttention(32, heads, variant=variant, head_dim=8, **options) for _ in range(layers)]
    x = 2 * torch.randn(1, size, 32)
    collected = [collect(module, x, is_causal=causal)[0] for module in modules]
    tokens = [f"t{i} " for i in range(size)]
    return Model.of_layers(f"{variant}, {heads} heads", tokens, collected, note="untrained")


def factors(model: Model, layer: int = 0, head: int = 0) -> Factors:
    found = model.layers[layer][head]
    assert isinstance(found, Factors)
    return found


def pattern(size: int = 8) -> Tensor:
    """Two components: the first attends to the diagonal, the second to key 2."""
    diagonal, column = torch.eye(size), torch.zeros(size, size)
    column[:, 2] = 1
    return torch.stack([0.75 * diagonal, 0.25 * column])


def embedded(html: str) -> dict[str, Any]:
    """The data of a page."""
    found: dict[str, Any] = json.loads(html.split('id="data">')[1].split("</script>")[0])
    return found
