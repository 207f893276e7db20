"""Modules of torch.nn with mixture keys in place of their own attention."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from mgk.nn import MixtureAttention
from mgk.nn.replace import SequenceFirstAttention, replace_attention
from tests.nn.common import EXACT, normal

VARIANTS = ("softmax", "linear", "mgk", "smgk", "mlk", "smlk")


def encoder(batch_first: bool = True, layers: int = 2) -> nn.TransformerEncoder:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(12, 4, 16, dropout=0.0, batch_first=batch_first, dtype=torch.float64)
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("causal", [True, False])
def test_softmax_with_all_heads_is_the_same_function(batch_first: bool, training: bool, causal: bool) -> None:
    model, x = encoder(batch_first).train(training), normal(3, 3, 12)
    padding = torch.tensor([[False, False, False], [False, False, True], [False, False, False]])
    options: dict[str, Any] = {"src_key_padding_mask": padding}
    if causal:
        mask = torch.full((3, 3), -torch.inf, dtype=torch.float64).triu(1)
        options = {"mask": mask, "is_causal": True}
    replaced = replace_attention(copy.deepcopy(model), variant="softmax")
    expected, found = model(x, **options), replaced(x, **options)
    real = torch.ones(3, 3, dtype=torch.bool) if causal else ~padding
    real = real if batch_first else real.T
    torch.testing.assert_close(found[real], expected[real], **EXACT)


@pytest.mark.parametrize("widths", [{}, {"kdim": 6, "vdim": 8}])
@pytest.mark.parametrize("bias", [True, False])
def test_weights_of_a_single_module_are_copied(widths: dict[str, int], bias: bool) -> None:
    torch.manual_seed(0)
    old = nn.MultiheadAttention(12, 3, bias=bias, batch_first=True, dtype=torch.float64, **widths)
    new = replace_attention(old, variant="softmax")
    query, key, value = normal(2, 5, 12), normal(2, 7, widths.get("kdim", 12)), normal(2, 7, widths.get("vdim", 12))
    if not widths:
        value = key
    for one, two in zip(old(query, key, value), new(query, key, value, need_weights=True), strict=True):
        torch.testing.assert_close(two, one, **EXACT)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("batch_first", [True, False])
def test_every_variant_trains_in_its_place(variant: str, batch_first: bool) -> None:
    model = replace_attention(encoder(batch_first), variant=variant)
    model(normal(2, 4, 12)).sum().backward()
    found = [module for module in model.modules() if isinstance(module, MixtureAttention)]
    assert [module.num_heads for module in found] == [4 if variant in ("softmax", "linear") else 2] * 2
    assert all(module.head_dim == 3 for module in found)
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_the_rest_of_the_model_stays() -> None:
    model = encoder()
    kept = {name: value.clone() for name, value in model.state_dict().items() if "self_attn" not in name}
    replaced = replace_attention(model, num_components=3, prior="em")
    assert replaced is model
    now = model.state_dict()
    assert all(torch.equal(now[name], value) for name, value in kept.items())
    module = next(module for module in model.modules() if isinstance(module, MixtureAttention))
    assert (module.variant, module.num_components, module.prior_kind) == ("smgk", 3, "em")


def test_an_encoder_that_would_nest_tensors_reads_padding() -> None:
    """PyTorch's fused path asks for weights that are not there; it must not be taken."""
    layer = nn.TransformerEncoderLayer(12, 4, 16, dropout=0.0, batch_first=True, dtype=torch.float64)
    model = replace_attention(nn.TransformerEncoder(layer, 1)).eval()
    x, padding = normal(2, 4, 12), torch.tensor([[False] * 4, [False, False, True, True]])
    with torch.no_grad():
        found = model(x, src_key_padding_mask=padding)
        torch.testing.assert_close(found[1:, :2], model(x[1:, :2]), **EXACT)


def test_sequence_first_is_batch_first_transposed() -> None:
    torch.manual_seed(0)
    turned = SequenceFirstAttention(12, 2, dtype=torch.float64)
    plain = MixtureAttention(12, 2, dtype=torch.float64)
    plain.load_state_dict(turned.state_dict())
    query, key = normal(5, 2, 12), normal(6, 2, 12, seed=1)
    for given in ((query,), (query, query, query), (query, key), (query, key, key)):
        expected = plain(*(x.transpose(0, 1) for x in given))[0]
        torch.testing.assert_close(turned(*given)[0].transpose(0, 1), expected, **EXACT)
    torch.testing.assert_close(turned(query[:, 0])[0], plain(query[:, 0])[0], **EXACT)


def test_a_shared_module_stays_shared() -> None:
    shared = nn.MultiheadAttention(12, 4, batch_first=True)
    model = nn.ModuleList([shared, nn.ModuleList([shared])])
    replace_attention(model)
    inner = model[1]
    assert isinstance(inner, nn.ModuleList)
    assert model[0] is inner[0]


def test_both_names_of_a_module_are_replaced() -> None:
    shared = nn.MultiheadAttention(12, 4, batch_first=True)
    model = replace_attention(nn.ModuleDict({"first": shared, "second": shared}))
    assert isinstance(model, nn.ModuleDict)
    assert isinstance(model["first"], MixtureAttention)
    assert model["second"] is model["first"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of PyTorch's own in torch.export
def test_padding_compiles() -> None:
    """An encoder makes floats of a mask, and their numbers are not known in a graph."""
    torch.compiler.reset()
    model = replace_attention(encoder(layers=1)).eval()
    x, padding = normal(2, 4, 12), torch.tensor([[False] * 4, [False, False, True, True]])
    expected = model(x, src_key_padding_mask=padding)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x, src_key_padding_mask=padding), expected, **EXACT)
    exported = torch.export.export(model, (x,), {"src_key_padding_mask": padding}).module()
    torch.testing.assert_close(exported(x, src_key_padding_mask=padding), expected, **EXACT)


def test_sequence_first_errors_name_the_argument() -> None:
    module, x = SequenceFirstAttention(12, 2, dtype=torch.float64), normal(5, 2, 12)
    with pytest.raises(TypeError, match=r"query: expected a torch\.Tensor .*got NoneType"):
        module(None)
    with pytest.raises(TypeError, match=r"key: expected a torch\.Tensor .*got list"):
        module(x, [1.0])
    with pytest.raises(ValueError, match="key: expected 3 dimensions"):
        module(x, x[0, 0])


def test_what_cannot_be_replaced_is_an_error() -> None:
    with pytest.raises(TypeError, match=r"model: expected a torch\.nn\.Module"):
        replace_attention("model")  # type: ignore[type-var]
    with pytest.raises(ValueError, match=r"expected a module with nn.MultiheadAttention in it, got Linear"):
        replace_attention(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="add_bias_kv"):
        replace_attention(nn.MultiheadAttention(12, 4, add_bias_kv=True))
    with pytest.raises(ValueError, match="variant"):
        replace_attention(nn.MultiheadAttention(12, 4), variant="nothing")


def test_half_the_heads_are_as_many_parameters_as_the_documentation_says() -> None:
    """The module with the width of a head named and `replace_attention` mean the same; so do their docstrings."""

    def parameters(module: nn.Module) -> int:
        return sum(parameter.numel() for parameter in module.parameters())

    softmax = nn.MultiheadAttention(256, 8)
    before, half = parameters(softmax), parameters(MixtureAttention(256, 4, head_dim=32))
    replaced = replace_attention(softmax)
    assert isinstance(replaced, MixtureAttention)
    assert (replaced.num_heads, replaced.head_dim, parameters(replaced)) == (4, 32, half)
    shown = replace_attention.__doc__ or ""
    assert f"{before:,} parameters" in shown
    assert f"{half:,}" in shown
    wide = parameters(MixtureAttention(256, 4))  # heads of width 64, as nn.MultiheadAttention(256, 4) has
    assert wide == before + 4 * 2 * 64 + 4 * 2  # shifts and priors
