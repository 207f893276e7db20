"""Layers with a window, and every n-th without: the language model, its caches, its costs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mgk.models import LanguageModelConfig
from mgk.models.cost import dimensions, layer_flops, stack_flops
from mgk.nn import KeyValueCache
from mgk.nn.cache import WindowCache
from mgk.ops.cost import attention_flops
from mgk.recipes import recipe
from mgk.train import replace
from mgk.train.evaluate import flops
from tests.models.common import MODERN, make, random_tokens

WINDOW: dict[str, Any] = {"window": 3, "global_every": 2, "layers": 4}
# Logits are float32, of sums of a dozen numbers of the order of 1.
CLOSE: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-5}


def test_five_local_layers_to_one_global() -> None:
    config = LanguageModelConfig(window=1024, global_every=6, layers=13)
    assert config.windows == ((1024,) * 5 + (None,)) * 2 + (1024,)
    assert LanguageModelConfig(window=1024, layers=3).windows == (1024,) * 3
    assert LanguageModelConfig(layers=3).windows == (None,) * 3
    assert LanguageModelConfig(window=8, global_every=1, layers=2).windows == (None,) * 2


def test_a_recipe_can_have_a_window() -> None:
    config = replace(recipe("lm"), model__window=128, model__global_every=6)
    assert config.model.windows == (128,) * 5 + (None,)


@pytest.mark.parametrize("kind", ["softmax", "mgk", "smgk-positions", "smgk-hard"])
@pytest.mark.parametrize("form", [{}, MODERN])
def test_steps_are_the_full_pass(kind: str, form: dict[str, Any]) -> None:
    model, tokens = make("language", kind, **form, **WINDOW), random_tokens(2, 15)
    cache = model.new_cache(2)
    assert [type(layer) for layer in cache.layers] == [WindowCache, KeyValueCache] * 2
    parts = (slice(0, 9), slice(9, 10), *(slice(n, n + 1) for n in range(10, 14)), slice(14, 15))
    steps = [model(tokens[:, part], cache=cache) for part in parts]
    torch.testing.assert_close(torch.cat(steps, 1), model(tokens), **CLOSE)
    assert [layer.held for layer in cache.layers] == [3, 15] * 2


def test_only_a_global_layer_sees_far() -> None:
    """Two layers with a window of 3 see 4 positions back."""
    tokens = random_tokens(1, 12)
    other = tokens.clone()
    other[:, 0] = tokens[0, 0] % 19 + 1
    for global_every, reach in ((None, 5), (2, 12)):
        model = make("language", "smgk", window=3, global_every=global_every, layers=2)
        changed = (model(tokens) != model(other)).any(-1)[0]
        assert changed[:reach].all()
        assert not changed[reach:].any()


def test_flops_are_those_of_the_layers() -> None:
    config = LanguageModelConfig(attention="smgk", max_length=100, window=10, global_every=2, layers=5)
    total = stack_flops(config, 100, causal=True)
    local, everywhere = (layer_flops(config, 100, causal=True, window=window) for window in (10, None))
    assert total.total == 3 * local.total + 2 * everywhere.total == flops(config)
    pairs = attention_flops(dimensions(config, 100, causal=True, window=10)).forward
    assert pairs < attention_flops(dimensions(config, 100, causal=True)).forward / 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"global_every": 2}, "^global_every: expected None without window, got 2"),
        ({"window": 0}, "^window: expected at least 1, got 0"),
        ({"window": 4, "global_every": 0}, "^global_every: expected at least 1, got 0"),
        ({"window": 4, "attention": "mlk"}, "^window: expected None for attention 'mlk', got 4"),
    ],
)
def test_wrong_configurations_are_errors(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LanguageModelConfig(**options)
