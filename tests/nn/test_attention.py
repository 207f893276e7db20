"""`MixtureAttention` computes its formula for all arguments, and can replace nn.MultiheadAttention."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mgk.nn import MixtureAttention
from tests.nn.common import EXACT, KINDS, dense, make, normal, visible
from tests.ops.triton_env import DEVICE

every_kind = pytest.mark.parametrize("kind", KINDS)
each_variant = pytest.mark.parametrize("kind", ["softmax", "linear", "mgk", "smgk", "mlk", "smlk"])


@every_kind
@pytest.mark.parametrize("is_causal", [False, True])
def test_self_attention_is_the_dense_formula(kind: str, is_causal: bool) -> None:
    module, x = make(kind), normal(2, 9, 12)
    padding = torch.zeros(2, 9, dtype=torch.bool)
    padding[0, 6:], padding[1, :2] = True, True  # right and left; causal, the first queries of the second see nothing
    for mask in (None, padding):
        output, weights = module(
            x, key_padding_mask=mask, need_weights=True, average_attn_weights=False, is_causal=is_causal
        )
        expected, expected_weights = dense(module, x, x, x, visible(2, 9, 9, is_causal, mask))
        torch.testing.assert_close(output, expected, **EXACT)
        torch.testing.assert_close(weights, expected_weights, **EXACT)
        averaged = module(x, x, x, mask, True, None, True, is_causal)[1]  # the order of nn.MultiheadAttention
        torch.testing.assert_close(averaged, expected_weights.mean(1), **EXACT)
        assert module(x, key_padding_mask=mask, is_causal=is_causal)[1] is None


@every_kind
def test_normalised_queries_and_keys(kind: str) -> None:
    """The formula with vectors of length sqrt(D): their projections may have any length."""
    module, x = make(kind, qk_norm=True), normal(2, 9, 12)
    with torch.no_grad():
        for norm in (module.query_norm, module.key_norm):
            norm.weight.copy_(normal(4, seed=3).abs() + 0.5)  # type: ignore[operator, union-attr]
    output, expected = module(x)[0], dense(module, x, x, x, visible(2, 9, 9, False))[0]
    torch.testing.assert_close(output, expected, **EXACT)
    with torch.no_grad():
        for projection in (module.query_proj, module.key_proj):
            projection.weight.mul_(1e3)
            projection.bias.mul_(1e3)
    torch.testing.assert_close(module(x)[0], output, rtol=1e-3, atol=1e-3)  # 1e-5 is added to mean squares above 1e-2


def test_normalised_keys_make_a_gaussian_softmax() -> None:
    """All keys have one length, so |k|^2 is the same in all terms of a row; one component, which needs no prior."""
    x, softmax = normal(2, 9, 12), make("softmax", qk_norm=True)
    gaussian = make("mgk", qk_norm=True, num_components=1, prior="uniform")
    gaussian.load_state_dict(softmax.state_dict())
    # The lengths differ by the 1e-5 in the norm: by 1e-3 at most for a mean square above 1e-2.
    torch.testing.assert_close(gaussian(x)[0], softmax(x)[0], rtol=1e-3, atol=1e-3)
    free = make("mgk", num_components=1, prior="uniform")
    free.load_state_dict({name: value for name, value in softmax.state_dict().items() if "norm" not in name})
    assert (free(x)[0] - gaussian(x)[0]).abs().max() > 1e-2


@every_kind
@pytest.mark.parametrize("is_causal", [False, True])
def test_cross_attention_is_the_dense_formula(kind: str, is_causal: bool) -> None:
    module = make(kind, kdim=5, vdim=7)
    query, key, value = normal(2, 4, 12), normal(2, 6, 5, seed=1), normal(2, 6, 7, seed=2)
    output, _ = module(query, key, value, is_causal=is_causal)
    expected, _ = dense(module, query, key, value, visible(2, 4, 6, is_causal))
    torch.testing.assert_close(output, expected, **EXACT)


@each_variant
def test_value_defaults_to_key(kind: str) -> None:
    module, query, key = make(kind), normal(2, 4, 12), normal(2, 6, 12, seed=1)
    torch.testing.assert_close(module(query, key)[0], module(query, key, key)[0], rtol=0, atol=0)


@each_variant
def test_causal_module_is_a_causal_call(kind: str) -> None:
    module, x = make(kind), normal(2, 5, 12)
    expected = module(x, is_causal=True)[0]
    module.causal = True
    torch.testing.assert_close(module(x)[0], expected, rtol=0, atol=0)


@each_variant
@pytest.mark.parametrize("beside", [False, True])
def test_causal_mask_is_a_causal_call(kind: str, beside: bool) -> None:
    """As bool, as float, for a cache's rectangle, and beside the flag."""
    module, x, y = make(kind), normal(2, 5, 12), normal(2, 7, 12)
    for key in (x, y):
        hidden = torch.ones(5, key.shape[1], dtype=torch.bool).triu(1 + key.shape[1] - 5)
        expected = module(x, key, is_causal=True)[0]
        for mask in (hidden, torch.zeros(hidden.shape).masked_fill(hidden, -torch.inf)):
            found = module(x, key, attn_mask=mask, is_causal=beside)[0]
            torch.testing.assert_close(found, expected, rtol=0, atol=0)


@each_variant
def test_unbatched_input_is_a_batch_of_one(kind: str) -> None:
    module, x = make(kind), normal(5, 12)
    padding = torch.tensor([False, False, True, False, True])
    output, weights = module(x, key_padding_mask=padding, need_weights=True)
    expected, expected_weights = module(x[None], key_padding_mask=padding[None], need_weights=True)
    torch.testing.assert_close(output, expected[0], rtol=0, atol=0)
    torch.testing.assert_close(weights, expected_weights[0], rtol=0, atol=0)


@each_variant
@pytest.mark.parametrize("is_causal", [False, True])
def test_padded_batch_equals_its_sequences_one_by_one(kind: str, is_causal: bool) -> None:
    """Right and left padding, with garbage in the padded places."""
    module, lengths = make(kind), (7, 4, 1)
    sequences = [normal(length, 12, seed=length) for length in lengths]
    for place in (slice(0, None), slice(-7, None)):
        x, padding = 100 * normal(3, 7, 12, seed=9), torch.ones(3, 7, dtype=torch.bool)
        rows = [slice(0, n) if place.start == 0 else slice(7 - n, 7) for n in lengths]
        for b, row in enumerate(rows):
            x[b, row], padding[b, row] = sequences[b], False
        output, _ = module(x, key_padding_mask=padding, is_causal=is_causal)
        for b, row in enumerate(rows):
            torch.testing.assert_close(output[b, row], module(sequences[b], is_causal=is_causal)[0], **EXACT)


@every_kind
@pytest.mark.parametrize("is_causal", [False, True])
def test_padded_queries_give_zero(kind: str, is_causal: bool) -> None:
    """The bias of `out_proj` is what is left of them, whatever they hold; nothing else sees them."""
    module, padding = make(kind), torch.tensor([[False] * 6, [True, False, False, False, True, True]])
    results = []
    for garbage in (1.0, 100.0):
        x = normal(2, 6, 12)
        x[padding] *= garbage
        x.requires_grad_()
        module.zero_grad()
        output, weights = module(
            x, key_padding_mask=padding, query_padding_mask=padding, need_weights=True, is_causal=is_causal
        )
        expected, expected_weights = dense(module, x, x, x, visible(2, 6, 6, is_causal, padding))
        hidden = padding[..., None]
        torch.testing.assert_close(output, torch.where(hidden, module.out_proj.bias, expected), **EXACT)
        torch.testing.assert_close(weights, expected_weights.mean(1).masked_fill(hidden, 0), **EXACT)
        output.square().sum().backward()
        assert x.grad is not None
        assert not x.grad[padding].any()
        results.append([parameter.grad for parameter in module.parameters()])
    torch.testing.assert_close(results[0], results[1], **EXACT)


@each_variant
def test_padded_queries_of_cross_attention_and_of_a_step(kind: str) -> None:
    """A mask of queries that is not the mask of keys."""
    module, query, key = make(kind), normal(2, 3, 12), normal(2, 5, 12, seed=1)
    hidden = torch.tensor([[False, True, False], [False, False, True]])
    expected = torch.where(hidden[..., None], module.out_proj.bias, module(query, key)[0])
    torch.testing.assert_close(module(query, key, query_padding_mask=hidden)[0], expected, **EXACT)
    caches = [module.new_cache(2), module.new_cache(2)]
    for cache in caches:
        module(key, cache=cache)
    expected = torch.where(hidden[..., None], module.out_proj.bias, module(query, cache=caches[0])[0])
    torch.testing.assert_close(module(query, cache=caches[1], query_padding_mask=hidden)[0], expected, **EXACT)


@each_variant
@pytest.mark.parametrize("bias", [True, False])
def test_projections_are_called_as_modules_if_they_are_not_plain(kind: str, bias: bool) -> None:
    """They run as one product, unless one of them has a hook, an adapter in its place or another `forward`."""
    module, x = make(kind, bias=bias), normal(2, 5, 12)
    calls: Any = []
    expected = module(x)[0]
    handle = module.key_proj.register_forward_hook(lambda *_: calls.append(1))
    torch.testing.assert_close(module(x)[0], expected, **EXACT)
    assert calls == [1]
    handle.remove()
    replaced: Any = module.value_proj  # as accelerate replaces it
    replaced.forward = lambda x: nn.functional.linear(calls.append(2) or x, replaced.weight, replaced.bias)
    torch.testing.assert_close(module(x)[0], expected, **EXACT)
    assert calls == [1, 2]
    del replaced.forward

    class Doubled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    doubled = Doubled(12, module.value_proj.out_features, bias, dtype=torch.float64)
    doubled.load_state_dict(module.value_proj.state_dict())
    module.value_proj = doubled
    zero = 0 if module.out_proj.bias is None else module.out_proj.bias
    torch.testing.assert_close(module(x)[0] - zero, 2 * (expected - zero), **EXACT)


@every_kind
@pytest.mark.parametrize("bias", [True, False])
def test_gradients_reach_every_parameter(kind: str, bias: bool) -> None:
    module = make(kind, bias=bias).train()
    module(normal(2, 5, 12), is_causal=True)[0].square().sum().backward()
    for name, parameter in module.named_parameters():
        if kind == "softmax" and name == "key_proj.bias":  # q.b is the same for all keys of a query, and cancels
            continue
        assert parameter.grad is not None, name
        assert parameter.grad.abs().max() > 1e-12, name


def test_initial_values_are_those_of_the_paper() -> None:
    torch.manual_seed(0)
    module = MixtureAttention(64, 8, head_dim=32, learn_variance=True)
    assert module.shift is not None
    assert module.log_variance is not None
    torch.testing.assert_close(module.prior, torch.full((8, 2), 0.5))
    torch.testing.assert_close(module.log_variance.exp(), torch.full((8, 2), 32**0.5))
    # 512 standard normal numbers: mean 0 +- 1/sqrt(512) and variance 1 +- sqrt(2/512), four times each.
    assert module.shift.shape == (8, 2, 32)
    assert module.shift.mean().abs() < 4 / 512**0.5
    assert (module.shift.var() - 1).abs() < 4 * (2 / 512) ** 0.5
    assert MixtureAttention(8, 2, num_components=4).prior.eq(0.25).all()


@pytest.mark.parametrize("kind", ["softmax", "mgk", "smgk", "smgk-hard"])
def test_dropout_in_training_only(kind: str) -> None:
    module, x = make(kind, dropout=0.5), normal(2, 6, 12)
    plain = dense(module, x, x, x, visible(2, 6, 6, False))[0]
    torch.testing.assert_close(module(x)[0], plain, **EXACT)
    module.train()
    torch.manual_seed(1)
    first = module(x)[0]
    torch.manual_seed(1)
    torch.testing.assert_close(module(x)[0], first, rtol=0, atol=0)
    assert not torch.allclose(first, plain)


@every_kind
def test_state_dict_round_trip_and_deepcopy(kind: str) -> None:
    module, x = make(kind), normal(2, 5, 12)
    other = MixtureAttention(12, 3, dtype=torch.float64, **KINDS[kind]).eval()
    assert not torch.equal(other(x)[0], module(x)[0])
    other.load_state_dict(module.state_dict())
    torch.testing.assert_close(other(x)[0], module(x)[0], rtol=0, atol=0)
    torch.testing.assert_close(copy.deepcopy(module)(x)[0], module(x)[0], rtol=0, atol=0)


def test_state_dict_names() -> None:
    projections = {f"{name}_proj.{part}" for name in ("query", "key", "value", "out") for part in ("weight", "bias")}
    assert set(make("softmax").state_dict()) == projections
    assert set(make("mgk").state_dict()) == projections | {"log_prior"}
    assert set(make("smgk-positions").state_dict()) == projections | {"log_prior", "shift"}
    assert set(make("smgk-variance").state_dict()) == projections | {"log_variance", "shift"}
    assert set(make("smgk-hard").state_dict()) == projections | {"shift"}  # the priors play no part
    assert set(make("smlk-favor").state_dict()) == projections | {"log_prior", "shift", "feature_map.projection"}


@each_variant
def test_bfloat16_autocast(kind: str) -> None:
    """Inputs, keys and outputs are rounded to 2^-9; logits below 8 make of it 2^-6 of a weight and of the output."""
    module, x = make(kind).float(), normal(2, 8, 12).float()
    expected = module(x)[0]
    with torch.autocast("cpu", torch.bfloat16):
        output = module(x)[0]
    assert output.dtype == torch.bfloat16
    output.float().sum().backward()
    torch.testing.assert_close(output.float(), expected, rtol=2**-6, atol=2**-5)


@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # numpy's, in Triton's interpreter
@pytest.mark.parametrize("kind", ["mgk", "smgk", "smgk-hard"])
@pytest.mark.parametrize("precision", ["float32", "bfloat16", "autocast"])
def test_gradients_of_the_kernels(kind: str, precision: str) -> None:
    """Of padded inputs and all parameters, against float64: some roundings of numbers of the order of 1 to 10."""
    dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
    padding, results = torch.tensor([[False] * 6, [False] * 4 + [True] * 2]), []
    for impl, device, number in (("triton", DEVICE, dtype), ("reference", "cpu", torch.float64)):
        module, x = make(kind, impl=impl).to(dtype).to(device, number), normal(2, 6, 12).to(dtype).to(device, number)
        x.requires_grad_()
        hidden = padding.to(device)
        lowered = precision == "autocast" and impl == "triton"
        with torch.autocast(device, torch.bfloat16) if lowered else nullcontext():
            output, _ = module(x, key_padding_mask=hidden, query_padding_mask=hidden)
        assert output.dtype == (torch.bfloat16 if lowered else number)
        grads = torch.autograd.grad(output[~hidden].square().sum(), [x, *module.parameters()])
        results.append([grad.detach().double().cpu() for grad in (output[~hidden], *grads)])
    for found, expected in zip(*results, strict=True):
        rounding = 2**-20 if precision == "float32" else 2**-7
        assert (found - expected).norm() <= 8 * rounding * max(float(expected.norm()), 1)


def as_multihead(attention: nn.MultiheadAttention) -> MixtureAttention:
    """Softmax attention with the weights of PyTorch's."""
    module = MixtureAttention(attention.embed_dim, attention.num_heads, variant="softmax", dtype=torch.float64)
    parts = zip(attention.in_proj_weight.chunk(3), attention.in_proj_bias.chunk(3), strict=True)
    with torch.no_grad():
        for projection, (weight, bias) in zip(
            (module.query_proj, module.key_proj, module.value_proj), parts, strict=True
        ):
            projection.weight.copy_(weight)
            projection.bias.copy_(bias)
    module.out_proj.load_state_dict(attention.out_proj.state_dict())
    return module


@pytest.mark.parametrize("training", [True, False])
def test_encoder_layer_with_softmax_is_pytorchs(training: bool) -> None:
    layer = nn.TransformerEncoderLayer(12, 4, 16, dropout=0.0, batch_first=True, dtype=torch.float64).train(training)
    nn.init.normal_(layer.self_attn.in_proj_bias)
    ours, x = copy.deepcopy(layer), normal(2, 6, 12)
    ours.self_attn = as_multihead(layer.self_attn).train(training)  # type: ignore[assignment]
    padding = torch.tensor([[False] * 6, [False] * 4 + [True] * 2])
    causal = torch.ones(6, 6, dtype=torch.bool).triu(1)
    with torch.set_grad_enabled(training):  # without gradients PyTorch's layer takes its fused path, and ours must not
        torch.testing.assert_close(ours(x), layer(x), **EXACT)
        torch.testing.assert_close(ours(x, causal, is_causal=True), layer(x, causal, is_causal=True), **EXACT)
        hidden = padding[..., None]
        for mask in (None, causal):
            left, right = (
                m(x, mask, padding, is_causal=mask is not None).masked_fill(hidden, 0) for m in (ours, layer)
            )
            torch.testing.assert_close(left, right, **EXACT)


def test_decoder_layer_with_softmax_is_pytorchs() -> None:
    layer = nn.TransformerDecoderLayer(12, 4, 16, dropout=0.0, batch_first=True, dtype=torch.float64)
    ours, x, memory = copy.deepcopy(layer), normal(2, 6, 12), normal(2, 5, 12, seed=1)
    ours.self_attn = as_multihead(layer.self_attn)  # type: ignore[assignment]
    ours.multihead_attn = as_multihead(layer.multihead_attn)  # type: ignore[assignment]
    causal = nn.Transformer.generate_square_subsequent_mask(6, dtype=torch.float64)
    left, right = (m(x, memory, tgt_mask=causal, tgt_is_causal=True) for m in (ours, layer))
    torch.testing.assert_close(left, right, **EXACT)


@each_variant
@pytest.mark.parametrize("training", [True, False])
def test_encoder_stack_with_mixtures(kind: str, training: bool) -> None:
    """Each layer is norm(x + attention), norm(x + feed-forward) with our attention, in training and evaluation."""
    layer = nn.TransformerEncoderLayer(12, 2, 16, dropout=0.0, batch_first=True, dtype=torch.float64)
    layer.self_attn = make(kind, num_heads=2)  # type: ignore[assignment]
    stack = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).train(training)
    x, padding = normal(2, 6, 12), torch.tensor([[False] * 6, [True] * 2 + [False] * 4])
    with torch.set_grad_enabled(training):
        output, seen = stack(x, src_key_padding_mask=padding), visible(2, 6, 6, False, padding)
        expected: Tensor = x
        for each in stack.layers:
            attended = dense(each.self_attn, expected, expected, expected, seen)[0]  # type: ignore[arg-type]
            expected = each.norm1(expected + attended)  # type: ignore[operator]
            expected = each.norm2(expected + each.linear2(each.linear1(expected).relu()))  # type: ignore[operator]
    torch.testing.assert_close(output, expected, **EXACT)


def test_repr() -> None:
    text = repr(make("mgk-em"))
    for part in ("variant=mgk", "num_heads=3", "head_dim=4", "num_components=2", "e_step=soft", "prior=em"):
        assert part in text


@pytest.mark.parametrize("variant", ["softmax", "mgk", "smgk", "linear", "smlk"])
def test_a_compiled_module_accepts_several_lengths(variant: str) -> None:
    """From the second length on, torch.compile makes the length symbolic; no code may depend on its value."""
    torch.compiler.reset()
    layer = MixtureAttention(16, 2, variant=variant, causal=True)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for length in (5, 7, 9, 1):
        x = torch.randn(2, length, 16)
        torch.testing.assert_close(compiled(x)[0], layer(x)[0])


@every_kind
@pytest.mark.parametrize("is_causal", [False, True])
def test_meta_tensors(kind: str, is_causal: bool) -> None:
    module = MixtureAttention(12, 3, device="meta", **KINDS[kind])
    x = torch.empty(2, 9, 12, device="meta")
    output, weights = module(x, is_causal=is_causal, need_weights=True)
    torch.autograd.backward(module(x, is_causal=is_causal)[0].sum())
    assert output.is_meta
    assert output.shape == x.shape
    assert weights.shape == (2, 9, 9)


@pytest.mark.parametrize("kind", ["mgk", "smgk", "linear", "mlk", "smlk"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_gradients_of_every_sample(kind: str, is_causal: bool) -> None:
    """As for differential privacy, compared with one sample after the other."""
    module, x = make(kind), normal(3, 5, 12)
    parameters = {name: parameter.detach() for name, parameter in module.named_parameters()}

    def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        output, _ = torch.func.functional_call(module, parameters, (x[None],), {"is_causal": is_causal})
        return output.square().sum()  # type: ignore[no-any-return]

    found = torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, x)
    for index, sample in enumerate(x):
        own = torch.autograd.grad(loss(dict(module.named_parameters()), sample), list(module.parameters()))
        for name, grad in zip(parameters, own, strict=True):
            torch.testing.assert_close(found[name][index], grad, **EXACT)


@pytest.mark.parametrize("kind", ["softmax", "mgk", "smgk"])
def test_nan_stays_in_its_sequence(kind: str) -> None:
    """It reaches the output of its own sequence and of no other."""
    module, x = make(kind, causal=True), normal(2, 5, 12)
    x[0, 0, 0] = torch.nan
    for need_weights in (False, True):
        output, _ = module(x, key_padding_mask=torch.zeros(2, 5, dtype=torch.bool), need_weights=need_weights)
        assert output[0].isnan().all()
        torch.testing.assert_close(output[1:], module(x[1:])[0], **EXACT)
