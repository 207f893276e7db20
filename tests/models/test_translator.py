"""A translator reads the source by cross-attention, sees no later target, and generates what its logits say."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from mgk.models import Translator, TranslatorConfig, build
from mgk.models.cost import translator_flops
from mgk.nn.output import IGNORE
from mgk.variants import VARIANTS

SMALL: dict[str, Any] = {
    "layers": 1, "decoder_layers": 2, "width": 16, "hidden": 16, "heads": 2, "head_dim": 8, "vocabulary": 11,
    "max_length": 12, "dropout": 0.0,
}  # fmt: skip
EXACT: dict[str, Any] = {"rtol": 1e-9, "atol": 1e-11}  # float64, with sums of a few dozen terms


def make(**options: Any) -> Translator:
    torch.manual_seed(0)
    model = build(TranslatorConfig(**(SMALL | options)))
    assert isinstance(model, Translator)
    with torch.no_grad():  # the small initial weights would hide differences
        for parameter in model.parameters():
            parameter.mul_(5)
    return model.double().eval()


def sentences(seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Source (2,7) and target (2,6), which begins with 0."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(1, 11, (2, 13), generator=generator)
    return tokens[:, :7], torch.cat([torch.zeros(2, 1, dtype=torch.long), tokens[:, 7:12]], 1)


every_variant = pytest.mark.parametrize("variant", VARIANTS)


@every_variant
def test_a_target_sees_the_source_and_what_is_before_it(variant: str) -> None:
    model = make(attention=variant)
    source, tokens = sentences()
    found = model(source, tokens)
    later = tokens.clone()
    later[:, 4:] = 1
    torch.testing.assert_close(model(source, later)[:, :4], found[:, :4], **EXACT)
    other = source.clone()
    other[0, 3] = source[0, 3] % 10 + 1
    changed = model(other, tokens)
    assert (changed[0] - found[0]).abs().amax(-1).min() > 1e-6  # at every position
    torch.testing.assert_close(changed[1], found[1], **EXACT)


@every_variant
@pytest.mark.parametrize("norm", ["pre", "post"])
def test_padding_of_the_source_changes_nothing(variant: str, norm: str) -> None:
    model = make(attention=variant, norm=norm)
    source, tokens = sentences()
    found = model(source, tokens)
    padded = torch.cat([source, torch.full((2, 3), 5)], 1)
    mask = torch.arange(10).expand(2, 10) < 7
    torch.testing.assert_close(model(padded, tokens, mask), found, **EXACT)


def test_the_loss_is_the_mean_over_targets_that_count() -> None:
    model = make(attention="smgk")
    source, tokens = sentences()
    target = torch.cat([tokens[:, 1:], torch.zeros(2, 1, dtype=torch.long)], 1)
    target[1, 4:] = IGNORE
    losses = model.loss({"source": source, "tokens": tokens, "target": target})
    logits = model(source, tokens).flatten(0, 1)
    assert int(losses["count"]) == 10
    torch.testing.assert_close(losses["loss"].float(), cross_entropy(logits, target.flatten()).float())


@every_variant
def test_translations_are_the_most_likely_tokens(variant: str) -> None:
    """The cache of the decoder gives the tokens that the whole target so far would; a 0 ends a sentence."""
    model = make(attention=variant)
    source, _ = sentences()
    mask = torch.arange(7).expand(2, 7) < torch.tensor([[7], [4]])
    found = model.translate(source, mask, max_length=9)
    tokens = torch.zeros(2, 1, dtype=torch.long)
    for _ in range(found.shape[1]):
        following = model(source, tokens, mask)[:, -1].argmax(-1)
        ended = (tokens[:, 1:] == 0).any(1)
        tokens = torch.cat([tokens, following.masked_fill(ended, 0)[:, None]], 1)
    assert torch.equal(found, tokens[:, 1:])


def test_every_parameter_learns() -> None:
    model = make(attention="mgk").train()
    source, tokens = sentences()
    loss = model.loss({"source": source, "tokens": tokens, "target": tokens})["loss"]
    loss.backward()  # type: ignore[no-untyped-call]
    assert [name for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0] == []


def test_cross_attention_counts_in_the_flops() -> None:
    """With as many layers on both sides, the decoder has a second attention, and hides half of the first."""
    one, two = (TranslatorConfig(**(SMALL | {"decoder_layers": n})) for n in (1, 2))
    more = translator_flops(two).total - translator_flops(one).total
    assert translator_flops(two).total > 2 * more
    assert more > 6 * 12 * (2 * 16 * 16 + 8 * 16 * 16)  # six FLOPs a weight and position: feed-forward, 8 projections


@pytest.mark.parametrize(
    ("options", "message"),
    [({"positions": "rotary"}, "positions: expected sinusoidal"), ({"decoder_layers": 0}, "decoder_layers: expected")],
)
def test_wrong_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TranslatorConfig(**(SMALL | options))
