"""Half the heads for a trained softmax model: every two most similar heads become one mixture-key head.

>>> smaller, report = mgk.hf.merge_heads(model, batches)
>>> mgk.merge.finetune(smaller, training_batches, steps=100)

The mathematics is in `mgk.merge.heads`. Layers are merged first to last, each on what the layers before it, already
merged, make of the calibration text.

B batch, N positions, E width of the model, H heads, D width of a head.
"""
# mypy: disallow-untyped-calls=False, disallow-untyped-decorators=False
# Transformers is typed in part.

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import PreTrainedModel

from mgk.hf.config import MGKConfig
from mgk.hf.models import MGKPreTrainedModel
from mgk.merge.foreign import Layer, layers_of, mixture_class
from mgk.merge.heads import Mixture, Projections, Sample, merge
from mgk.nn import MixtureAttention
from mgk.ops import arguments as check

METHODS = ("merge", "drop")
KEY_SCALE = 0.25  # of mgk's own models: the Gaussian's |k|^2 is 1/16 of what it was, and queries train as before
Batch = dict[str, Any]


@dataclass(frozen=True)
class MergeReport:
    """What merging did to a model."""

    method: str
    heads: tuple[int, int]
    """Of a layer, before and after."""
    parameters: tuple[int, int]
    cache: tuple[int, int]
    """Numbers that a decoder keeps per token: keys and values of all layers."""
    pairs: list[list[tuple[int, int]]]
    """For each layer, which two heads each merged head was."""
    affinity: list[float]
    """For each layer, the mean over its pairs of sum_j sqrt(A_a A_b): 1 for heads that are the same."""


@torch.no_grad()
def merge_heads(
    model: PreTrainedModel, batches: Iterable[Batch], *, method: str = "merge", key_scale: float = KEY_SCALE
) -> tuple[PreTrainedModel, MergeReport]:
    """A new model with half the heads; `model` stays as it is.

    GPT-2, Llama, Mistral, Qwen2, BERT, RoBERTa and ViT models become models of the same kind whose attention is a
    mixture of dot products; softmax models of mgk become MGK. In grouped-query models whole groups are paired.

    Args:
        model: with softmax attention, and an even number of key heads.
        batches: arguments of the model, by name: a calibration text. Its attention is made dense, so a few thousand
            tokens in windows of a few hundred will do.
        method: "merge", or "drop", which leaves out every second head: the baseline.
        key_scale: for models of mgk. MGK subtracts |k|^2 from the scores, which softmax does not; keys are scaled by
            this number and queries by its inverse, which leaves q.k alone and |k|^2 small. The smaller, the nearer to
            the softmax model, and the more unequal keys and queries are for fine-tuning.
    """
    check.check_choice("method", method, METHODS)
    if not 0 < key_scale <= 1:
        raise ValueError(f"key_scale: expected above 0 and at most 1, got {key_scale}")
    batches = list(batches)
    if not batches:
        raise ValueError("batches: expected at least one, got none")
    own = isinstance(model, MGKPreTrainedModel)
    before = [layer.read() for layer in _layers(model)]
    if any(len(heads.key) % 2 for heads in before):
        raise ValueError(f"model: expected an even number of key heads to pair them, got {len(before[0].key)}")
    small = _smaller_own(model, method) if own else _smaller_foreign(model, before[0], method)
    pairs, affinity = [], []
    for heads, layer in zip(before, _layers(small), strict=True):
        if method == "drop":
            merged = _dropped(heads)
        else:
            samples = [layer.sample(small, batch) for batch in batches]
            merged = merge(heads, samples, gaussian=key_scale if own else 0.0)
        layer.write(merged)
        pairs.append(merged.pairs)
        affinity.append(merged.affinity)
    sizes = [sum(p.numel() for p in each.parameters()) for each in (model, small)]
    count, components = len(before[0].query), 2 if method == "merge" else 1
    cached = [len(heads.key) * heads.key.shape[-1] for heads in before]
    return small, MergeReport(
        method,
        (count, count // 2),
        (sizes[0], sizes[1]),
        (2 * sum(cached), sum(cached) * (components + 1) // 2),
        pairs,
        affinity,
    )


class _Stop(Exception):  # noqa: N818
    """The layer has been reached: what comes after it need not be computed."""


class _Foreign:
    """An attention layer of Transformers, as the mathematics sees it."""

    def __init__(self, layer: Layer) -> None:
        self.layer = layer

    def read(self) -> Projections:
        width = self.layer.head_dim
        *inner, (output, _) = self.layer.weights()
        query, key, value = (_heads(weight, bias, width) for weight, bias in inner)
        biased = tuple(bias is not None for _, bias in inner)
        outer = output.detach().double().cpu().unflatten(0, (-1, width))
        return Projections(query, key, value, outer, self.layer.scale, biased)  # type: ignore[arg-type]

    def write(self, merged: Mixture) -> None:
        outer = (merged.output.flatten(0, 1), None)  # the bias of the output stays
        self.layer.set(
            [*(_matrix(x) for x in (merged.query, merged.key.flatten(0, 1), merged.value)), outer], merged.log_prior
        )

    def sample(self, model: PreTrainedModel, batch: Batch) -> Sample:
        args, kwargs = _inputs(model, self.layer.module, batch)
        x = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        mask = kwargs.get("attention_mask")
        rotation = kwargs.get("position_embeddings")
        return _sample(x, mask, bool(self.layer.core.is_causal), rotation)


class _Own:
    """A `MixtureAttention`: softmax before, MGK after."""

    def __init__(self, module: MixtureAttention) -> None:
        self.module = module

    def read(self) -> Projections:
        m = self.module
        if m.variant != "softmax":
            raise ValueError(f"model: expected attention 'softmax', got {m.variant!r}")
        biased = m.query_proj.bias is not None
        parts = [_heads(p.weight.mT, p.bias, m.head_dim) for p in (m.query_proj, m.key_proj, m.value_proj)]
        output = m.out_proj.weight.mT.detach().double().cpu().unflatten(0, (-1, m.head_dim))
        return Projections(parts[0], parts[1], parts[2], output, m.head_dim**-0.5, (biased,) * 3)

    def write(self, merged: Mixture) -> None:
        m = self.module
        for linear, value in (
            (m.query_proj, merged.query), (m.key_proj, merged.key.flatten(0, 1)), (m.value_proj, merged.value),
        ):  # fmt: skip
            weight, bias = _matrix(value)
            linear.weight.copy_(weight.mT)
            if linear.bias is not None:
                linear.bias.copy_(bias)
        m.out_proj.weight.copy_(merged.output.flatten(0, 1).mT)
        if m.log_prior is not None:
            m.log_prior.copy_(merged.log_prior)

    def sample(self, model: PreTrainedModel, batch: Batch) -> Sample:
        args, kwargs = _inputs(model, self.module, batch)
        padding, rotary = kwargs.get("key_padding_mask"), kwargs.get("rotary")
        rotation = None
        if rotary is not None:  # its sines have the sign of the half that they multiply
            rotation = (rotary.cos, torch.cat((rotary.sin.chunk(2, -1)[1],) * 2, -1))
        return _sample(args[0], None if padding is None else ~padding, self.module.causal, rotation)


def _inputs(model: PreTrainedModel, module: nn.Module, batch: Batch) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What a module is called with when the model reads a batch."""
    found: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def stop(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found.append((args, kwargs))
        raise _Stop

    handle = module.register_forward_pre_hook(stop, with_kwargs=True)
    training = model.training
    try:
        model.eval()
        model(**{name: value.to(model.device) for name, value in batch.items() if "labels" not in name})
    except _Stop:
        pass
    finally:
        handle.remove()
        model.train(training)
    return found[0]


def _sample(x: Tensor, mask: Tensor | None, causal: bool, rotation: tuple[Tensor, Tensor] | None) -> Sample:
    batch, length, _ = x.shape
    x = pad(x.detach().double().cpu(), (0, 1), value=1.0)
    real = torch.ones(batch, length, dtype=torch.bool) if mask is None else mask.bool().cpu()
    visible = real[:, None].expand(-1, length, -1)
    if causal:
        visible = visible & torch.ones(length, length, dtype=torch.bool).tril()
    if rotation is not None:
        cos, sin = (part.detach().double().cpu() for part in rotation)
        rotation = (cos, sin)
    return Sample(x, visible, real, rotation)


def _heads(weight: Tensor, bias: Tensor | None, width: int) -> Tensor:
    """(H,F,D) of a weight (E,H*D) and a bias."""
    row = weight.new_zeros(weight.shape[1]) if bias is None else bias
    whole = torch.cat((weight, row[None])).detach().double().cpu()
    return whole.view(len(whole), -1, width).transpose(0, 1)


def _matrix(heads: Tensor) -> tuple[Tensor, Tensor]:
    """The way back: weight (E,H*D) and bias."""
    whole = heads.transpose(0, 1).flatten(1)
    return whole[:-1], whole[-1]


def _dropped(heads: Projections) -> Mixture:
    """Every second key head, with the query heads that use it."""
    kept = torch.arange(0, len(heads.key), 2)
    queries = torch.arange(len(heads.query)).unflatten(0, (-1, heads.groups))[kept].flatten()
    return Mixture(
        heads.query[queries],
        heads.key[kept][:, None],
        heads.value[kept],
        heads.output[queries],
        torch.zeros(len(queries), 1, dtype=torch.float64),
        [],
        0.0,
    )


def _smaller_foreign(model: PreTrainedModel, heads: Projections, method: str) -> PreTrainedModel:
    kind = mixture_class(model)
    given = model.config.to_dict()
    for name in ("model_type", "architectures", "transformers_version"):
        given.pop(name, None)
    config_class: Any = kind.config_class
    config = config_class(
        **given,
        mixture_heads=len(heads.query) // 2,
        mixture_key_value_heads=len(heads.key) // 2,
        mixture_components=2 if method == "merge" else 1,
    )
    small: Any = kind(config).to(device=model.device, dtype=model.dtype)  # type: ignore[call-arg]
    _copy_rest(model, small)
    return small.train(model.training)  # type: ignore[no-any-return]


def _smaller_own(model: Any, method: str) -> PreTrainedModel:
    c = model.config.to_model()
    settings = dataclasses.replace(
        c,
        attention="mgk" if method == "merge" else "softmax",
        heads=c.heads // 2,
        head_dim=c.head_dim or c.width // c.heads,
        components=2,
        e_step="soft",
        prior="sgd",
    )
    kept = ("pad_token_id", "bos_token_id", "eos_token_id", "problem_type")
    others = {name: getattr(model.config, name) for name in kept}
    small = type(model)(MGKConfig.from_model(settings, **others)).to(device=model.device, dtype=model.dtype)
    small.config.id2label, small.config.label2id = copy.copy(model.config.id2label), copy.copy(model.config.label2id)
    _copy_rest(model, small)
    return small.train(model.training)  # type: ignore[no-any-return]


def _copy_rest(model: PreTrainedModel, small: PreTrainedModel) -> None:
    """How it generates, and everything that has the same name and shape in both: all but the heads' projections."""
    if model.can_generate():
        small.generation_config = copy.deepcopy(model.generation_config)
    target = small.state_dict()
    for name, value in model.state_dict().items():
        if name in target and target[name].shape == value.shape:
            target[name].copy_(value)


def _layers(model: PreTrainedModel) -> Sequence[_Own | _Foreign]:
    if isinstance(model, MGKPreTrainedModel):
        return [_Own(module) for module in model.modules() if isinstance(module, MixtureAttention)]
    return [_Foreign(layer) for layer in layers_of(model)]
