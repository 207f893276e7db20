"""The language model: its formula, causality, and that caches, padding and short cuts change no logit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mgk.models import LanguageModelConfig, build
from mgk.nn import output
from mgk.ops import linear
from mgk.ops.api import HAS_TRITON
from tests.models.common import KINDS, MODERN, make, plain_encoder, random_tokens

every_kind = pytest.mark.parametrize("kind", KINDS)
# Logits are float32, of sums of a dozen numbers of the order of 1.
CLOSE: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-5}
FORMS: dict[str, dict[str, Any]] = {
    "paper": {},
    "plain": {"cutoffs": ()},
    "modern": MODERN,
    "learned": {"positions": "learned"},
}
every_form = pytest.mark.parametrize("form", FORMS)


@every_kind
@pytest.mark.parametrize("form", ["paper", "plain", "learned"])
def test_logits_are_the_formula(kind: str, form: str) -> None:
    model, tokens = make("language", kind, **FORMS[form]), random_tokens(2, 9)
    hidden = plain_encoder(model.encoder, tokens, None, True)
    weight, output = model.encoder.tokens.weight, model.output
    scores = hidden @ weight.T + output.bias
    if form == "plain":
        torch.testing.assert_close(model(tokens), scores.float(), **CLOSE)
    else:
        clusters = hidden @ output.cluster_weight.T + output.cluster_bias
        first = torch.cat([scores[..., :5], clusters], -1).log_softmax(-1)
        parts = [first[..., :5]]
        for place, part in ((5, scores[..., 5:11]), (6, scores[..., 11:])):
            parts.append(first[..., place, None] + part.log_softmax(-1))
        torch.testing.assert_close(model(tokens), torch.cat(parts, -1).float(), **CLOSE)


@every_kind
@every_form
def test_the_future_does_not_change_the_past(kind: str, form: str) -> None:
    model, tokens = make("language", kind, **FORMS[form]), random_tokens(2, 9)
    other = tokens.clone()
    other[:, 5:] = random_tokens(2, 4, seed=3)
    one, two = model(tokens), model(other)
    torch.testing.assert_close(one[:, :5], two[:, :5], **CLOSE)
    assert (one[:, 5] - two[:, 5]).abs().max() > 1e-3


@every_kind
@every_form
def test_steps_are_the_full_pass(kind: str, form: str) -> None:
    model, tokens = make("language", kind, **FORMS[form]), random_tokens(2, 9)
    cache = model.new_cache(2, capacity=9)
    steps = [model(tokens[:, part], cache=cache) for part in (slice(0, 5), slice(5, 6), slice(6, 9))]
    torch.testing.assert_close(torch.cat(steps, 1), model(tokens), **CLOSE)
    assert cache.length == 9


@pytest.mark.parametrize("kind", sorted(KINDS.keys() - {"smgk-positions"}))  # padding moves tokens to other places
@every_form
def test_left_padding(kind: str, form: str) -> None:
    """Prompts of unlike length generate side by side what they generate alone."""
    model, long, short = make("language", kind, **FORMS[form]), random_tokens(1, 7), random_tokens(1, 4, seed=5)
    tokens = torch.cat([long, torch.nn.functional.pad(short, (3, 0), value=17)])
    mask = torch.ones(2, 7, dtype=torch.bool)
    mask[1, :3] = False
    full = model(tokens, mask)
    torch.testing.assert_close(full[0], model(long)[0], **CLOSE)
    torch.testing.assert_close(full[1, 3:], model(short)[0], **CLOSE)
    cache = model.new_cache(2)
    steps = [
        model(tokens[:, part], mask[:, : part.stop], cache=cache) for part in (slice(0, 4), slice(4, 5), slice(5, 7))
    ]
    torch.testing.assert_close(torch.cat(steps, 1)[mask], full[mask], **CLOSE)


@every_kind
@every_form
def test_loss_is_that_of_the_logits(kind: str, form: str) -> None:
    """The value, and the gradient of every parameter, with a target left out."""
    model, tokens, target = make("language", kind, **FORMS[form]), random_tokens(2, 9), random_tokens(2, 9, seed=1)
    target[0, 2] = -100
    result = model.loss({"tokens": tokens, "target": target})
    assert result["count"] == 17
    grads = torch.autograd.grad(result["loss"], list(model.parameters()), allow_unused=True)
    chosen = model(tokens).log_softmax(-1).gather(-1, target.clamp(min=0)[..., None])[..., 0]
    expected = -(chosen * (target >= 0)).sum() / 17
    torch.testing.assert_close(result["loss"], expected, **CLOSE)
    others = torch.autograd.grad(expected, list(model.parameters()), allow_unused=True)
    # Gradients pass through float32 logits: sums of some hundred numbers of the order of 1.
    torch.testing.assert_close(grads, others, rtol=1e-4, atol=1e-4)
    assert all(grad is not None for grad in grads)


# A Llama or a Qwen3 of Transformers with the same weights. Its frequencies are float32.
LLAMA = {
    "input_layernorm": "attention_norm", "post_attention_layernorm": "feed_forward_norm", "mlp.up_proj": "up",
    "mlp.gate_proj": "gate", "mlp.down_proj": "down", "self_attn.q_proj": "attention.query_proj",
    "self_attn.k_proj": "attention.key_proj", "self_attn.v_proj": "attention.value_proj",
    "self_attn.o_proj": "attention.out_proj", "self_attn.q_norm": "attention.query_norm",
    "self_attn.k_norm": "attention.key_norm",
}  # fmt: skip


@pytest.mark.parametrize("rope_type", ["default", "linear", "llama3", "yarn"])
@pytest.mark.parametrize("family", ["Llama", "Qwen3"])
def test_logits_are_those_of_transformers(family: str, rope_type: Any) -> None:
    """RMSNorm, SwiGLU, rotary positions with every scaling, normalised queries and keys, tied embeddings or not."""
    transformers = pytest.importorskip("transformers")
    base = 500_000.0 if family == "Llama" else 10_000.0
    scaling: dict[str, Any] = {"rope_type": rope_type, "rope_theta": base}
    ours: dict[str, Any] = scaling | {"rope_factor": 1.0, "rope_original_length": None}
    if rope_type != "default":
        scaling["factor"] = ours["rope_factor"] = 4.0
    if rope_type in ("llama3", "yarn"):
        scaling["original_max_position_embeddings"] = ours["rope_original_length"] = 64
    if rope_type == "llama3":
        scaling |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    theirs: dict[str, Any] = {
        "vocab_size": 20, "hidden_size": 12, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 2, "head_dim": 8, "rms_norm_eps": 1e-5, "max_position_embeddings": 256,
        "rope_parameters": scaling, "tie_word_embeddings": family == "Qwen3",
    }  # fmt: skip
    config = getattr(transformers, f"{family}Config")(**theirs)
    other = getattr(transformers, f"{family}ForCausalLM")(config).double().eval()
    tied = family == "Qwen3"
    ours |= {"head_dim": 8, "rotary_share": 1.0, "qk_norm": tied, "tie_word_embeddings": tied, "vocabulary_multiple": 1}
    model, tokens = make("language", "softmax", **(MODERN | ours)), random_tokens(2, 200)
    weights = model.state_dict()
    for theirs_name, value in other.named_parameters():
        place, _, rest = theirs_name.removeprefix("model.").partition(".")
        if place == "layers":
            number, _, part = rest.removesuffix(".weight").partition(".")
            own = f"encoder.stack.layers.{number}.{LLAMA[part]}.weight"
        else:
            own = {"embed_tokens": "encoder.tokens.weight", "norm": "encoder.stack.final_norm.weight"}.get(
                place, theirs_name
            )
        value.data.copy_(weights.pop(own))
    assert not weights
    # Angles of 200 positions in float32 are right to 1e-5, in scores of the order of 1.
    torch.testing.assert_close(model(tokens), other(tokens).logits.float(), rtol=1e-3, atol=1e-3)


def test_rows_behind_the_vocabulary_change_nothing() -> None:
    """Logits, losses and gradients are those of the same model without the rows."""
    padded = make("language", **(MODERN | {"vocabulary_multiple": 16, "output_bias": True}))
    plain = make("language", **(MODERN | {"vocabulary_multiple": 1, "output_bias": True}))
    assert padded.encoder.tokens.weight.shape == padded.lm_head.weight.shape == (32, 12)
    weights = padded.state_dict()
    plain.load_state_dict({name: value[:20] if value.shape[:1] == (32,) else value for name, value in weights.items()})
    tokens, data = random_tokens(2, 9), {"tokens": random_tokens(2, 9), "target": random_tokens(2, 9, seed=1)}
    torch.testing.assert_close(padded(tokens), plain(tokens), **CLOSE)
    for model in (padded, plain):
        model.loss(data)["loss"].backward()
    torch.testing.assert_close(padded.token_losses(data), plain.token_losses(data), **CLOSE)
    for one, two in zip(padded.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad[: len(two)], two.grad, rtol=1e-4, atol=1e-4)
        assert not one.grad[len(two) :].any()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rope_type": "yarn", "rope_factor": 2.0}, "rope_original_length: expected an integer"),
        ({"rope_type": "linear", "rope_factor": 0.5}, "rope_factor: expected a number of at least 1, got 0.5"),
        ({"rope_factor": 2.0}, "rope_type: expected linear, llama3 or yarn"),
        ({"rope_theta": 1e6, "positions": "learned"}, "positions: expected rotary with rope_type or rope_theta"),
        ({"rope_theta": 0.5}, "rope_theta: expected a number above 1, got 0.5"),
        ({"cutoffs": (5,), "output_bias": True}, "vocabulary_multiple: expected 1 with cutoffs, got 16"),
        ({"num_kv_heads": 3}, "num_kv_heads: expected a divisor of num_heads"),
    ],
)
def test_wrong_settings(options: dict[str, Any], message: str) -> None:
    plain = {"rope_type": "default", "rope_factor": 1.0, "rope_original_length": None, "rope_theta": 10_000.0}
    with pytest.raises((TypeError, ValueError), match=message):
        make("language", **(MODERN | plain | options))


@every_form
def test_last_positions_alone(form: str) -> None:
    model, tokens, target = make("language", **FORMS[form]), random_tokens(2, 9), random_tokens(2, 9, seed=1)
    torch.testing.assert_close(model(tokens, last=2), model(tokens)[:, -2:], **CLOSE)
    data = {"tokens": tokens, "target": target}
    losses: Tensor = model.token_losses(data)
    assert losses.shape == (2, 9)
    torch.testing.assert_close(model.token_losses(data, last=1), losses[:, -1:], **CLOSE)
    torch.testing.assert_close(model.loss(data)["loss"], losses.mean(), **CLOSE)


def test_capturable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without kernels an adaptive softmax and a causal linear scan look at numbers on the host."""
    models = [make("language", cutoffs=()), make("language"), make("language", "smlk", cutoffs=())]
    assert [model.capturable for model in models] == [True, HAS_TRITON, HAS_TRITON]
    assert not make("language", "smlk", cutoffs=(), feature_map="dpfp").capturable
    for module in (output, linear):
        monkeypatch.setattr(module, "HAS_TRITON", False)
    assert [model.capturable for model in models] == [True, False, False]
    for other in ("classifier", "matcher", "vision"):
        assert make(other).capturable


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_initial_values(norm: Any) -> None:
    torch.manual_seed(0)
    model: Any = build(LanguageModelConfig(layers=2, vocabulary=500, cutoffs=(), norm=norm, attention_bias=True))
    for name, parameter in model.named_parameters():
        if name.endswith("weight") and parameter.dim() == 2:
            writes = norm == "pre" and name.endswith(("out_proj.weight", "down.weight"))
            # 16,384 numbers at least: their std is right to 1 / sqrt(2 * 16384) = 0.6%
            assert abs(parameter.std() / (0.02 / (2 if writes else 1)) - 1) < 0.03, name
        elif "norm" not in name and name.endswith("bias"):
            assert not parameter.any(), name


def test_dropout_is_off_in_evaluation() -> None:
    model, tokens = make("language", dropout=0.5), random_tokens(2, 9)
    torch.testing.assert_close(model(tokens), model(tokens), rtol=0, atol=0)
    assert (model.train()(tokens) - model(tokens)).abs().max() > 1e-3


def test_grouped_queries_decode_as_they_train() -> None:
    """A step of the cache, which holds the heads of keys and values alone, gives the logits of one call."""
    config = LanguageModelConfig(
        heads=4, num_kv_heads=2, head_dim=4, layers=2, width=16, hidden=16, vocabulary=30, cutoffs=(), dropout=0.0
    )
    torch.manual_seed(0)
    model: Any = build(config).double().eval()
    tokens = torch.arange(10).view(2, 5)
    cache = model.new_cache(2)
    steps = torch.cat([model(tokens[:, i : i + 1], cache=cache) for i in range(5)], 1)
    torch.testing.assert_close(steps, model(tokens), rtol=1e-5, atol=1e-5)  # the logits are in float32
    assert cache.bytes == 2 * (2 * 2 * 2 * 5 * 4) * 8
