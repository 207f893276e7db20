"""Collected layers reproduce the weights of the module and of the public functions, for every variant."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor, nn

import mgk
from mgk.inspect import Dense, Layer, collect
from mgk.inspect.heads import gaussian
from mgk.nn import MixtureAttention

CASES = [
    ("softmax", {}),
    ("mgk", {}),
    ("mgk", {"e_step": "hard"}),
    ("mgk", {"learn_variance": True}),
    ("smgk", {}),
    ("smgk", {"e_step": "hard"}),
    ("smgk", {"num_components": 3, "learn_variance": True}),
    ("smgk", {"prior": "em", "prior_positions": 40}),
    ("linear", {}),
    ("mlk", {"feature_map": "dpfp"}),
    ("smlk", {"feature_map": "favor"}),
]


@pytest.fixture(params=CASES, ids=lambda case: "-".join([case[0], *map(str, case[1].values())]))
def module(request: pytest.FixtureRequest) -> MixtureAttention:
    torch.manual_seed(0)
    variant, options = request.param
    module = MixtureAttention(24, 3, variant=variant, head_dim=8, **options).double()
    for parameter in (module.log_prior, module.log_variance):
        if parameter is not None:
            parameter.data += 0.5 * torch.randn_like(parameter)
    return module


@pytest.mark.parametrize("causal", [False, True])
def test_rows_are_the_weights_of_the_module(module: MixtureAttention, causal: bool) -> None:
    x = torch.randn(2, 17, 24, dtype=torch.float64)
    with torch.no_grad():
        _, expected = module.eval()(x, need_weights=True, average_attn_weights=False, is_causal=causal)
    (layer,) = collect(module, x, is_causal=causal)
    for sample in range(2):
        for index, head in enumerate(layer.heads(sample)):
            torch.testing.assert_close(head.rows().weights, expected[sample, index], rtol=1e-9, atol=1e-12)
            part = head.rows(5, 9)
            torch.testing.assert_close(part.weights, expected[sample, index, 5:9], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("module", [case for case in CASES if case[0] in ("mgk", "smgk")], indirect=True, ids=str)
def test_responsibilities_are_those_of_the_library(module: MixtureAttention) -> None:
    x = torch.randn(1, 12, 24, dtype=torch.float64)
    (layer,) = collect(module, x, is_causal=True)
    prior = None if module.e_step == "hard" else layer.log_prior
    expected = mgk.responsibilities(
        layer.query, layer.key, prior, shift=layer.shift, variance=layer.variance, is_causal=True
    )
    for index, head in enumerate(layer.heads()):
        torch.testing.assert_close(head.rows().responsibilities, expected[0, index], rtol=1e-9, atol=1e-12)


def test_a_hard_e_step_gives_each_pair_to_one_component() -> None:
    module = MixtureAttention(16, 2, e_step="hard")
    components = collect(module, torch.randn(1, 9, 16))[0].head(0).rows().components
    assert ((components > 0).sum(0) == 1).all()


def test_padding_is_left_out() -> None:
    """A padded input gives the matrices of the same input without padding."""
    torch.manual_seed(0)
    module, x = MixtureAttention(16, 2, variant="mgk").double(), torch.randn(1, 10, 16, dtype=torch.float64)
    padding = torch.arange(10)[None] >= 7
    (padded,), (plain,) = collect(module, x, key_padding_mask=padding), collect(module, x[:, :7])
    assert padded.head(0).num_queries == padded.head(0).num_keys == 7
    torch.testing.assert_close(padded.head(0).rows().weights, plain.head(0).rows().weights)
    torch.testing.assert_close(padded.component_keys(0), plain.component_keys(0))


@pytest.mark.parametrize("variant", ["mlk", "smlk"])
def test_mixed_keys_count_as_one_component(variant: str) -> None:
    (layer,) = collect(MixtureAttention(16, 2, variant=variant, mixing="keys"), torch.randn(1, 6, 16))
    assert layer.num_components == layer.head(0).num_components == len(layer.component_keys(0)) == 1
    torch.testing.assert_close(layer.prior, torch.ones(2, 1))


class Twice(nn.Module):
    """A model that calls one attention module twice."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.5)
        self.attention = MixtureAttention(16, 2, prior="em")

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = x + self.dropout(self.attention(x)[0])
        return x


def test_collecting_leaves_the_model_as_it_was() -> None:
    """Training mode, priors and hooks do not change, and every call is seen in order."""
    torch.manual_seed(0)
    model = Twice()
    model.dropout.eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    layers = collect(model, torch.randn(1, 6, 16))
    assert [layer.name for layer in layers] == ["attention", "attention"]
    assert model.training
    assert model.attention.training
    assert not model.dropout.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not model.attention._attention_hooks


def test_visiting_keeps_nothing() -> None:
    seen: list[Layer] = []
    assert collect(Twice(), torch.randn(1, 6, 16), visit=seen.append) == []
    assert len(seen) == 2


def test_a_model_without_attention_is_an_error() -> None:
    with pytest.raises(ValueError, match="model: expected a module with mgk"):
        collect(nn.Linear(2, 2), torch.randn(1, 2))


def test_a_model_that_does_not_call_its_attention_is_an_error() -> None:
    class Idle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = MixtureAttention(24, 3)

        def forward(self, x: Tensor) -> Tensor:
            return x

    with pytest.raises(RuntimeError, match=r"model: expected a call of its attention layers \(attention\), saw none"):
        collect(Idle(), torch.randn(1, 5, 24))


def test_rows_survive_extreme_logits() -> None:
    """Beyond the range of exp, weights match float64, and a row without visible keys is zero."""
    torch.manual_seed(0)
    query, key = 40 * torch.randn(5, 8), 40 * torch.randn(2, 6, 8)
    head = gaussian(query, key, is_causal=True)  # the last query sees every key, the first one two
    expected = mgk.attention_weights(query.double()[None, None], key.double()[None, None], is_causal=True)[0, 0]
    torch.testing.assert_close(head.rows().weights.double(), expected, rtol=1e-3, atol=1e-4)
    nothing = dataclasses.replace(head, column=torch.full_like(head.column, -torch.inf))
    assert not nothing.rows().weights.any()
    assert not nothing.rows().responsibilities.any()


def test_dense_weights_are_checked() -> None:
    assert Dense.of(torch.eye(3)).num_components == 1
    with pytest.raises(ValueError, match="weights: expected finite numbers of at least 0"):
        Dense.of(-torch.eye(3))
    with pytest.raises(ValueError, match="weights: expected 3 dimensions"):
        Dense.of(torch.zeros(3))
