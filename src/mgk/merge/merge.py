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

from mgk.merge.baselines import drop, pool
from mgk.merge.calibration import Projections
from mgk.merge.foreign import mixture_class
from mgk.merge.heads import merge
from mgk.merge.layers import is_own, layers_of
from mgk.ops import arguments as check

METHODS = ("merge", "drop", "pool")
KEY_SCALE = 0.25  # for mgk's own models: |k|^2 in the Gaussian is 1/16 of its size, and queries still train well
Batch = dict[str, Any]


@dataclass(frozen=True)
class MergeReport:
    """The sizes of a model before and after merging, and which heads were merged."""

    method: str
    heads: tuple[int, int]
    """Query heads of a layer, before and after."""
    key_value_heads: tuple[int, int]
    """Value heads of a layer, before and after; a merged one has two key heads."""
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

    Models of the families in `mgk.merge.families` become models of the same kind whose attention is a mixture of dot
    products. Softmax models of mgk become MGK models. In grouped-query models, groups are paired; with an odd number of
    key heads (multi-query models), query heads are paired within their groups, and the number of key heads stays.

    Args:
        model: a model with softmax attention, with an even number of key heads or of query heads per key head.
        batches: calibration text, as arguments of the model by name. Merging computes dense attention matrices of it:
            a few thousand tokens in windows of a few hundred are enough.
        method: "merge", or one of two baselines: "drop" removes every second head, and "pool" keeps the query heads
            and replaces every two key and value heads by their mean (conversion to grouped queries).
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
    sizes = _sizes(before[0], method)
    small = _half_model(model, sizes)
    merged = []
    for heads, layer in zip(before, layers_of(small), strict=True):
        if method == "merge":
            samples = [layer.sample(small, batch) for batch in batches]
            merged.append(merge(heads, samples, gaussian=key_scale if is_own(model) else 0.0))
        else:
            merged.append(drop(heads) if method == "drop" else pool(heads))
        layer.write(merged[-1])
    width, count = sum(heads.key.shape[-1] for heads in before), len(before[0].key)
    return small, MergeReport(
        method=method,
        heads=(len(before[0].query), sizes[0]),
        key_value_heads=(count, sizes[1]),
        parameters=(model.num_parameters(), small.num_parameters()),
        cache=(2 * count * width, sizes[1] * (sizes[2] + 1) * width),
        pairs=[each.pairs for each in merged],
        affinity=[each.affinity for each in merged],
    )


def _sizes(heads: Projections, method: str) -> tuple[int, int, int]:
    """Return the numbers of query heads, value heads and components of the smaller model."""
    queries, keys = len(heads.query), len(heads.key)
    if keys % 2 and (method == "pool" or heads.groups % 2):
        wanted = "an even number of key heads" + ("" if method == "pool" else " or of query heads per key head")
        raise ValueError(f"model: expected {wanted} to pair them, got {queries} query heads and {keys} key heads")
    fewer = keys if keys % 2 else keys // 2
    return queries if method == "pool" else queries // 2, fewer, 2 if method == "merge" else 1


def _half_model(model: PreTrainedModel, sizes: tuple[int, int, int]) -> PreTrainedModel:
    """Build the model with fewer heads; all weights but those of the heads, which have other shapes, are copied."""
    config: Any
    heads, key_value_heads, components = sizes
    if is_own(model):
        kind, config = type(model), copy.deepcopy(model.config)
        config.head_dim = config.head_dim or config.width // config.heads
        config.num_kv_heads = None if key_value_heads == heads else key_value_heads
        config.attention, config.heads = "mgk" if components == 2 else "softmax", heads
        config.components, config.e_step, config.prior = 2, "soft", "sgd"
    else:
        kind, given = mixture_class(model), model.config.to_dict()
        for name in ("model_type", "architectures", "transformers_version"):
            given.pop(name, None)
        config_class: Any = kind.config_class
        config = config_class(
            **given,
            mixture_heads=heads,
            mixture_key_value_heads=key_value_heads,
            mixture_components=components,
        )
    small: Any = kind(config).to(device=model.device, dtype=model.dtype)  # type: ignore[arg-type, call-arg]
    if model.can_generate():
        small.generation_config = copy.deepcopy(model.generation_config)
    target = small.state_dict()
    for name, value in model.state_dict().items():
        if name in target and target[name].shape == value.shape:
            target[name].copy_(value)
    for old, new in zip(layers_of(model), layers_of(small), strict=True):  # the name of this bias may have changed
        of_old, of_new = old.weights()[3][1], new.weights()[3][1]
        if of_old is not None and of_new is not None:
            of_new.copy_(of_old)
    return small.train(model.training)  # type: ignore[no-any-return]
