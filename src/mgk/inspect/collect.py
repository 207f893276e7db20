"""What the attention layers of a model do on given inputs: queries, keys and priors, caught in the act.

Works with every module that contains `mgk.nn.MixtureAttention`. What is kept is linear in N; matrices are made of it
by rows, when somebody looks.

B batch, H heads, M components, Nq queries, Nk keys, D width of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mgk.inspect import heads as of
from mgk.inspect.heads import Factors
from mgk.nn import MixtureAttention
from mgk.ops.feature_maps import FeatureMap, apply_feature_map, check_feature_map
from mgk.variants import LINEAR

if TYPE_CHECKING:
    from jaxtyping import Bool, Float


@dataclass(frozen=True)
class Layer:
    """One call of one attention module. `head` is the way in; the rest is what the module worked with."""

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
    key_mask: Bool[Tensor, "b nk"] | None
    prior: Float[Tensor, "h m"]  # as probabilities; the mean over positions where each has its own

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
        return [self.head(index, sample) for index in range(self.num_heads)]

    def head(self, index: int, sample: int = 0) -> Factors:
        """One head on one input, without the positions that its mask hides."""
        query, key = self.query[sample, index], self.key[sample, index]
        prior = None if self.log_prior is None else self.log_prior[index]
        if self.key_mask is not None:
            seen = self.key_mask[sample]
            query = query[seen] if len(query) == len(seen) else query
            key = key[..., seen, :]
            prior = prior[:, seen] if prior is not None and prior.dim() == 2 else prior
        if self.variant == "softmax":
            return of.softmax(query, key, is_causal=self.is_causal)
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
            query, key, prior, shift=shift, variance=variance, e_step=self.e_step, is_causal=self.is_causal
        )

    def component_keys(self, index: int, sample: int = 0) -> Float[Tensor, "m nk d"]:
        """k_jr of one head, without the positions that its mask hides."""
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

    With `visit`, each layer is passed to it as soon as it has run, and none is kept: the list is empty.
    """
    layers: list[Layer] = []
    seen: set[str] = set()
    found = {name: module for name, module in model.named_modules() if isinstance(module, MixtureAttention)}
    if not found:
        raise ValueError(f"model: expected a module with mgk.nn.MixtureAttention in it, got {type(model).__name__}")
    training = {module: module.training for module in model.modules()}

    def note(layer: Layer) -> None:
        seen.add(layer.name)
        (visit or layers.append)(layer)

    model.eval()
    try:
        with torch.no_grad(), watched(found, note):
            model(*inputs, **options)
    finally:
        for module, mode in training.items():
            module.training = mode
    if not seen:
        raise RuntimeError(f"model: expected a call of its attention layers ({', '.join(found)}), saw none")
    return layers


@contextmanager
def watched(modules: dict[str, MixtureAttention], visit: Callable[[Layer], None]) -> Iterator[None]:
    """While this lasts, `visit` gets a `Layer` for every call of the modules."""
    methods = ("_softmax", "_gaussian", "_linear")  # where queries and keys are as the operator takes them
    around = ("_whole", "_rows")  # operators on more than that, where there are any

    def wrap(name: str, module: MixtureAttention, method: str) -> Callable[..., Any]:
        call = getattr(module, method)

        def observed(query: Tensor, key: Tensor, value: Tensor, seen: dict[str, Any], *rest: Any) -> Any:
            visit(_layer(name, module, query, key, seen))
            return call(query, key, value, seen, *rest)

        return observed

    try:
        for name, module in modules.items():
            for method in methods:
                object.__setattr__(module, method, wrap(name, module, method))
            for method in around:
                object.__setattr__(module, method, lambda *_: None)
        yield
    finally:
        for module in modules.values():
            for method in (*methods, *around):
                module.__dict__.pop(method, None)


def _layer(name: str, module: MixtureAttention, query: Tensor, key: Tensor, seen: dict[str, Any]) -> Layer:
    dtype = torch.promote_types(query.dtype, torch.float32)  # half precision is looked at in single
    mixture = {
        name: None if value is None else value.detach().to(dtype)
        for name, value in module._mixture(key.shape[-2]).items()
    }
    prior = module.prior.to(dtype)
    if module.mixing == "keys":  # one key is left
        prior = prior.sum(1, keepdim=True)
    return Layer(
        name=name,
        variant=module.variant,
        e_step=module.e_step,
        query=query.detach().to(dtype),
        key=key.detach().to(dtype),
        feature_map=module.feature_map,
        prior=prior.mean(-1) if prior.dim() == 3 else prior,
        is_causal=seen["is_causal"],
        key_mask=seen["key_mask"],
        **mixture,
    )
