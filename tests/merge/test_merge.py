"""Head merging is exact for equal heads, and better than dropping heads for others."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    BloomConfig,
    BloomModel,
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5Model,
)

from mgk.merge import finetune, mean_loss, merge_heads, tuning
from mgk.merge.pairs import pair_groups
from tests.hf.common import foreign, inputs, make
from tests.merge.families import logits, twin
from tests.models.common import MODERN

OWN: dict[str, dict[str, Any]] = {
    "language": {"cutoffs": ()},
    "rotary": {"positions": "rotary", "norm": "pre", "cutoffs": ()},
    "modern": MODERN,
    "without-qk-norm": MODERN | {"qk_norm": False},
    "grouped": {"positions": "rotary", "norm": "pre", "cutoffs": (), "num_kv_heads": 2},
    "multi-query": {"cutoffs": (), "num_kv_heads": 1, "window": 4},
    "classifier": {},
    "vision": {},
}


def own(name: str, **options: Any) -> tuple[Any, dict[str, Tensor]]:
    """A softmax model of mgk in float64 with four heads, and its inputs."""
    kind = name if name in ("classifier", "vision") else "language"
    model = make(kind, "softmax", heads=4, **OWN[name], **options).double()
    batch = inputs(kind, 4)
    return model, {n: x.double() if x.is_floating_point() else x for n, x in batch.items() if n != "labels"}


@pytest.mark.parametrize("name", OWN)
def test_merging_equal_heads_into_gaussians_is_exact_for_small_keys(name: str) -> None:
    """The Gaussian's |k|^2 term, and so the error, falls with the square of the key scale."""
    model, batch = own(name)
    twin(model)
    expected = logits(model, batch)
    coarse, fine, finest = (
        float((logits(merge_heads(model, [batch], key_scale=scale)[0], batch) - expected).abs().max())
        for scale in (1e-1, 1e-2, 1e-5)
    )
    assert 80 < coarse / fine < 125
    assert finest < 1e-6  # logits of mgk's language models are float32
    assert merge_heads(model, [batch])[0].config.attention == "mgk"


@pytest.mark.parametrize("name", OWN)
def test_merging_is_more_accurate_than_dropping(name: str) -> None:
    model, batch = own(name)
    expected = logits(model, batch)
    near, far = (
        (logits(merge_heads(model, [batch], method=method)[0], batch) - expected).square().mean()
        for method in ("merge", "drop")
    )
    assert near < far


@pytest.mark.parametrize("name", ["gpt2", "llama-grouped", "language"])
def test_the_report_counts_parameters_and_cache(name: str) -> None:
    model, batch = own(name) if name in OWN else foreign(name)
    before = {n: x.clone() for n, x in model.state_dict().items()}
    small, report = merge_heads(model, [batch])
    assert all(torch.equal(before[n], x) for n, x in model.state_dict().items())  # the original model is not changed
    assert report.parameters == tuple(sum(p.numel() for p in m.parameters()) for m in (model, small))
    assert report.parameters[1] < report.parameters[0]
    with torch.no_grad():
        caches = [m(**batch, use_cache=True).past_key_values for m in (model, small)]
    tokens = batch["input_ids"].numel()
    if name == "language":
        held = [cache.bytes // 8 for cache in caches]
    else:
        held = [sum(layer.keys.numel() + layer.values.numel() for layer in cache.layers) for cache in caches]
    assert [count // tokens for count in held] == list(report.cache)
    assert report.cache[1] * 4 == report.cache[0] * 3


@pytest.mark.parametrize("name", ["llama", "language"])
def test_a_merged_model_keeps_its_generation_config(name: str) -> None:
    model, batch = own(name) if name in OWN else foreign(name)
    model.generation_config.update(eos_token_id=[2, 7], do_sample=True, temperature=0.6)
    small: Any = merge_heads(model, [batch])[0]
    assert small.generation_config.to_dict() == model.generation_config.to_dict()
    assert small.generation_config is not model.generation_config


def test_a_merged_classifier_keeps_its_problem_type() -> None:
    model, batch = own("classifier")
    model.config.problem_type = "multi_label_classification"
    assert merge_heads(model, [batch])[0].config.problem_type == "multi_label_classification"


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_unsupported_features_of_a_merged_model_are_errors(name: str) -> None:
    """Packed texts, offloaded static caches and other attention implementations."""
    model, batch = foreign(name)
    small: Any = merge_heads(model, [batch])[0]
    tokens, packed = batch["input_ids"][1:2, :9], torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3]])
    small(tokens, position_ids=torch.arange(9)[None], use_cache=False)
    with pytest.raises(ValueError, match="position_ids: expected one text per row, counted up by 1, got several"):
        small(tokens, position_ids=packed, use_cache=False)
    with pytest.raises(
        ValueError, match="cache_implementation: expected 'dynamic' or 'static', got 'offloaded_static'"
    ):
        small.generate(**batch, max_new_tokens=2, cache_implementation="offloaded_static")
    with pytest.raises(ValueError, match="attn_implementation: expected 'mgk_mixture', got 'sdpa'"):
        small.set_attn_implementation("sdpa")
    small.set_attn_implementation("mgk_mixture")


def test_fine_tuning_lowers_the_loss_of_a_merged_model() -> None:
    model, batch = foreign("gpt2")
    batches = [batch | {"labels": batch["input_ids"]}]
    small, _ = merge_heads(model, [batch])
    before = mean_loss(small, batches)
    seen: list[int] = []
    losses = finetune(small, batches, steps=6, lr=1e-2, shown=lambda step, _: seen.append(step))
    assert len(losses) == 6
    assert seen == [1, 2, 3, 4, 5, 6]
    assert mean_loss(small, batches) < before
    with pytest.raises(ValueError, match="batches: expected a list, or as many as steps"):
        finetune(small, iter(batches), steps=2)


def test_fine_tuning_in_low_precision_sees_its_own_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Autocast caches the weights in bfloat16: one context around all steps would use those of the first step."""
    model, batch = foreign("llama-grouped")
    model = model.float()
    batches = [batch | {"labels": batch["input_ids"]}]
    expected = finetune(copy.deepcopy(model), batches, steps=6, lr=1e-2)
    monkeypatch.setattr(tuning, "autocast", lambda _: torch.autocast("cpu", torch.bfloat16))
    got = finetune(model, batches, steps=6, lr=1e-2)
    assert expected[0] - expected[-1] > 0.5
    torch.testing.assert_close(torch.tensor(got), torch.tensor(expected), rtol=2**-7, atol=0.0)


def test_fine_tuning_trains_the_priors() -> None:
    model, batch = foreign("llama-grouped")
    small, _ = merge_heads(model, [batch])
    before = {n: p.clone() for n, p in small.named_parameters() if n.endswith("mixture_log_prior")}
    finetune(small, [batch | {"labels": batch["input_ids"]}], steps=1)
    assert len(before) == 2
    assert not any(torch.equal(p, before[n]) for n, p in small.named_parameters() if n in before)


def test_the_best_partners_are_found() -> None:
    """Greedy pairing takes (0,1) and is left with (2,3); exchanging partners finds the better pairs."""
    affinity = torch.eye(4)
    for a, b, value in ((0, 1, 0.9), (2, 3, 0.0), (0, 2, 0.8), (1, 3, 0.8), (0, 3, 0.1), (1, 2, 0.1)):
        affinity[a, b] = affinity[b, a] = value
    assert [found[:2] for found in pair_groups(affinity, 1)] == [(0, 2), (1, 3)]


def test_query_heads_are_paired_within_groups() -> None:
    affinity = torch.zeros(4, 4)
    affinity[0, 3] = affinity[1, 2] = 1
    assert pair_groups(affinity, 2) == [(0, 1, [(0, 3), (1, 2)])]


def test_what_cannot_be_merged_is_an_error() -> None:
    model, batch = foreign("gpt2")
    with pytest.raises(ValueError, match="method: expected one of merge, drop, pool"):
        merge_heads(model, [batch], method="melt")
    with pytest.raises(ValueError, match="batches: expected at least one"):
        merge_heads(model, [])
    with pytest.raises(ValueError, match="key_scale"):
        merge_heads(model, [batch], key_scale=0)
    with pytest.raises(ValueError, match="expected attention 'softmax', got 'smgk'"):
        merge_heads(make("language"), [{"input_ids": batch["input_ids"]}])
    settings: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 30}
    single = LlamaForCausalLM(LlamaConfig(**settings | {"num_attention_heads": 1}, intermediate_size=8))
    with pytest.raises(
        ValueError, match=r"an even number of key heads or of query heads .* got 1 query heads and 1 key"
    ):
        merge_heads(single, [batch])
    multi = LlamaForCausalLM(LlamaConfig(**settings, num_key_value_heads=1, intermediate_size=8))
    with pytest.raises(ValueError, match="an even number of key heads to pair them, got 2 query heads and 1 key heads"):
        merge_heads(multi, [batch], method="pool")
    capped = Gemma2ForCausalLM(Gemma2Config(**settings, num_key_value_heads=2, intermediate_size=8, head_dim=8))
    with pytest.raises(
        ValueError, match=r"without soft-capped scores.*attn_logit_softcapping=None.*got Gemma2Attention"
    ):
        merge_heads(capped, [batch])
    other = T5Model(T5Config(d_model=16, d_ff=8, num_layers=1, num_heads=2, vocab_size=30, d_kv=8))
    with pytest.raises(ValueError, match=r"without a bias for each pair of positions, .*; got T5Attention"):
        merge_heads(other, [batch])
    sparse = BloomModel(BloomConfig(hidden_size=16, n_layer=1, n_head=2, vocab_size=30))
    with pytest.raises(ValueError, match=r"model: expected one with attention like that of GPT2.*, got BloomModel"):
        merge_heads(sparse, [batch])
