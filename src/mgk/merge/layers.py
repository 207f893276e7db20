"""Attention layers as head merging reads and writes them: those of mgk, and those of Transformers models.

B batch, N positions, E width of the model, F = E + 1 with the bias, H heads, D width of a head.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from mgk.merge.heads import Mixture, Projections, Sample
from mgk.nn import MixtureAttention

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
REFUSED = {"q_norm": "normalised queries", "sinks": "attention sinks"}
Weights = list[tuple[Tensor, Tensor | None]]
Inputs = tuple[Tensor, Tensor | None, tuple[Tensor, Tensor] | None]


class Layer:
    """An attention layer: a module with query, key, value and output projections, and a prior once it is a mixture."""

    module: Any
    head_dim: int
    scale: float
    causal: bool
    log_prior: Tensor | None

    def weights(self) -> Weights:
        """Return the weight (in,out) and the bias of the query, key, value and output projections, as views."""
        raise NotImplementedError

    def inputs(self, args: Any, kwargs: dict[str, Any]) -> Inputs:
        """Return the input (B,N,E), the mask (B,N) of real positions and the rotation from a call of the module."""
        raise NotImplementedError

    def read(self) -> Projections:
        """Return the heads of the layer in float64."""
        *inner, (output, _) = self.weights()
        query, key, value = (_heads(weight, bias, self.head_dim) for weight, bias in inner)
        biased: Any = tuple(bias is not None for _, bias in inner)
        outer = output.detach().double().cpu().unflatten(0, (-1, self.head_dim))
        return Projections(query, key, value, outer, self.scale, biased)

    def write(self, merged: Mixture) -> None:
        """Set the projections and the prior to those of merged heads; the bias of the output stays."""
        heads = (merged.query, merged.key.flatten(0, 1), merged.value)
        matrices = [x.transpose(0, 1).flatten(1) for x in heads]  # (F,H*D)
        values: Weights = [*((x[:-1], x[-1]) for x in matrices), (merged.output.flatten(0, 1), None)]
        for (weight, bias), (new, new_bias) in zip(self.weights(), values, strict=True):
            weight.copy_(new)
            if bias is not None and new_bias is not None:
                bias.copy_(new_bias)
        if self.log_prior is not None:
            self.log_prior.copy_(merged.log_prior)

    def sample(self, model: PreTrainedModel, batch: dict[str, Any]) -> Sample:
        """Return the inputs of the layer when the model reads a batch."""
        x, mask, rotation = self.inputs(*_call(model, self.module, batch))
        size, length, _ = x.shape
        real = torch.ones(size, length, dtype=torch.bool) if mask is None else mask.bool().cpu()
        visible = real[:, None].expand(-1, length, -1)
        if self.causal:
            visible = visible & torch.ones(length, length, dtype=torch.bool).tril()
        if rotation is not None:
            rotation = (rotation[0].detach().double().cpu(), rotation[1].detach().double().cpu())
        return Sample(pad(x.detach().double().cpu(), (0, 1), value=1.0), visible, real, rotation)


class OwnLayer(Layer):
    """A `MixtureAttention`: softmax before merging, MGK after."""

    def __init__(self, module: MixtureAttention) -> None:
        self.module, self.head_dim, self.causal = module, module.head_dim, module.causal
        self.scale, self.log_prior = module.head_dim**-0.5, module.log_prior

    def weights(self) -> Weights:
        m = self.module
        return [(p.weight.mT, p.bias) for p in (m.query_proj, m.key_proj, m.value_proj, m.out_proj)]

    def inputs(self, args: Any, kwargs: dict[str, Any]) -> Inputs:
        padding, rotary = kwargs.get("key_padding_mask"), kwargs.get("rotary")
        rotation = None
        if rotary is not None:  # the sines carry the sign of the half that they multiply
            rotation = (rotary.cos, torch.cat((rotary.sin.chunk(2, -1)[1],) * 2, -1))
        return args[0], None if padding is None else ~padding, rotation

    def read(self) -> Projections:
        if self.module.variant != "softmax":
            raise ValueError(f"model: expected attention 'softmax', got {self.module.variant!r}")
        if self.module.qk_norm:
            raise ValueError(f"model: expected attention without {REFUSED['q_norm']}, got qk_norm=True")
        if self.module.num_kv_heads != self.module.num_heads:
            raise ValueError(
                f"model: expected num_kv_heads = num_heads = {self.module.num_heads}, got {self.module.num_kv_heads}"
            )
        return super().read()


class TransformersLayer(Layer):
    """An attention layer of a Transformers model, whatever its projections are called."""

    core: Any

    def __init__(self, module: Any) -> None:
        self.module = module
        self.fused = hasattr(module, "c_attn")  # GPT-2: query, key and value are one matrix
        self.split = hasattr(module, "self")  # BERT: the output projection is in a module of its own
        self.core = module.self if self.split else module
        kind = type(self.core).__name__
        for name, what in REFUSED.items():
            if getattr(self.core, name, None) is not None:
                raise ValueError(f"model: expected attention without {what}, got {kind}")
        settings = getattr(self.core, "config", None)  # the window is in the layer or in its configuration
        if getattr(self.core, "sliding_window", getattr(settings, "sliding_window", None)) is not None:
            raise ValueError(f"model: expected attention without a sliding window, got {kind}")
        self.head_dim = int(self.core.attention_head_size if self.split else self.core.head_dim)
        self.scale, self.causal = float(self.core.scaling), bool(self.core.is_causal)
        self.log_prior = getattr(self.core, "mixture_log_prior", None)

    def weights(self) -> Weights:
        if self.fused:
            sizes = self.core.split_size
            sizes = sizes if isinstance(sizes, list) else [sizes] * 3
            parts = zip(self.core.c_attn.weight.split(sizes, 1), self.core.c_attn.bias.split(sizes), strict=True)
            return [*parts, (self.core.c_proj.weight, self.core.c_proj.bias)]
        return [(linear.weight.mT, linear.bias) for linear in self._linears()]

    def inputs(self, args: Any, kwargs: dict[str, Any]) -> Inputs:
        given = (
            {**dict(zip(("hidden_states", "attention_mask"), args, strict=False)), **kwargs} if self.split else kwargs
        )
        x = given["hidden_states"] if "hidden_states" in given else args[0]
        return x, given.get("attention_mask"), given.get("position_embeddings")

    def resize(self, heads: int, key_value_heads: int, components: int) -> None:
        """Replace the projections by those of `heads` mixture heads, with arbitrary weights, and add a prior."""
        width = self.head_dim
        sizes = (heads * width, key_value_heads * components * width, key_value_heads * width)
        if self.fused:
            old, out = self.core.c_attn, self.core.c_proj
            self.core.c_attn, self.core.c_proj = Conv1D(sum(sizes), old.nx), Conv1D(out.nf, sizes[0])
            self.core.split_size, self.core.num_heads = list(sizes), heads
            for new, was in ((self.core.c_attn, old), (self.core.c_proj, out)):
                new.to(device=was.weight.device, dtype=was.weight.dtype)
        else:
            *inner, output = self._linears()
            shapes = [(linear.in_features, size) for linear, size in zip(inner, sizes, strict=True)]
            for linear, shape in zip((*inner, output), (*shapes, (sizes[0], output.out_features)), strict=True):
                weight = linear.weight
                fresh = nn.Linear(*shape, linear.bias is not None, device=weight.device, dtype=weight.dtype)
                linear.weight, linear.bias = fresh.weight, fresh.bias
                linear.in_features, linear.out_features = shape
        prior = self.weights()[0][0].new_full((heads, components), -math.log(components))
        self.core.mixture_log_prior = nn.Parameter(prior)

    def _linears(self) -> list[nn.Linear]:
        if self.split:
            return [self.core.query, self.core.key, self.core.value, self.module.output.dense]
        return [getattr(self.core, name) for name in PROJECTIONS]


def is_own(model: nn.Module) -> bool:
    """Whether a model has the attention of mgk."""
    return any(isinstance(module, MixtureAttention) for module in model.modules())


def layers_of(model: nn.Module) -> Sequence[Layer]:
    """Return the self-attention layers of a model, first to last."""
    if is_own(model):
        return [OwnLayer(module) for module in model.modules() if isinstance(module, MixtureAttention)]
    return transformers_layers(model)


def transformers_layers(model: nn.Module) -> list[TransformersLayer]:
    """Return the self-attention layers of a Transformers model, first to last."""
    found = []
    for module in model.modules():
        bert = hasattr(module, "self") and hasattr(module.self, "query") and hasattr(module, "output")
        gpt = hasattr(module, "c_attn") and not getattr(module, "is_cross_attention", False)
        if bert or gpt or all(hasattr(module, name) for name in PROJECTIONS):
            found.append(TransformersLayer(module))
    if not found:
        families = "GPT2, Llama, Mistral, Qwen2, Bert, Roberta, ViT"
        raise ValueError(f"model: expected one with attention like that of {families}, got {type(model).__name__}")
    return found


class _Stop(Exception):  # noqa: N818
    """The layer was reached; the rest of the model need not be computed."""


def _call(model: PreTrainedModel, module: nn.Module, batch: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments with which a module is called when the model reads a batch."""
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


def _heads(weight: Tensor, bias: Tensor | None, width: int) -> Tensor:
    """Convert a weight (E,H*D) and a bias to heads (H,F,D) in float64."""
    row = weight.new_zeros(weight.shape[1]) if bias is None else bias
    matrix = torch.cat((weight, row[None])).detach().double().cpu()
    return matrix.view(len(matrix), -1, width).transpose(0, 1)
