"""Halve the heads of a trained softmax model: the two most similar heads become one mixture-key head.

>>> smaller, report = mgk.merge.merge_heads(model, batches)
>>> mgk.merge.finetune(smaller, training_batches, steps=100)

The mathematics is in `mgk.merge.heads`. Layers are merged first to last; each is fitted to the inputs that it gets from
the layers merged before it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from mgk.merge.foreign import mixture_class
from mgk.merge.heads import Mixture, Projections, merge
from mgk.merge.layers import is_own, layers_of
from mgk.ops import arguments as check

METHODS = ("merge", "drop")
KEY_SCALE = 0.25  # for mgk's own models: |k|^2 in the Gaussian is 1/16 of its size, and queries still train well
Batch = dict[str, Any]


@dataclass(frozen=True)
class MergeReport:
    """The sizes of a model before and after merging, and which heads were merged."""

    method: str
    heads: tuple[int, int]
    """Heads of a layer, before and after."""
    parameters: tuple[int, int]
    cache: tuple[int, int]
    """Numbers that a decoder caches per token: keys and values of all layers."""
    pairs: list[list[tuple[int, int]]]
    """For each layer, the two heads that each merged head replaces."""
    affinity: list[float]
    """For each layer, the mean over its pairs of sum_j sqrt(A_a A_b): 1 for equal heads."""


@torch.no_grad()
def merge_heads(
    model: PreTrainedModel, batches: Iterable[Batch], *, method: str = "merge", key_scale: float = KEY_SCALE
) -> tuple[PreTrainedModel, MergeReport]:
    """Return a new model with half the heads, and a report; `model` is not changed.

    GPT-2, Llama, Mistral, Qwen2, BERT, RoBERTa and ViT models become models of the same kind whose attention is a
    mixture of dot products. Softmax models of mgk become MGK models. In grouped-query models, groups are paired.

    Args:
        model: a model with softmax attention and an even number of key heads.
        batches: calibration text, as arguments of the model by name. Merging computes dense attention matrices of it:
            a few thousand tokens in windows of a few hundred are enough.
        method: "merge", or "drop", a baseline that removes every second head.
        key_scale: for models of mgk. MGK subtracts |k|^2 from the scores, which softmax does not. Keys are multiplied
            by this number and queries divided by it, which keeps q.k and makes |k|^2 small. A smaller number is closer
            to the softmax model, but makes the sizes of keys and queries more unequal for fine-tuning.
    """
    check.check_choice("method", method, METHODS)
    if not 0 < key_scale <= 1:
        raise ValueError(f"key_scale: expected above 0 and at most 1, got {key_scale}")
    batches = list(batches)
    if not batches:
        raise ValueError("batches: expected at least one, got none")
    before = [layer.read() for layer in layers_of(model)]
    if any(len(heads.key) % 2 for heads in before):
        raise ValueError(f"model: expected an even number of key heads to pair them, got {len(before[0].key)}")
    components = 2 if method == "merge" else 1
    small = _half_model(model, before[0], components)
    merged = []
    for heads, layer in zip(before, layers_of(small), strict=True):
        if method == "drop":
            merged.append(_drop(heads))
        else:
            samples = [layer.sample(small, batch) for batch in batches]
            merged.append(merge(heads, samples, gaussian=key_scale if is_own(model) else 0.0))
        layer.write(merged[-1])
    count, cached = len(before[0].query), sum(len(heads.key) * heads.key.shape[-1] for heads in before)
    return small, MergeReport(
        method=method,
        heads=(count, count // 2),
        parameters=(model.num_parameters(), small.num_parameters()),
        cache=(2 * cached, cached * (components + 1) // 2),
        pairs=[each.pairs for each in merged],
        affinity=[each.affinity for each in merged],
    )


def _drop(heads: Projections) -> Mixture:
    """Keep every second key head, with the query heads that use it."""
    kept = torch.arange(0, len(heads.key), 2)
    queries = torch.arange(len(heads.query)).unflatten(0, (-1, heads.groups))[kept].flatten()
    prior = torch.zeros(len(queries), 1, dtype=torch.float64)
    query, output = heads.query[queries], heads.output[queries]
    return Mixture(query, heads.key[kept][:, None], heads.value[kept], output, prior, pairs=[], affinity=0.0)


def _half_model(model: PreTrainedModel, heads: Projections, components: int) -> PreTrainedModel:
    """Build the model with half the heads; all weights but those of the heads, which have other shapes, are copied."""
    config: Any
    if is_own(model):
        kind, config = type(model), copy.deepcopy(model.config)
        config.head_dim = config.head_dim or config.width // config.heads
        config.attention, config.heads = "mgk" if components == 2 else "softmax", config.heads // 2
        config.components, config.e_step, config.prior = 2, "soft", "sgd"
    else:
        kind, given = mixture_class(model), model.config.to_dict()
        for name in ("model_type", "architectures", "transformers_version"):
            given.pop(name, None)
        config_class: Any = kind.config_class
        config = config_class(
            **given,
            mixture_heads=len(heads.query) // 2,
            mixture_key_value_heads=len(heads.key) // 2,
            mixture_components=components,
        )
    small: Any = kind(config).to(device=model.device, dtype=model.dtype)  # type: ignore[arg-type, call-arg]
    if model.can_generate():
        small.generation_config = copy.deepcopy(model.generation_config)
    target = small.state_dict()
    for name, value in model.state_dict().items():
        if name in target and target[name].shape == value.shape:
            target[name].copy_(value)
    return small.train(model.training)  # type: ignore[no-any-return]
