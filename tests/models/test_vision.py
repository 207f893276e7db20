"""The vision transformer: patches are a convolution, positions matter, the class token reads the image."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import conv2d

from tests.models.common import KINDS, batch, make
from tests.nn.common import EXACT, dense, visible


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pooling", ["mean", "class"])
def test_logits_are_the_formula(kind: str, pooling: str) -> None:
    model, pixels = make("vision", kind, pooling=pooling), batch("vision")["pixels"]
    kernel = model.patches.weight.view(12, 3, 2, 2)
    x = conv2d(pixels, kernel, model.patches.bias, stride=2).flatten(2).mT
    if pooling == "class":
        x = torch.cat([model.class_token.expand(2, 1, 12), x], 1)
    x = x + model.positions
    for layer in model.stack.layers:
        inner = layer.attention_norm(x)
        x = x + dense(layer.attention, inner, inner, inner, visible(2, x.shape[1], x.shape[1], False))[0]
        x = x + layer.down(torch.nn.functional.gelu(layer.up(layer.feed_forward_norm(x))))
    x = model.stack.final_norm(x)
    expected = model.classifier(x[:, 0] if pooling == "class" else x.mean(1))
    torch.testing.assert_close(model(pixels), expected, **EXACT)
    assert model.loss({"pixels": pixels, "label": torch.tensor([0, 1])})["count"] == 2


def test_wrong_images() -> None:
    model = make("vision")
    with pytest.raises(ValueError, match=r"pixels: expected shape \(B,C,S,S\) = \(2, 3, 8, 8\), got \(2, 3, 8, 6\)"):
        model(torch.zeros(2, 3, 8, 6))
    with pytest.raises(TypeError, match="pixels: expected a floating-point tensor"):
        model(torch.zeros(2, 3, 8, 8, dtype=torch.uint8))
