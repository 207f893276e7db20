"""Merging reads a layer as the model computes it: its rotation, its mask, in evaluation mode; and changes no mode."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from mgk.merge import merge_heads
from mgk.merge.attention import IMPLEMENTATION
from mgk.merge.calibration import attention
from mgk.merge.layers import OwnLayer, layers_of
from mgk.nn import AttentionInputs, MixtureAttention
from mgk.nn.operators import attention_weights
from tests.hf.common import foreign, inputs, make

# Float64 numbers of the order of 1, sums of dozens of products.
EXACT: dict[str, Any] = {"rtol": 1e-9, "atol": 1e-10}


def own(positions: str, **options: Any) -> tuple[Any, dict[str, Tensor]]:
    model = make("language", "softmax", heads=4, cutoffs=(), norm="pre", positions=positions, **options).double()
    return model, {name: x for name, x in inputs("language", 3).items() if name != "labels"}


@pytest.mark.parametrize("positions", ["rotary", "learned"])
@pytest.mark.parametrize("share", [1.0, 0.5])
@pytest.mark.parametrize("options", [{}, {"qk_norm": True}, {"window": 3}, {"num_kv_heads": 2}])
def test_the_weights_of_calibration_are_those_of_the_model(
    positions: str, share: float, options: dict[str, Any]
) -> None:
    model, batch = own(positions, rotary_share=share, **options)
    seen: list[Tensor] = []

    def keep(_: MixtureAttention, given: AttentionInputs) -> None:
        seen.append(attention_weights(given))

    layers = layers_of(model)
    for layer in layers:
        assert isinstance(layer, OwnLayer)
        layer.module.register_attention_hook(keep)
    with torch.no_grad():
        model(**batch)
        calls = list(seen)
        for layer, weights in zip(layers, calls, strict=True):
            found = attention(layer.read(), layer.sample(model, batch))  # (H,B,N,N)
            torch.testing.assert_close(found.transpose(0, 1), weights, **EXACT)


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert"])
def test_the_weights_of_calibration_are_those_of_transformers(name: str) -> None:
    model, batch = foreign(name)
    model = copy.deepcopy(model)  # its configuration is that of other tests
    real = batch["attention_mask"].bool()
    model.set_attn_implementation("eager")  # the only one that returns weights
    with torch.no_grad():
        wanted = model(**batch, output_attentions=True).attentions[0]
        model.set_attn_implementation(IMPLEMENTATION)  # as merging calls it: with the mask as (B,N)
        first = layers_of(model)[0]
        found = attention(first.read(), first.sample(model, batch)).transpose(0, 1)
    rows = real[:, None].expand(found.shape[:3])
    torch.testing.assert_close(found[rows], wanted[rows], rtol=0, atol=2e-7)  # of a softmax in float32


@pytest.mark.parametrize("training", [True, False])
def test_merging_reads_without_dropout_and_leaves_the_mode(training: bool) -> None:
    model, batch = own("learned", dropout=0.5, attention_dropout=0.5)
    still, _ = merge_heads(model.eval(), [batch])
    model.train(training)
    torch.manual_seed(1)
    found, _ = merge_heads(model, [batch])
    assert model.training == found.training == training
    assert all(module.training == training for module in (*model.modules(), *found.modules()))
    for name, value in still.state_dict().items():
        torch.testing.assert_close(found.state_dict()[name], value, rtol=0, atol=0)
