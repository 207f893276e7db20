"""A layer equals PyTorch's layer with our attention, and recomputation in backward changes no number."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from mgk.nn import Block, MixtureAttention, Stack
from tests.nn.common import EXACT, KINDS, make, normal
from tests.nn.test_attention import as_multihead


def as_encoder_layer(layer: nn.TransformerEncoderLayer, norm: str, activation: str) -> Block:
    """Our layer with the weights of PyTorch's."""
    block = Block(as_multihead(layer.self_attn), 16, activation=activation, norm=norm).double()
    for ours, theirs in (
        (block.attention_norm, layer.norm1),
        (block.feed_forward_norm, layer.norm2),
        (block.up, layer.linear1),
        (block.down, layer.linear2),
    ):
        ours.load_state_dict(theirs.state_dict())
    return block


@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_softmax_block_is_pytorchs_layer(norm: str, activation: str) -> None:
    theirs = nn.TransformerEncoderLayer(
        12, 4, 16, 0.0, activation, batch_first=True, norm_first=norm == "pre", dtype=torch.float64
    )
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, std=0.5)
    block, x = as_encoder_layer(theirs, norm, activation), normal(2, 6, 12)
    padding = torch.tensor([[False] * 6, [False] * 4 + [True] * 2])
    torch.testing.assert_close(block(x), theirs(x), **EXACT)
    real = ~padding
    torch.testing.assert_close(block(x, padding)[real], theirs(x, src_key_padding_mask=padding)[real], **EXACT)


def stack(kind: str, norm: str = "pre", recompute: bool = False, dropout: float = 0.0) -> Stack:
    layers = [Block(make(kind), 16, dropout=dropout, norm=norm) for _ in range(2)]
    return Stack(layers, recompute=recompute).double()


def test_only_pre_layers_have_a_final_norm() -> None:
    x = normal(2, 5, 12)
    pre, post = stack("smgk"), stack("smgk", "post")
    first, second = pre.layers
    torch.testing.assert_close(pre(x), pre.final_norm(second(first(x))), **EXACT)
    first, second = post.layers
    torch.testing.assert_close(post(x), second(first(x)), **EXACT)
    assert not list(post.final_norm.parameters())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_recomputation_changes_nothing(kind: str, dropout: float) -> None:
    """Output, gradients and buffers; in particular an M-step happens once, after they were read for both passes."""
    plain = stack(kind, dropout=dropout)
    again = copy.deepcopy(plain)
    again.recompute = True
    results: list[list[Tensor | None]] = []
    for model in (plain, again):
        model.train()
        for _ in range(2):
            torch.manual_seed(3)
            output = model(normal(2, 6, 12))
            output.square().sum().backward()
        results.append([output, *(p.grad for p in model.parameters()), *model.buffers()])
    torch.testing.assert_close(results[0], results[1], **EXACT)
    assert all(layer.attention.m_step_enabled for layer in again.layers)  # type: ignore[union-attr]


def test_recomputation_saves_memory() -> None:
    kept = []
    for recompute in (False, True):
        sizes: dict[int, int] = {}
        model, x = stack("smgk", recompute=recompute).train(), normal(2, 64, 12)

        def keep(tensor: Tensor, sizes: dict[int, int] = sizes) -> Tensor:
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            model(x)
        own = {p.untyped_storage().data_ptr() for p in model.parameters()}
        kept.append(sum(size for place, size in sizes.items() if place not in own))
    assert kept[1] < kept[0] / 2


def test_caches_of_a_stack() -> None:
    model, x = stack("smgk").eval(), normal(3, 5, 12)
    for layer in model.layers:
        layer.attention.causal = True  # type: ignore[union-attr]
    cache = model.new_cache(3)
    assert (cache.batch_size, cache.length, cache.bytes) == (3, 0, 0)
    model(x[:, :3], cache=cache)
    beams = torch.tensor([2, 0])
    cache.reorder(beams)
    assert (cache.batch_size, cache.length) == (2, 3)
    assert cache.bytes == sum(layer.bytes for layer in cache.layers) > 0
    torch.testing.assert_close(model(x[beams, 3:], cache=cache), model(x[beams])[:, 3:], **EXACT)


def test_wrong_choices() -> None:
    attention = MixtureAttention(12, 3)
    with pytest.raises(ValueError, match="norm: expected one of pre, post, got 'both'"):
        Block(attention, 16, norm="both")
    with pytest.raises(ValueError, match="layers: expected at least one Block, got none"):
        Stack([])
    with pytest.raises(ValueError, match="activation: expected one of gelu, relu, swiglu, got 'tanh'"):
        Block(attention, 16, norm="pre", activation="tanh")
    with pytest.raises(ValueError, match="norm_type: expected one of layer, rms, got 'batch'"):
        Block(attention, 16, norm="pre", norm_type="batch")
