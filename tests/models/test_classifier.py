"""Classifier and matcher compute their formulas for every attention, and padding changes nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from mgk.models import ClassifierConfig, build
from tests.models.common import KINDS, batch, make, plain_encoder, random_tokens
from tests.nn.common import EXACT

every_kind = pytest.mark.parametrize("kind", KINDS)
poolings = pytest.mark.parametrize("pooling", ["mean", "padded"])


def pooled(model: Any, tokens: Tensor, mask: Tensor) -> Tensor:
    """Row by row, over the real positions alone."""
    x = plain_encoder(model.encoder, tokens, mask, False)
    rows = zip(x, mask, strict=True)
    return torch.stack([row[m].sum(0) / (24 if model.config.pooling == "padded" else m.sum()) for row, m in rows])


@every_kind
@poolings
@pytest.mark.parametrize("norm", ["pre", "post"])
def test_classifier_is_its_formula(kind: str, pooling: str, norm: str) -> None:
    model, data = make("classifier", kind, pooling=pooling, norm=norm), batch("classifier")
    logits = model(data["tokens"], data["mask"])
    first, _, second = model.classifier
    hidden = (pooled(model, data["tokens"], data["mask"]) @ first.weight.T + first.bias).relu()
    expected = hidden @ second.weight.T + second.bias
    torch.testing.assert_close(logits, expected, **EXACT)
    result = model.loss(data)
    torch.testing.assert_close(result["loss"], cross_entropy(expected, data["label"]).float(), rtol=1e-5, atol=1e-5)
    assert result["correct"] == (expected.argmax(1) == data["label"]).sum()
    assert result["count"] == 2


@every_kind
@poolings
def test_matcher_is_its_formula(kind: str, pooling: str) -> None:
    model, data = make("matcher", kind, pooling=pooling), batch("matcher")
    one, two = (pooled(model, data["tokens"][:, i], data["mask"][:, i]) for i in (0, 1))
    expected = model.classifier(torch.cat([one, two, one * two, one - two], -1))
    torch.testing.assert_close(model(data["tokens"], data["mask"]), expected, **EXACT)
    assert model.loss(data)["count"] == 2


@every_kind
@pytest.mark.parametrize(
    ("name", "positions"), [("classifier", "learned"), ("classifier", "rotary"), ("matcher", "learned")]
)
@pytest.mark.parametrize("spare", [0, 5])
def test_packed_tokens_are_the_padded_ones(kind: str, name: str, positions: str, spare: int) -> None:
    """Logits, every gradient and what an M-step moves; whatever stands behind the tokens. Padding is on both sides."""
    tokens, mask = (batch(name)[key].clone() for key in ("tokens", "mask"))
    mask[..., 0] = False
    packed = torch.cat([tokens[mask], torch.randint(1, 9, (spare,))])
    results = []
    for given in (tokens, packed):
        model = make(name, kind, positions=positions).train()
        logits = model(given, mask)
        torch.autograd.backward(logits, random_tokens(*logits.shape).double())
        gradients = {each: parameter.grad for each, parameter in model.named_parameters()}
        results.append({"logits": logits} | gradients | dict(model.named_buffers()))
    torch.testing.assert_close(results[1], results[0], **EXACT)


def test_wrong_packed_tokens() -> None:
    model, data = make("classifier", "softmax"), batch("classifier")
    packed, mask = data["tokens"][data["mask"]], data["mask"]
    with pytest.raises(ValueError, match=r"tokens: expected at least the \d+ that the mask has, got"):
        model(packed[1:], mask)
    with pytest.raises(TypeError, match="tokens: expected an integer tensor"):
        model(packed.double(), mask)
    with pytest.raises(ValueError, match=r"tokens: expected 2 dimensions \(B,N\)"):
        model(packed)
    with pytest.raises(ValueError, match=r"mask: expected 2 dimensions \(B,N\)"):
        model(packed, mask[0])
    with pytest.raises(ValueError, match="positions or a cache, got packed tokens"):
        model(packed, mask, torch.zeros_like(data["tokens"]))
    with pytest.raises(ValueError, match=r"mask: expected shape \(B,2,N\)"):
        make("matcher", "softmax")(packed, mask)


def test_softmax_classifier_is_pytorchs_encoder() -> None:
    """The whole stack of nn.TransformerEncoder with our weights."""
    model, data = make("classifier", "softmax", head_dim=6), batch("classifier")
    layer = nn.TransformerEncoderLayer(12, 2, 16, 0.0, "gelu", batch_first=True, norm_first=True, dtype=torch.float64)
    encoder = nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(12, dtype=torch.float64), enable_nested_tensor=False)
    for theirs, ours in zip(encoder.layers, model.encoder.stack.layers, strict=True):
        inputs = (ours.attention.query_proj, ours.attention.key_proj, ours.attention.value_proj)
        theirs.load_state_dict(
            {
                "self_attn.in_proj_weight": torch.cat([p.weight for p in inputs]),
                "self_attn.in_proj_bias": torch.cat([p.bias for p in inputs]),
                **{f"self_attn.out_proj.{k}": v for k, v in ours.attention.out_proj.state_dict().items()},
                **{f"linear1.{k}": v for k, v in ours.up.state_dict().items()},
                **{f"linear2.{k}": v for k, v in ours.down.state_dict().items()},
                **{f"norm1.{k}": v for k, v in ours.attention_norm.state_dict().items()},
                **{f"norm2.{k}": v for k, v in ours.feed_forward_norm.state_dict().items()},
            }
        )
    encoder.norm.load_state_dict(model.encoder.stack.final_norm.state_dict())  # type: ignore[union-attr]
    tokens, mask = data["tokens"], data["mask"]
    x = model.encoder.tokens.weight[tokens] + model.encoder.positions.weight[: tokens.shape[1]]
    expected, ours = encoder(x, src_key_padding_mask=~mask), model.encoder(tokens, mask)
    torch.testing.assert_close(ours[mask], expected[mask], **EXACT)


@every_kind
@poolings
@pytest.mark.parametrize("positions", ["learned", "sinusoidal", "rotary"])
def test_padding_changes_nothing(kind: str, pooling: str, positions: str) -> None:
    """On the right; and on the left, if the positions say so, but for priors that belong to places."""
    model, tokens = make("classifier", kind, pooling=pooling, positions=positions), random_tokens(3, 7)
    alone = model(tokens)
    for before, after in ((0, 0), (0, 4), (3, 1)):
        if before and kind == "smgk-positions":
            continue
        padded = nn.functional.pad(tokens, (before, after), value=13)
        mask = nn.functional.pad(torch.ones_like(tokens, dtype=torch.bool), (before, after))
        where = (torch.arange(padded.shape[1]) - before).clamp(min=0).expand_as(padded) if before else None
        torch.testing.assert_close(model(padded, mask, where), alone, **EXACT)


@every_kind
@pytest.mark.parametrize("name", ["classifier", "matcher", "vision"])
def test_gradients_reach_every_parameter(name: str, kind: str) -> None:
    model = make(name, kind).train()
    model.loss(batch(name))["loss"].backward()
    for label, parameter in model.named_parameters():
        if kind == "softmax" and label.endswith("key_proj.bias"):  # the same for all keys of a query, and cancels
            continue
        assert parameter.grad is not None, label
        assert parameter.grad.abs().max() > 0, label


@pytest.mark.parametrize("kind", ["smgk-em", "smgk-positions"])
@pytest.mark.parametrize("name", ["classifier", "matcher", "language", "vision"])
def test_priors_change_only_in_training(name: str, kind: str) -> None:
    model = make(name, kind)
    priors = [value for key, value in model.named_buffers() if key.endswith("log_prior")]
    before = [prior.clone() for prior in priors]
    assert len(priors) == 2
    model.loss(batch(name))
    torch.testing.assert_close(priors, before, rtol=0, atol=0)
    model.train().loss(batch(name))
    for now, then in zip(priors, before, strict=True):
        assert (now - then).abs().max() > 1e-6


def test_tokens_of_any_integer_type() -> None:
    model, tokens = make("classifier"), random_tokens(2, 5)
    for dtype in (torch.uint8, torch.int16, torch.int32):
        torch.testing.assert_close(model(tokens.to(dtype)), model(tokens), rtol=0, atol=0)


def test_initial_values() -> None:
    """Tables of std 0.02 (2% is five standard errors of the std of 512 * 64 numbers), heads of the paper's width."""
    torch.manual_seed(0)
    model: Any = build(ClassifierConfig(max_length=512))
    for table in (model.encoder.tokens.weight, model.encoder.positions.weight):
        assert abs(table.std() / 0.02 - 1) < 0.02
    attention = model.encoder.stack.layers[0].attention
    assert attention.query_proj.weight.shape == (128, 64)
    assert attention.out_proj.weight.shape == (64, 128)


def test_linear_family_ignores_attention_dropout() -> None:
    model = make("classifier", "smlk", attention_dropout=0.1)
    assert model.encoder.stack.layers[0].attention.dropout == 0
    assert make("classifier", "smgk", attention_dropout=0.1).encoder.stack.layers[0].attention.dropout == 0.1


def test_wrong_inputs() -> None:
    model, tokens = make("classifier"), random_tokens(2, 5)
    with pytest.raises(TypeError, match="tokens: expected an integer tensor"):
        model(tokens.float())
    with pytest.raises(ValueError, match=r"tokens: expected 2 dimensions \(B,N\)"):
        model(tokens[0])
    with pytest.raises(ValueError, match=r"tokens: expected at most 24 positions \(max_length\), got 25"):
        model(random_tokens(1, 25))
    with pytest.raises(ValueError, match=r"mask: expected shape \(B,Nk\) = \(2, 5\)"):
        model(tokens, torch.ones(2, 4, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"positions: expected shape \(B,N\) = \(2, 5\)"):
        model(tokens, None, torch.zeros(2, 4, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"tokens: expected shape \(B,2,N\), got \(2, 5\)"):
        make("matcher")(tokens)
