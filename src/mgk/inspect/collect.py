"""Collect the queries, keys and priors of a model's attention layers on given inputs.

Works with every module that contains `mgk.nn.MixtureAttention`. The memory is linear in N; attention matrices are
computed later, row by row, where they are needed.

B batch, H heads, M components, Nq queries, Nk keys, D width of a head.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mgk.inspect import heads as of
from mgk.inspect.heads import Factors
from mgk.nn import AttentionInputs, MixtureAttention
from mgk.ops.feature_maps import FeatureMap, apply_feature_map, check_feature_map
from mgk.variants import LINEAR

if TYPE_CHECKING:
    from jaxtyping import Bool, Float


@dataclass(frozen=True)
class Layer:
    """The inputs of one call of one attention module. `head` computes with them."""

    name: str
    variant: str
    e_step: str
    query: Float[Tensor, "b h nq d"]
    key: Float[Tensor, "b h nk d"] | Float[Tensor, "b h m nk d"]
    shift: Float[Tensor, "h m d"] | None
    log_prior: Float[Tensor, "h m"] | Float[Tensor, "h m nk"] | None
    variance: Float[Tensor, "h m"] | None
    feature_map: str | FeatureMap
    is_causal: bool
    window: int | None
    key_mask: Bool[Tensor, "b nk"] | None
    prior: Float[Tensor, "h m"]  # as probabilities; a prior per position is averaged over positions

    @property
    def batch(self) -> int:
        return len(self.query)

    @property
    def num_heads(self) -> int:
        return self.query.shape[1]

    @property
    def num_components(self) -> int:
        return self.prior.shape[1]

    def heads(self, sample: int = 0) -> list[Factors]:
        """All heads on one input."""
        return [self.head(index, sample) for index in range(self.num_heads)]

    def head(self, index: int, sample: int = 0) -> Factors:
        """One head on one input, without the masked positions."""
        query, key = self.query[sample, index], self.key[sample, index]
        prior = None if self.log_prior is None else self.log_prior[index]
        if self.key_mask is not None:
            seen = self.key_mask[sample]
            query = query[seen] if len(query) == len(seen) else query
            key = key[..., seen, :]
            prior = prior[:, seen] if prior is not None and prior.dim() == 2 else prior
        if self.variant == "softmax":
            return of.softmax(query, key, is_causal=self.is_causal, window=self.window)
        shift = None if self.shift is None else self.shift[index]
        if self.variant in LINEAR:
            if shift is not None:
                key = key[None] + shift[:, None]
            key = key if key.dim() == 3 else key[None]
            phi = check_feature_map(self.feature_map)
            return of.linear(
                apply_feature_map(phi, query), apply_feature_map(phi, key), prior, is_causal=self.is_causal
            )
        variance = None if self.variance is None else self.variance[index]
        return of.gaussian(
            query, key, prior, shift=shift, variance=variance, e_step=self.e_step, is_causal=self.is_causal,
            window=self.window,
        )  # fmt: skip

    def component_keys(self, index: int, sample: int = 0) -> Float[Tensor, "m nk d"]:
        """k_jr of one head, without the masked positions."""
        key = self.key[sample, index]
        if self.key_mask is not None:
            key = key[..., self.key_mask[sample], :]
        if self.shift is not None:
            return key[None] + self.shift[index][:, None]
        return key if key.dim() == 3 else key[None]


def collect(
    model: nn.Module, *inputs: Any, visit: Callable[[Layer], None] | None = None, **options: Any
) -> list[Layer]:
    """Run `model(*inputs, **options)` in evaluation mode, without gradients, and return its attention layers in order.

    With `visit`, each layer is passed to it before its attention is computed, and the returned list is empty.
    """
    layers: list[Layer] = []
    called: set[str] = set()
    found = {name: module for name, module in model.named_modules() if isinstance(module, MixtureAttention)}
    if not found:
        raise ValueError(f"model: expected a module with mgk.nn.MixtureAttention in it, got {type(model).__name__}")
    names = {module: name for name, module in found.items()}
    training = {module: module.training for module in model.modules()}

    def hook(module: MixtureAttention, inputs: AttentionInputs) -> None:
        called.add(names[module])
        (visit or layers.append)(_layer(names[module], module, inputs))

    handles = [module.register_attention_hook(hook) for module in found.values()]
    model.eval()
    try:
        with torch.no_grad():
            model(*inputs, **options)
    finally:
        for handle in handles:
            handle.remove()
        for module, mode in training.items():
            module.training = mode
    if not called:
        raise RuntimeError(f"model: expected a call of its attention layers ({', '.join(found)}), saw none")
    return layers


def _layer(name: str, module: MixtureAttention, inputs: AttentionInputs) -> Layer:
    dtype = torch.promote_types(inputs.query.dtype, torch.float32)  # half precision is converted to single
    tensors: dict[str, Tensor | None] = {
        field: None if (value := getattr(inputs, field)) is None else value.detach().to(dtype)
        for field in ("query", "key", "shift", "log_prior", "variance")
    }
    prior = module.prior.to(dtype)
    if module.mixing == "keys":  # the mixture has become one key
        prior = prior.sum(1, keepdim=True)
    return Layer(
        name=name,
        variant=inputs.variant,
        e_step=inputs.e_step,
        feature_map=inputs.feature_map,
        prior=prior.mean(-1) if prior.dim() == 3 else prior,
        is_causal=inputs.is_causal,
        window=inputs.window,
        key_mask=inputs.key_mask,
        **tensors,  # type: ignore[arg-type]
    )
