"""Every family of `mgk.merge.families`: merging equal heads is exact, and merging is better than dropping heads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.gemma2 import modeling_gemma2
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb
from transformers.models.modernbert import modeling_modernbert
from transformers.models.olmo2 import modeling_olmo2

from mgk.merge import merge_heads
from mgk.merge.attention import IMPLEMENTATION, warn_dense_weights
from mgk.merge.calibration import attention
from mgk.merge.families import FAMILIES
from mgk.merge.layers import layers_of
from mgk.merge.static import MixtureStaticCache
from tests.hf.common import same_weights
from tests.merge.families import GENERATIVE, MODELS, family_model, logits, other, twin

# Sums of a few hundred products of float64 numbers of the order of 1, through two layers.
EXACT: dict[str, Any] = {"rtol": 1e-9, "atol": 1e-9}


def _normalised(self: Any, x: Tensor) -> Tensor:
    return self.weight * x * (x.square().mean(-1, keepdim=True) + self.variance_epsilon).rsqrt()  # type: ignore[no-any-return]


@pytest.fixture(autouse=True)
def _in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute in float64 what three families round to float32 whatever the dtype, which would hide smaller errors.

    These are ModernBERT's rotated queries and keys, OLMo 2's norms, which are over fewer heads after merging, and the
    softmax of Gemma 2, which has no other attention in Transformers.
    """
    monkeypatch.setattr(modeling_gemma2, "eager_attention_forward", sdpa_attention_forward)
    monkeypatch.setattr(modeling_modernbert, "apply_rotary_pos_emb", apply_rotary_pos_emb)
    monkeypatch.setattr(modeling_olmo2.Olmo2RMSNorm, "forward", _normalised)


def test_the_table_has_every_family() -> None:
    assert {family.prefix for family in FAMILIES} == {
        next(family.prefix for family in FAMILIES if kind in family.classes) for kind, _ in MODELS.values()
    }


def test_the_page_on_merging_has_every_family() -> None:
    page = (Path(__file__).parents[2] / "docs/merging.md").read_text()
    rows = page[page.index("| family |") : page.index('"Exact" means')].splitlines()[2:]
    named = {name.strip() for row in rows if row.startswith("|") for name in row.split("|")[1].split(",")}
    assert named == {family.prefix for family in FAMILIES}


@pytest.mark.parametrize("name", MODELS)
def test_merging_equal_heads_changes_nothing(name: str) -> None:
    model, batch = family_model(name)
    twin(model)
    small, report = merge_heads(model, [batch])
    torch.testing.assert_close(logits(small, batch), logits(model, batch), **EXACT)
    half = len(report.pairs[0])
    assert report.heads == (2 * half, half)
    assert all(pairs == [(i, i + half) for i in range(half)] for pairs in report.pairs)
    assert report.affinity == pytest.approx([1, 1])
    # Also on inputs that it was not calibrated on.
    torch.testing.assert_close(logits(small, other(batch)), logits(model, other(batch)), **EXACT)


@pytest.mark.parametrize("name", MODELS)
def test_merging_is_more_accurate_than_dropping(name: str) -> None:
    model, batch = family_model(name)
    expected = logits(model, batch)
    near, far = (
        (logits(merge_heads(model, [batch], method=method)[0], batch) - expected).square().mean()
        for method in ("merge", "drop")
    )
    assert near < far


@pytest.mark.parametrize("name", [name for name in MODELS if "multi-query" not in name])
def test_pooling_equal_heads_changes_nothing(name: str) -> None:
    """Neighbouring key heads are pooled: they are made equal, with their values."""
    model, batch = family_model(name)
    with torch.no_grad():
        for layer in layers_of(model):
            for row in (x for pair in layer.weights()[1:3] for x in pair if x is not None):
                heads = row.movedim(-2, 0)
                heads[1::2] = heads[::2].clone()
            if (norm := layer.norm()) is not None and norm.together:
                gain = layer.module.k_norm.weight.view(-1, layer.head_dim)
                gain[1::2] = gain[::2].clone()
    small, report = merge_heads(model, [batch], method="pool")
    torch.testing.assert_close(logits(small, batch), logits(model, batch), **EXACT)
    assert report.heads[0] == report.heads[1]
    assert report.key_value_heads[0] == 2 * report.key_value_heads[1]


@pytest.mark.parametrize("name", MODELS)
def test_a_merged_model_is_saved_and_loaded(name: str, tmp_path: Path) -> None:
    model, batch = family_model(name)
    small, _ = merge_heads(model, [batch])
    small.save_pretrained(tmp_path)
    kind = MODELS[name][0]
    task = next(kind.removeprefix(family.prefix) for family in FAMILIES if kind in family.classes)
    auto = {"LMHeadModel": "ForCausalLM", "ForConditionalGeneration": "ForSpeechSeq2Seq"}.get(task, task)
    loaded: Any = getattr(transformers, f"AutoModel{auto}").from_pretrained(tmp_path, dtype=torch.float64)
    assert type(loaded) is type(small)
    assert same_weights(loaded, small)
    torch.testing.assert_close(logits(loaded, batch), logits(small, batch))


@pytest.mark.parametrize("name", GENERATIVE)
def test_a_merged_model_generates_with_its_cache(name: str) -> None:
    model, batch = family_model(name)
    small: Any = merge_heads(model, [batch])[0]
    options: dict[str, Any] = {
        "max_new_tokens": 4, "do_sample": False, "no_repeat_ngram_size": 1, "suppress_tokens": [0, 2],
        "pad_token_id": 0,
    }  # fmt: skip
    expected = small.generate(**batch, use_cache=False, **options)
    assert torch.equal(small.generate(**batch, **options), expected)
    alone = {n: x[:1, 4:] for n, x in batch.items()}  # without its padding
    assert torch.equal(small.generate(**alone, **options)[0, 8:], expected[0, 12:])
    static = {**options, "cache_implementation": "static"}
    assert torch.equal(small.generate(**batch, **static), expected)
    assert torch.equal(small.generate(**alone, **static)[0, 8:], expected[0, 12:])


@pytest.mark.parametrize("name", [name for name in MODELS if name != "gemma2"])  # its eager function is replaced above
def test_attention_weights_are_those_of_transformers(name: str) -> None:
    """Those that a merged model returns for equal heads, and those that merging computes of the original."""
    model, batch = family_model(name)
    twin(model)
    small, _ = merge_heads(model, [batch])
    model.set_attn_implementation("eager")  # the only one that returns weights; NaN for padding in float64
    batch = {n: x[1:] for n, x in batch.items()}
    warn_dense_weights.cache_clear()
    with torch.no_grad(), pytest.warns(UserWarning, match="stores the weights of all pairs"):
        wanted, found = (
            getattr(each(**batch, output_attentions=True), "encoder_attentions" if name == "whisper" else "attentions")
            for each in (model, small)
        )
    for one, two in zip(wanted, found, strict=True):  # (B,H,N,N)
        torch.testing.assert_close(two, one[:, : two.shape[1]], rtol=0, atol=2e-7)  # a softmax in float32
    model.set_attn_implementation(IMPLEMENTATION)  # as merging calls it: with the mask as (B,N)
    with torch.no_grad():
        for one, layer in zip(wanted, layers_of(model), strict=True):
            dense = attention(layer.read(), layer.sample(model, batch)).transpose(0, 1)
            torch.testing.assert_close(dense, one, rtol=0, atol=2e-7)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_static_cache_takes_prompts_in_parts(name: str) -> None:
    """Logits of a prompt in two parts and of single tokens are those without a cache; the cache is of fixed shape."""
    model, batch = family_model(name)
    small: Any = merge_heads(model, [batch])[0]
    cache = MixtureStaticCache(small.config, 20)
    found, start = [], 0
    for stop in (5, 9, 10, 11, 12):
        part = batch["input_ids"][:, start:stop]
        mask = batch["attention_mask"][:, :stop]
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, start:]
        with torch.no_grad():
            found.append(small(part, attention_mask=mask, past_key_values=cache, position_ids=positions).logits)
        start = stop
    positions = (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)
    expected = small(**batch, position_ids=positions, use_cache=False).logits
    real = batch["attention_mask"].bool()
    torch.testing.assert_close(torch.cat(found, 1)[real], expected[real], **EXACT)
    layer: Any = cache.layers[-1]
    assert layer.keys.shape[1] == 2 * layer.values.shape[1]
    assert layer.keys.shape[2] == layer.values.shape[2] == 20
