"""Attention layers as head merging reads and writes them: those of mgk, and those of Transformers models.

B batch, N positions, E width of the model, F = E + 1 with the bias, H heads, D width of a head.
"""

from __future__ import annotations

import inspect
import math
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from mgk.merge.attention import SplitAttention
from mgk.merge.calibration import Mixture, Norm, Projections, Sample
from mgk.merge.families import BY_ATTENTION, FAMILIES, REFUSED, Family
from mgk.nn import MixtureAttention

Weights = list[tuple[Tensor, Tensor | None]]
Inputs = tuple[Tensor, Tensor | None, tuple[Tensor, Tensor] | None]


class Layer:
    """An attention layer: a module with query, key, value and output projections, and a prior once it is a mixture."""

    module: Any
    head_dim: int
    scale: float
    causal: bool
    log_prior: Tensor | None
    window: int | None = None
    """A query sees the keys with |i - j| < window, of those up to its own if the layer is causal."""

    def weights(self) -> Weights:
        """Return weights and biases as views: of query, key and value (in,H,D) and (H,D), of the output (H,D,out)."""
        raise NotImplementedError

    def inputs(self, args: Any, kwargs: dict[str, Any]) -> Inputs:
        """Return the input (B,N,E), the mask (B,N) of real positions and the rotation from a call of the module."""
        raise NotImplementedError

    def norm(self) -> Norm | None:
        """Return the normalisation of queries and keys, or None."""
        return None

    def read(self) -> Projections:
        """Return the heads of the layer in float64."""
        *inner, (output, _) = self.weights()
        query, key, value = (_heads(weight, bias) for weight, bias in inner)
        biased: Any = tuple(bias is not None for _, bias in inner)
        return Projections(query, key, value, _double(output), self.scale, biased, self.norm())

    def write(self, merged: Mixture) -> None:
        """Set the projections and the prior to those of merged heads; the bias of the output stays."""
        heads = (merged.query, merged.key.flatten(0, 1), merged.value)
        values: Weights = [(x[:, :-1].transpose(0, 1), x[:, -1]) for x in heads]
        values.append((merged.output, None))
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
        if self.window is not None:
            near = torch.ones(length, length, dtype=torch.bool).tril(self.window - 1).triu(1 - self.window)
            visible = visible & near
        if rotation is not None:
            rotation = (_double(rotation[0]), _double(rotation[1]))
        return Sample(pad(_double(x), (0, 1), value=1.0), visible, real, rotation)


class OwnLayer(Layer):
    """A `MixtureAttention`: softmax before merging, MGK after."""

    def __init__(self, module: MixtureAttention) -> None:
        self.module, self.head_dim, self.causal = module, module.head_dim, module.causal
        self.scale, self.log_prior = module.head_dim**-0.5, module.log_prior
        self.window = module.window

    def weights(self) -> Weights:
        m = self.module
        return _views([m.query_proj, m.key_proj, m.value_proj, m.out_proj], self.head_dim)

    def norm(self) -> Norm | None:
        m = self.module
        if not m.qk_norm:
            return None
        query, key = _double(m.query_norm.weight), _double(m.key_norm.weight)
        keys = m.key_proj.out_features // m.head_dim
        return Norm(query.expand(m.num_heads, -1), key.expand(keys, -1), m.query_norm.eps, together=False)

    def write(self, merged: Mixture) -> None:
        super().write(merged)
        if merged.gains is not None:  # the same for all heads, scaled as keys and queries would be
            self.module.query_norm.weight.copy_(merged.gains[0][0])
            self.module.key_norm.weight.copy_(merged.gains[1][0, 0])

    def inputs(self, args: Any, kwargs: dict[str, Any]) -> Inputs:
        padding, rotary = kwargs.get("key_padding_mask"), kwargs.get("rotary")
        rotation = None
        if rotary is not None:  # the sines carry the sign of the half that they multiply
            rotation = (rotary.cos, torch.cat((rotary.sin.chunk(2, -1)[1],) * 2, -1))
        return args[0], None if padding is None else ~padding, rotation

    def read(self) -> Projections:
        if self.module.variant != "softmax":
            raise ValueError(f"model: expected attention 'softmax', got {self.module.variant!r}")
        return super().read()


class TransformersLayer(Layer):
    """A self-attention layer of a family of Transformers models."""

    def __init__(self, module: Any, family: Family) -> None:
        self.module, self.family = module, family
        self.rebuilt = isinstance(module, SplitAttention)
        self.core: Any = module.get_submodule(family.core)
        self.head_dim = int(module.head_dim if self.rebuilt else operator.attrgetter(family.width)(module))
        self.scale = float(getattr(self.core, "scaling", self.head_dim**-0.5))
        self.causal = bool(self.core.is_causal)
        settings = getattr(self.core, "config", None)  # the window is in the layer or in its configuration
        self.window = getattr(self.core, "sliding_window", getattr(settings, "sliding_window", None))
        self.log_prior = getattr(self.core, "mixture_log_prior", None)

    def weights(self) -> Weights:
        names = Family.names if self.rebuilt else self.family.names
        if names[0] != names[1]:
            return _views([self.module.get_submodule(name) for name in names], self.head_dim)
        joint, output = (self.module.get_submodule(name) for name in (names[0], names[3]))
        transposed = isinstance(joint, Conv1D)
        matrix, last = (m.weight if transposed else m.weight.mT for m in (joint, output))
        rows = [matrix] if joint.bias is None else [matrix, joint.bias]
        if self.family.interleaved:
            parts = [row.unflatten(-1, (-1, 3, self.head_dim)).unbind(-2) for row in rows]
        else:
            heads = [row.unflatten(-1, (-1, self.head_dim)) for row in rows]
            parts = [row.split(self._counts(row.shape[-2]), -2) for row in heads]
        biases = parts[1] if joint.bias is not None else (None,) * 3
        return [*zip(parts[0], biases, strict=True), (last.unflatten(0, (-1, self.head_dim)), output.bias)]

    def _counts(self, total: int) -> list[int]:
        """Return the numbers of query, key and value heads in a matrix of all of them."""
        sizes = getattr(self.core, "split_size", None)  # of GPT-2, resized below
        if isinstance(sizes, list):
            return [size // self.head_dim for size in sizes]
        keys: int = getattr(self.core, "num_key_value_heads", total // 3)
        return [total - 2 * keys, keys, keys]

    def norm(self) -> Norm | None:
        query, key = getattr(self.core, "q_norm", None), getattr(self.core, "k_norm", None)
        if query is None or key is None:
            return None
        eps = query.eps if hasattr(query, "eps") else query.variance_epsilon
        gains = []
        for norm, (weight, _) in zip((query, key), self.weights(), strict=False):
            gain = _double(norm.weight) + self.family.norm_offset
            gains.append(gain.view(-1, self.head_dim).expand(weight.shape[1], -1))
        return Norm(gains[0], gains[1], float(eps), self.family.norm_together)

    def write(self, merged: Mixture) -> None:
        super().write(merged)
        if self.family.norm_together and merged.gains is not None:
            for norm, gain in zip((self.core.q_norm, self.core.k_norm), merged.gains, strict=True):
                norm.weight.copy_(gain.flatten() - self.family.norm_offset)

    def inputs(self, args: Any, kwargs: dict[str, Any]) -> Inputs:
        given = {**dict(zip(("hidden_states", "attention_mask"), args, strict=False)), **kwargs}
        if not self.family.core and len(args) > 1:  # the order of further arguments differs between families
            given["attention_mask"] = kwargs.get("attention_mask")
        return given["hidden_states"], given.get("attention_mask"), given.get("position_embeddings")

    def resize(self, model: nn.Module, name: str, heads: int, key_value_heads: int, components: int) -> None:
        """Replace the projections by those of `heads` mixture heads, with arbitrary weights, and add a prior.

        Args:
            model: the model of the layer.
            name: of the layer's module in the model.
            heads: number of query heads.
            key_value_heads: number of value heads.
            components: number of key heads per value head.
        """
        counts = (heads, key_value_heads * components, key_value_heads)
        given = self.weights()
        like = given[0][0]
        if self.family.rebuilt:
            modeling = inspect.getmodule(type(self.module))
            module = SplitAttention(
                self.module, embed_dim=like.shape[0], head_dim=self.head_dim, heads=counts, window=self.window,
                biased=tuple(bias is not None for _, bias in given),
                rotate=getattr(modeling, "apply_rotary_pos_emb", None),
            ).to(device=like.device, dtype=like.dtype)  # fmt: skip
            model.set_submodule(name, module)
            self.module, self.core, self.rebuilt = module, module, True
        else:
            self._resize(counts)
        self.core.mixture_log_prior = nn.Parameter(like.new_full((heads, components), -math.log(components)))

    def _resize(self, counts: tuple[int, int, int]) -> None:
        """Give the family's own modules the shapes for these numbers of query, key and value heads."""
        sizes = [count * self.head_dim for count in counts]
        *inner, output = (self.module.get_submodule(name) for name in self.family.names)
        if isinstance(output, Conv1D):
            fresh = (Conv1D(sum(sizes), inner[0].nx), Conv1D(output.nf, sizes[0]))
            self.core.c_attn, self.core.c_proj = (each.to(output.weight) for each in fresh)
            self.core.split_size, self.core.num_heads = sizes, counts[0]
            return
        shapes = [(linear.in_features, size) for linear, size in zip(inner, sizes, strict=True)]
        for linear, shape in zip((*inner, output), (*shapes, (sizes[0], output.out_features)), strict=True):
            new = nn.Linear(*shape, linear.bias is not None, device=linear.weight.device, dtype=linear.weight.dtype)
            linear.weight, linear.bias = new.weight, new.bias
            linear.in_features, linear.out_features = shape
        if self.family.norm_together:
            for norm, size in zip((self.core.q_norm, self.core.k_norm), sizes, strict=False):
                norm.weight = nn.Parameter(norm.weight.new_ones(size))


def is_own(model: nn.Module) -> bool:
    """Whether a model has the attention of mgk."""
    return any(isinstance(module, MixtureAttention) for module in model.modules())


def layers_of(model: nn.Module) -> Sequence[Layer]:
    """Return the self-attention layers of a model, first to last."""
    if is_own(model):
        return [OwnLayer(module) for module in model.modules() if isinstance(module, MixtureAttention)]
    return [layer for _, layer in transformers_layers(model)]


def transformers_layers(model: nn.Module) -> list[tuple[str, TransformersLayer]]:
    """Return the self-attention layers of a Transformers model, first to last, with the names of their modules."""
    found = []
    merged = {family.config: family for family in FAMILIES}.get(_base_config(model))
    for name, module in model.named_modules():
        for attribute, what in REFUSED.items():
            if getattr(module, attribute, None) is not None:
                raise ValueError(f"model: expected attention without {what}; got {type(module).__name__}")
        family = merged if isinstance(module, SplitAttention) else BY_ATTENTION.get(type(module).__name__)
        if family and family.within in f"{name}." and not getattr(module, "is_cross_attention", False):
            found.append((name, TransformersLayer(module, family)))
    if not found:
        families = ", ".join(family.prefix for family in FAMILIES)
        raise ValueError(f"model: expected one with attention like that of {families}, got {type(model).__name__}")
    return found


def _base_config(model: nn.Module) -> str:
    """Return the name of the configuration class of a family, also for a merged model's, which inherits from it."""
    return type(getattr(model, "config", None)).__name__.removeprefix("Mixture")


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


def _views(modules: list[nn.Linear], width: int) -> Weights:
    """Return views of the weights and biases of linear layers by heads of a width."""
    *inner, output = modules
    found: Weights = []
    for linear in inner:
        bias = None if linear.bias is None else linear.bias.unflatten(0, (-1, width))
        found.append((linear.weight.mT.unflatten(1, (-1, width)), bias))
    return [*found, (output.weight.mT.unflatten(0, (-1, width)), output.bias)]


def _heads(weight: Tensor, bias: Tensor | None) -> Tensor:
    """Convert a weight (E,H,D) and a bias (H,D) to heads (H,F,D) in float64."""
    row = weight.new_zeros(weight.shape[1:]) if bias is None else bias
    return _double(torch.cat((weight, row[None]))).transpose(0, 1)


def _double(x: Tensor) -> Tensor:
    return x.detach().double().cpu()
