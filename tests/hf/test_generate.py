"""`generate()` gives the same tokens with and without a cache, for every variant and decoding method."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, StaticCache

from mgk.hf import MGKCache
from mgk.variants import LINEAR
from tests.hf.common import make
from tests.models.common import KINDS, MODERN

# Every variant, with a prior per position and a random feature map. tests/models tests the steps of the others.
SOME = ("softmax", "mgk", "mgk-hard", "smgk", "smgk-positions", "linear", "mlk", "smlk", "smlk-favor")
every_kind = pytest.mark.parametrize("kind", SOME)
GROWING = [kind for kind in SOME if KINDS[kind]["attention"] not in LINEAR]
CONSTANT = [kind for kind in SOME if kind not in GROWING]
FORMS: dict[str, dict[str, Any]] = {
    "paper": {},
    "modern": MODERN,
}
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "greedy": ("paper", {"do_sample": False}),
    "sampling": ("modern", {"do_sample": True, "top_k": 8, "num_return_sequences": 2}),
    "beams": ("modern", {"do_sample": False, "num_beams": 3, "num_return_sequences": 2}),
}
NEW = 5
# Cached and uncached logits are float32 sums in another order; logits of different tokens differ by much more.
CLOSE: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-4}


def prompts(kind: str = "smgk") -> tuple[Tensor, Tensor]:
    """Two prompts; the first is shorter and padded on the left, except with a prior per position."""
    tokens = torch.randint(1, 20, (2, 6), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(tokens)
    mask[0, :3] = kind == "smgk-positions"
    return tokens * mask, mask


def generate(model: Any, tokens: Tensor, mask: Tensor | None = None, **options: Any) -> Any:
    torch.manual_seed(0)
    mask = torch.ones_like(tokens) if mask is None else mask
    # Small models repeat one token, which would hide a wrong step: forbid repetitions.
    given: dict[str, Any] = {
        "max_new_tokens": NEW, "pad_token_id": 0, "do_sample": False, "no_repeat_ngram_size": 1, "suppress_tokens": [0],
    }  # fmt: skip
    return model.generate(tokens, attention_mask=mask, **(given | options))


@every_kind
@pytest.mark.parametrize("way", WAYS)
def test_a_cache_changes_nothing(kind: str, way: str) -> None:
    form, options = WAYS[way]
    model, (tokens, mask) = make("language", kind, **FORMS[form]), prompts(kind)
    expected = generate(model, tokens, mask, use_cache=False, **options)
    assert expected.shape[1] == tokens.shape[1] + NEW
    assert torch.equal(generate(model, tokens, mask, **options), expected)


@every_kind
def test_padding_on_the_left_changes_nothing(kind: str) -> None:
    model, (tokens, mask) = make("language", kind), prompts()
    if kind == "smgk-positions":  # all rows share the prior of a position
        with pytest.raises(ValueError, match=r"^attention_mask: expected padding on the right"):
            generate(model, tokens, mask)
        return
    together = generate(model, tokens, mask)
    assert torch.equal(together[:1, 6:], generate(model, tokens[:1, 3:])[:, 3:])
    assert torch.equal(together[1:], generate(model, tokens[1:]))


@every_kind
def test_a_prompt_in_parts(kind: str) -> None:
    """First with `forward`, then with two calls of `generate()` that share a cache."""
    model, tokens = make("language", kind), prompts()[0][1:]
    with torch.no_grad():
        expected = model(tokens).logits
        first = model(tokens[:, :2], use_cache=True)
        second = model(tokens[:, 2:5], past_key_values=first.past_key_values)
        third = model(tokens[:, 5:], past_key_values=second.past_key_values, logits_to_keep=1)
    torch.testing.assert_close(torch.cat((first.logits, second.logits, third.logits), 1), expected, **CLOSE)
    cache = DynamicCache()
    half = generate(model, tokens, past_key_values=cache, max_new_tokens=3)
    whole = generate(model, half, past_key_values=cache, max_new_tokens=NEW - 3)
    assert torch.equal(whole, generate(model, tokens))


@every_kind
def test_a_static_cache_is_allocated_at_once(kind: str) -> None:
    model, (tokens, mask) = make("language", kind), prompts(kind)
    found = generate(model, tokens, mask, cache_implementation="static", return_dict_in_generate=True)
    assert torch.equal(found.sequences, generate(model, tokens, mask))
    for layer in found.past_key_values.layers:
        if kind in GROWING:
            assert layer.inner._key.shape[-2] == tokens.shape[1] + NEW - 1


@pytest.mark.parametrize("kind", ["softmax", "mgk", "smgk-positions"])
@pytest.mark.parametrize("every", [None, 2])
def test_a_window_is_cached_as_it_is_computed(kind: str, every: int | None) -> None:
    """Of each layer a dynamic cache keeps the window; a static one hides what is before it."""
    model, (tokens, mask) = make("language", kind, window=4, global_every=every), prompts(kind)
    options: dict[str, Any] = {"max_new_tokens": 9, "return_dict_in_generate": True}
    expected = generate(model, tokens, mask, use_cache=False, max_new_tokens=9)
    for way in ({}, {"cache_implementation": "static"}, {"num_beams": 1, "past_key_values": DynamicCache()}):
        found = generate(model, tokens, mask, **options, **way)
        assert torch.equal(found.sequences, expected)
        held = [layer.inner.held for layer in found.past_key_values.layers]
        assert held == ([14, 14] if "cache_implementation" in way else [4, 14 if every else 4])
    cache = StaticCache(config=model.config, max_cache_len=20)
    if every:
        assert torch.equal(generate(model, tokens, mask, past_key_values=cache, max_new_tokens=9), expected)
    else:
        with pytest.raises(ValueError, match=r"^past_key_values: a StaticCache whose layers all have a window"):
            generate(model, tokens, mask, past_key_values=cache)
    with pytest.raises(ValueError, match=r"^cache: a cache of a window has no earlier tokens"):
        generate(model, tokens[1:], prompt_lookup_num_tokens=3)


@every_kind
@pytest.mark.parametrize("beams", [1, 3])
def test_a_static_cache_passed_as_an_object(kind: str, beams: int) -> None:
    """It is allocated at once, says how long it is, and can be continued."""
    model, (tokens, mask) = make("language", kind), prompts(kind)
    cache = StaticCache(config=model.config, max_cache_len=tokens.shape[1] + NEW)
    options: dict[str, Any] = {"num_beams": beams, "return_dict_in_generate": True}
    found = generate(model, tokens, mask, past_key_values=cache, max_new_tokens=2, **options)
    assert torch.equal(found.sequences, generate(model, tokens, mask, max_new_tokens=2, num_beams=beams))
    assert cache.get_seq_length() == tokens.shape[1] + 1
    if kind in GROWING:
        layers: list[Any] = cache.layers
        assert {layer.inner._key.shape[-2] for layer in layers} == {tokens.shape[1] + NEW}
        assert found.past_key_values.static
    if beams == 1:
        longer = torch.cat((mask, torch.ones(2, 2, dtype=mask.dtype)), 1)
        whole = generate(model, found.sequences, longer, past_key_values=cache, max_new_tokens=NEW - 2)
        assert torch.equal(whole, generate(model, tokens, mask))


@torch.no_grad()
def test_a_static_cache_in_forward() -> None:
    model, tokens = make("language"), prompts()[0][1:]
    cache = StaticCache(config=model.config, max_cache_len=8)
    first = model(tokens[:, :4], past_key_values=cache)
    rest = [model(tokens[:, n : n + 1], past_key_values=cache).logits for n in (4, 5)]
    torch.testing.assert_close(torch.cat((first.logits, *rest), 1), model(tokens).logits, **CLOSE)


@pytest.mark.parametrize("kind", GROWING)
@pytest.mark.parametrize("assistant", ["model", "prompt"])
def test_assisted_decoding_changes_nothing(kind: str, assistant: str) -> None:
    model, tokens = make("language", kind), prompts()[0][1:]
    options: dict[str, Any] = {"prompt_lookup_num_tokens": 3}
    if assistant == "model":
        options = {"assistant_model": make("language", "smgk", layers=1)}
    assert torch.equal(generate(model, tokens, **options), generate(model, tokens))


@pytest.mark.parametrize("kind", CONSTANT)
def test_the_linear_family_decodes_in_constant_memory(kind: str) -> None:
    model, tokens = make("language", kind), prompts()[0][1:]
    found = {n: generate(model, tokens, max_new_tokens=n, return_dict_in_generate=True) for n in (1, 12)}
    short, long = (found[n].past_key_values for n in (1, 12))
    assert short.bytes == long.bytes > 0
    assert long.get_seq_length() == tokens.shape[1] + 11
    with pytest.raises(ValueError, match="cannot remove the tokens"):
        generate(model, tokens, prompt_lookup_num_tokens=3)


def test_smgk_with_half_the_heads_has_half_the_cache() -> None:
    """It stores one key per position for any number of components."""
    tokens = prompts()[0][1:]
    sizes = [
        generate(make("language", kind, heads=heads), tokens, return_dict_in_generate=True).past_key_values.bytes
        for kind, heads in (("softmax", 4), ("smgk", 2))
    ]
    assert sizes[0] == 2 * sizes[1]


def test_an_unsupported_cache_is_an_error() -> None:
    model, tokens = make("language"), prompts()[0]
    filled = DynamicCache()
    filled.update(torch.zeros(2, 2, 3, 4), torch.zeros(2, 2, 3, 4), 0)
    static = StaticCache(config=model.config, max_cache_len=20)
    static.update(torch.zeros(2, 2, 3, 4), torch.zeros(2, 2, 3, 4), 0)
    for cache in (filled, static, "cache"):
        with pytest.raises(TypeError, match="past_key_values: expected an MGKCache, or an empty DynamicCache or"):
            model(tokens, past_key_values=cache)
    with pytest.raises(ValueError, match="cache_implementation: expected 'dynamic' or 'static'"):
        generate(model, tokens, cache_implementation="offloaded")


def test_crop_repeat_select_and_reset() -> None:
    model, tokens = make("language", "mgk"), prompts()[0]
    with torch.no_grad():
        cache = model(tokens, use_cache=True).past_key_values
        assert isinstance(cache, MGKCache)
        assert cache.get_seq_length() == 6
        cache.crop(-2)
        again = model(tokens[:, 4:], past_key_values=cache).logits
        torch.testing.assert_close(again, model(tokens).logits[:, 4:], **CLOSE)
        cache.batch_repeat_interleave(2)
        cache.batch_select_indices(torch.tensor([3, 0]))
        cache.crop(-1)
        swapped = model(tokens[[1, 0], 5:], past_key_values=cache).logits
        torch.testing.assert_close(swapped[[1, 0]], again[:, 1:], **CLOSE)
        cache.reset()
        assert cache.get_seq_length() == 0
        torch.testing.assert_close(model(tokens, past_key_values=cache).logits, model(tokens).logits, **CLOSE)
        with pytest.raises(ValueError, match="crop: expected 0 to -6, got -7"):
            cache.crop(-7)
