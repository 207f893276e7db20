"""Every wrong argument of the module, one by one: an error that names it, what was expected and what came."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mgk.nn import KeyValueCache, MixtureAttention
from tests.nn.common import make, normal

BUILD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"embed_dim": 0}, ValueError, "embed_dim: expected at least 1, got 0"),
    ({"embed_dim": 12.0}, TypeError, "embed_dim: expected an integer, got float 12.0"),
    ({"embed_dim": 13}, ValueError, "embed_dim: expected a multiple of num_heads = 3 unless head_dim is given, got 13"),
    ({"num_heads": 0}, ValueError, "num_heads: expected at least 1"),
    ({"num_heads": True}, TypeError, "num_heads: expected an integer, got bool True"),
    ({"head_dim": -1}, ValueError, "head_dim: expected at least 1, got -1"),
    ({"num_components": 0}, ValueError, "num_components: expected at least 1"),
    ({"variant": "sMGK"}, ValueError, "variant: expected one of softmax, linear, mgk, smgk, mlk, smlk, got 'sMGK'"),
    ({"variant": None}, TypeError, "variant: expected one of"),
    ({"e_step": "medium"}, ValueError, "e_step: expected one of soft, hard, got 'medium'"),
    ({"e_step": "hard", "variant": "mlk"}, ValueError, "e_step: expected 'soft' for variant 'mlk'"),
    ({"prior": "map"}, ValueError, "prior: expected one of sgd, em, uniform, got 'map'"),
    ({"prior": "em", "variant": "smlk"}, ValueError, "prior: expected 'sgd' or 'uniform'.*got 'em' for variant 'smlk'"),
    ({"prior": "em", "e_step": "hard"}, ValueError, "prior: expected 'sgd' or 'uniform'.*e_step='hard'"),
    ({"causal": 1}, TypeError, "causal: expected True or False, got int 1"),
    ({"dropout": 1.0}, ValueError, "dropout: expected 0 <= dropout < 1, got 1.0"),
    ({"dropout": 0.1, "variant": "linear"}, ValueError, "dropout: expected 0 for variant 'linear'"),
    ({"bias": None}, TypeError, "bias: expected True or False"),
    (
        {"feature_map": "relu", "variant": "mlk"},
        ValueError,
        "feature_map: expected one of elu, favor, dpfp, got 'relu'",
    ),
    ({"feature_map": 3, "variant": "mlk"}, TypeError, "feature_map: expected a name or a callable, got int 3"),
    ({"feature_map": "favor"}, ValueError, "feature_map: expected the default for variant 'smgk'"),
    ({"learn_variance": 2}, TypeError, "learn_variance: expected True or False"),
    (
        {"learn_variance": True, "variant": "softmax"},
        ValueError,
        "learn_variance: expected False for variant 'softmax'",
    ),
    ({"prior_positions": 0, "prior": "em"}, ValueError, "prior_positions: expected at least 1"),
    ({"prior_positions": 8}, ValueError, "prior_positions: expected the default unless prior='em', got 8"),
    ({"prior_momentum": 0.5}, ValueError, "prior_momentum: expected the default unless prior='em', got 0.5"),
    ({"prior_momentum": 1.5, "prior": "em"}, ValueError, "prior_momentum: expected 0 <= prior_momentum < 1"),
    ({"means": "both"}, ValueError, "means: expected one of sgd, em, got 'both'"),
    ({"means": "em", "variant": "mgk"}, ValueError, "means: expected 'sgd'.*got 'em' for variant 'mgk'"),
    ({"means": "em", "e_step": "hard"}, ValueError, "means: expected 'sgd'.*e_step='hard'"),
    ({"means": "em", "learn_variance": True}, ValueError, "means: expected 'sgd'"),
    ({"means": "em", "rotary_dim": 2}, ValueError, "means: expected 'sgd'"),
    ({"mixing": "values", "variant": "mlk"}, ValueError, "mixing: expected one of features, keys, got 'values'"),
    ({"mixing": "keys"}, ValueError, "mixing: expected 'features' for variant 'smgk'"),
    ({"mixing": "keys", "variant": "linear"}, ValueError, "mixing: expected 'features' for variant 'linear'"),
    ({"kdim": 0}, ValueError, "kdim: expected at least 1"),
    ({"vdim": "8"}, TypeError, "vdim: expected an integer, got str '8'"),
    ({"impl": "fast"}, ValueError, "impl: expected one of auto, reference, blockwise, native, triton, got 'fast'"),
]


@pytest.mark.parametrize(("options", "error", "message"), BUILD)
def test_constructor(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        MixtureAttention(**({"embed_dim": 12, "num_heads": 3} | options))


x = normal(2, 5, 12)
causal_mask = torch.ones(5, 5, dtype=torch.bool).triu(1)
CALL: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"query": [1.0]}, TypeError, r"query: expected a torch.Tensor \(B,Nq,E\), got list"),
    ({"query": x.long()}, TypeError, "query: expected a floating-point tensor"),
    ({"query": x[None]}, ValueError, "query: expected 3 dimensions"),
    ({"query": x[..., :7]}, ValueError, r"query: expected shape \(B,Nq,E\) = \(2, 5, 12\), got \(2, 5, 7\)"),
    (
        {"key": x[:1]},
        ValueError,
        r"key: expected shape \(B,Nk,kdim\) = \(2, 5, 12\) to go with query, got \(1, 5, 12\)",
    ),
    ({"key": x[0]}, ValueError, "key: expected 3 dimensions"),
    ({"key": 1}, TypeError, "key: expected a torch.Tensor"),
    (
        {"query": x.float()},
        TypeError,
        "query: expected the dtype of query_proj.weight, torch.float64, got torch.float32",
    ),
    ({"key": x.float()}, TypeError, "key: expected the dtype of key_proj.weight, torch.float64, got torch.float32"),
    ({"key": x, "value": x.half()}, TypeError, "value: expected the dtype of value_proj.weight"),
    ({"query": x.to("meta")}, ValueError, "query: expected the device of query_proj.weight, cpu, got meta"),
    ({"value": x}, ValueError, "value: expected None where key is None"),
    ({"key": x, "value": x[:, 1:]}, ValueError, r"value: expected shape \(B,Nk,vdim\) = \(2, 5, 12\) to go with key"),
    ({"key": x, "value": "x"}, TypeError, "value: expected a torch.Tensor"),
    ({"key_padding_mask": [True]}, TypeError, "key_padding_mask: expected a bool tensor"),
    ({"key_padding_mask": torch.zeros(2, 5).long()}, TypeError, "key_padding_mask: expected dtype torch.bool"),
    (
        {"key_padding_mask": causal_mask},
        ValueError,
        r"key_padding_mask: expected shape \(B,Nk\) = \(2, 5\), got \(5, 5\)",
    ),
    ({"key_padding_mask": torch.ones(2, 5)}, ValueError, "key_padding_mask: expected .* 0 or -inf, got other numbers"),
    ({"query_padding_mask": torch.zeros(2, 5).long()}, TypeError, "query_padding_mask: expected dtype torch.bool"),
    (
        {"query_padding_mask": causal_mask},
        ValueError,
        r"query_padding_mask: expected shape \(B,Nq\) = \(2, 5\), got \(5, 5\)",
    ),
    ({"attn_mask": ~causal_mask}, ValueError, "attn_mask: expected None or the causal mask .*, got another mask"),
    ({"attn_mask": torch.zeros(5, 5)}, ValueError, "attn_mask: expected None or the causal mask .*, got another mask"),
    ({"attn_mask": causal_mask[1:]}, ValueError, r"attn_mask: expected \(Nq,Nk\) = \(5, 5\), got .* \(4, 5\)"),
    ({"attn_mask": causal_mask.long()}, TypeError, "attn_mask: expected dtype torch.bool or a float .*got torch.int64"),
    ({"attn_mask": 1, "is_causal": True}, TypeError, "attn_mask: expected a tensor"),
    ({"is_causal": None}, TypeError, "is_causal: expected True or False"),
    ({"cache": {}}, TypeError, "cache: expected a KeyValueCache of new_cache, got dict"),
    ({"cache": make("mlk").new_cache(2)}, TypeError, "cache: expected a KeyValueCache of new_cache, got StateCache"),
    ({"cache": KeyValueCache(3)}, ValueError, "cache: expected one for a batch of 2, got one for 3"),
    ({"cache": KeyValueCache(2), "key": x + 1}, ValueError, "cache: expected self-attention"),
    (
        {"cache": KeyValueCache(2), "key_padding_mask": causal_mask[:2, :4]},
        ValueError,
        "key_padding_mask: expected shape",
    ),
]


@pytest.mark.parametrize(("options", "error", "message"), CALL)
def test_forward(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make("smgk")(**({"query": x} | options))


def test_autocast_accepts_other_dtypes() -> None:
    module = make("smgk").float()
    with torch.autocast("cpu", torch.bfloat16):
        assert module(x.half())[0].isfinite().all()
        with pytest.raises(TypeError, match=r"query: expected the dtype of query_proj\.weight, .*32, got .*64"):
            module(x)  # which it leaves as it is


@torch.no_grad()
def test_a_compiled_mask_is_not_read() -> None:
    torch.compiler.reset()
    module = make("smgk")
    compiled = torch.compile(module, fullgraph=True, backend="eager")
    with pytest.raises(torch._dynamo.exc.Unsupported, match="attn_mask: expected is_causal=True with it"):
        compiled(x, attn_mask=causal_mask)
    expected = module(x, is_causal=True)[0]
    torch.testing.assert_close(compiled(x, attn_mask=causal_mask, is_causal=True)[0], expected)
    broken = torch.compile(module, backend="eager")  # in more than one graph it is read between them
    torch.testing.assert_close(broken(x, attn_mask=causal_mask)[0], expected)


def test_weights_of_a_linear_cache() -> None:
    module = make("smlk")
    with pytest.raises(ValueError, match="need_weights: expected False with a cache of linear attention"):
        module(x, need_weights=True, cache=module.new_cache(2))


def test_more_positions_than_priors() -> None:
    """The refused call leaves the cache as it was."""
    module = make("smgk-positions", prior_positions=6)
    cache = module.new_cache(2)
    module(x, cache=cache)
    with pytest.raises(ValueError, match=r"key: expected at most 6 positions \(prior_positions\), got 10"):
        module(x, cache=cache)
    assert cache.length == 5
    torch.testing.assert_close(
        module(x[:, :1], cache=cache)[0], module(torch.cat([x, x[:, :1]], 1), is_causal=True)[0][:, 5:]
    )


@pytest.mark.parametrize("kind", ["smgk", "smlk"])
def test_cache_arguments(kind: str) -> None:
    module = make(kind)
    with pytest.raises(ValueError, match="batch_size: expected at least 1, got 0"):
        module.new_cache(0)
    for capacity, error, message in (
        ("a", TypeError, "expected an integer, got str 'a'"),
        (2.5, TypeError, "expected an integer, got float 2.5"),
        (-3, ValueError, "expected at least 0, got -3"),
    ):
        with pytest.raises(error, match=f"capacity: {message}"):
            module.new_cache(2, capacity)  # type: ignore[arg-type]
    cache = module.new_cache(2)
    with pytest.raises(TypeError, match=r"indices: expected an integer tensor \(B,\), got list"):
        cache.reorder([0, 1])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"indices: expected numbers in \[0, 2\), got \[0, 2\]"):
        cache.reorder(torch.tensor([0, 2]))


def test_a_cache_belongs_to_one_kind_of_module() -> None:
    cache = make("smgk").new_cache(2)
    make("smgk")(x, cache=cache)
    with pytest.raises(ValueError, match="cache: expected shape"):
        make("smgk", num_heads=4)(x, cache=cache)
    with pytest.raises(TypeError, match=r"cache: expected the dtype of the cached positions, .*float64, got .*float32"):
        make("smgk").float()(x.float(), cache=cache)
