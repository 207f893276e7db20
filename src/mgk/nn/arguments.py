"""Checks of a module's options and of the arguments of a call, in addition to those of `mgk.ops.arguments`.

B batch, Nq queries, Nk keys, D width of a head, E width of the model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from mgk.nn.cache import KeyValueCache, StateCache
from mgk.nn.embeddings import Embedding, Rotation, check_rotary_dim
from mgk.nn.pages import PagedLayer
from mgk.ops import arguments as check
from mgk.ops.common import autocasts
from mgk.ops.dtensor import is_dtensor
from mgk.ops.feature_maps import check_feature_map
from mgk.variants import FEATURE_MAPS, GAUSSIAN, LINEAR, MIXTURES, SHIFTED

if TYPE_CHECKING:
    from mgk.nn.attention import MixtureAttention

MEANS = ("sgd", "em")
MIXINGS = ("features", "keys")


def check_kv_heads(num_kv_heads: object, num_heads: int, means: str, mixing: str) -> int:
    """Return the number of heads of keys and values, by default that of queries."""
    if num_kv_heads is None:
        return num_heads
    number = check.check_count("num_kv_heads", num_kv_heads)
    if num_heads % number:
        raise ValueError(f"num_kv_heads: expected a divisor of num_heads = {num_heads}, got {number}")
    if number < num_heads and (means == "em" or mixing == "keys"):
        name, value = ("means", "sgd") if means == "em" else ("mixing", "features")
        raise ValueError(f"{name}: expected {value!r} with num_kv_heads = {number} below num_heads = {num_heads}")
    return number


def check_window(window: object, causal: bool, variant: str) -> int | None:
    """Return the window of a module, all of whose calls are causal then."""
    if window is None:
        return None
    if variant in LINEAR:
        raise ValueError(f"window: expected None for variant {variant!r}, whose sums hold all keys, got {window}")
    number = check.check_count("window", window)
    if not causal:
        raise ValueError(f"window: expected None without causal=True, got {number}")
    return number


def check_combination(
    variant: str,
    e_step: str,
    prior: str,
    dropout: float,
    feature_map: object,
    learn_variance: bool,
    prior_positions: object,
    prior_momentum: float,
    means: str,
    mixing: str,
    rotary_dim: int,
) -> None:
    """Raise for an option that would have no effect with the others. The defaults are valid for every variant."""
    gaussian, linear = variant in GAUSSIAN, variant in LINEAR
    if e_step == "hard" and not gaussian:
        raise ValueError(f"e_step: expected 'soft' for variant {variant!r} ('hard' is for mgk and smgk), got 'hard'")
    if prior == "em" and not (gaussian and e_step == "soft"):
        raise ValueError(
            "prior: expected 'sgd' or 'uniform' (the M-step is defined for mgk and smgk with a soft E-step), "
            f"got 'em' for variant {variant!r} with e_step={e_step!r}"
        )
    if learn_variance and not gaussian:
        raise ValueError(f"learn_variance: expected False for variant {variant!r}, which has no variance, got True")
    if dropout and linear:
        raise ValueError(
            f"dropout: expected 0 for variant {variant!r}, which has no attention weights to drop, got {dropout}"
        )
    if linear:
        if isinstance(feature_map, str):
            check.check_choice("feature_map", feature_map, FEATURE_MAPS)
        else:
            check_feature_map(feature_map)
    elif feature_map != "elu":
        raise ValueError(
            f"feature_map: expected the default for variant {variant!r}, which has none, got {feature_map!r}"
        )
    if prior_positions is not None:
        check.check_count("prior_positions", prior_positions)
    for name, given in (("prior_positions", prior_positions), ("prior_momentum", prior_momentum)):
        if given and prior != "em":
            raise ValueError(f"{name}: expected the default unless prior='em', got {given} with prior={prior!r}")
    if means == "em" and not (variant == "smgk" and e_step == "soft" and not learn_variance and not rotary_dim):
        raise ValueError(
            "means: expected 'sgd' (the M-step for means and variances is defined for smgk with a soft E-step, without "
            f"learn_variance and rotary_dim), got 'em' for variant {variant!r} with e_step={e_step!r}"
        )
    if mixing == "keys" and not (linear and variant in MIXTURES):
        raise ValueError(
            f"mixing: expected 'features' for variant {variant!r} ('keys' is for mlk and smlk), got 'keys'"
        )


def check_inputs(module: MixtureAttention, query: object, key: object, value: object) -> None:
    """Check the shapes, dtypes and devices of query (B,Nq,E), key (B,Nk,kdim) and value (B,Nk,vdim)."""
    query = check.check_tensor("query", query, "B,Nq,E")
    check.check_shape("query", query, "B,Nq,E", (*query.shape[:2], module.embed_dim))
    key = check.check_tensor("key", key, "B,Nk,kdim")
    check.check_shape("key", key, "B,Nk,kdim", (query.shape[0], key.shape[1], module.kdim), " to go with query")
    value = check.check_tensor("value", value, "B,Nk,vdim")
    check.check_shape("value", value, "B,Nk,vdim", (*key.shape[:2], module.vdim), " to go with key")
    for name, x in (("query", query), ("key", key), ("value", value)):
        projection = getattr(module, f"{name}_proj")
        weight = getattr(projection, "weight", x)
        weight = weight if isinstance(weight, Tensor) else x  # a quantised module has a method
        # A module put in the place of a projection may convert its input itself.
        if (x.dtype != weight.dtype or x.device != weight.device) and is_plain_linear(projection):
            cast = autocasts(x) and torch.float64 not in (x.dtype, weight.dtype)
            check.check_same(name, x, weight, dtype=not cast, whose=f"{name}_proj.weight")


def is_plain_linear(module: nn.Module) -> bool:
    """Whether calling the module computes W x + b and nothing else, with a W that can be read as any tensor.

    False for an adapter in its place, for quantised weights, for a module with hooks, and for one whose `forward` was
    replaced, as accelerate does to load the weight first.
    """
    return type(module) is nn.Linear and is_plain_tensor(module.weight) and not is_hooked(module)


def is_hooked(module: nn.Module) -> bool:
    """Whether a call of the module does more than its class says, such as load its weights."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(hooks) or "forward" in module.__dict__


def loads_its_weight(module: nn.Module) -> bool:
    """Whether the weight is there only while the module is called, as with accelerate's offloading and FSDP.

    Not in tensor parallelism, whose hooks change the inputs: its weights are DTensors that are always there.
    """
    weight = getattr(module, "weight", None)
    if isinstance(weight, Tensor) and is_dtensor(weight):
        return False
    return "forward" in module.__dict__ or bool(module._forward_pre_hooks)


def weight_of(module: nn.Module) -> Tensor:
    """Return the weight of a linear layer without bias or of an embedding, (V,E), from a call if it must be.

    The module may be another one by now: with an adapter, quantised, or one whose weight is somewhere else.
    """
    weight: Any = module.weight
    width: Any = getattr(module, "in_features", None)
    embeds = isinstance(getattr(module, "base_layer", module), nn.Embedding)  # the one that an adapter changes
    plain = type(module) in (nn.Linear, nn.Embedding, Embedding)
    if plain and not loads_its_weight(module) and (embeds or is_plain_tensor(weight)):
        return weight  # type: ignore[no-any-return]
    weight = weight if isinstance(weight, Tensor) else weight()  # a method, where PyTorch quantised it
    device = None if weight.is_meta else weight.device
    if embeds:
        return module(torch.arange(len(weight), device=device))  # type: ignore[no-any-return]
    dtype = weight.dtype if weight.is_floating_point() else None
    return module(torch.eye(width, device=device, dtype=dtype)).mT  # type: ignore[no-any-return]


def is_plain_tensor(x: Tensor) -> bool:
    """Whether operators can read the numbers of a tensor: it is no quantised one, for example of torchao."""
    return type(x) in (Tensor, nn.Parameter, FakeTensor) or is_dtensor(x) or not is_traceable_wrapper_subclass(x)


def check_positions(log_prior: Tensor | None, num_keys: int) -> None:
    """Check that a prior per position, (H,M,N), covers all keys."""
    if log_prior is not None and log_prior.dim() == 3 and num_keys > log_prior.shape[2]:
        raise ValueError(f"key: expected at most {log_prior.shape[2]} positions (prior_positions), got {num_keys}")


def check_padding(name: str, padding: object, axes: str, expected: tuple[int, ...], query: Tensor) -> Tensor | None:
    """Return the mask of a padding mask: True where a key (or query) takes part.

    `padding` is True where a position is ignored, or a float tensor of 0 and -inf, as PyTorch's layers pass it.
    """
    if padding is None:
        return None
    if not isinstance(padding, Tensor):
        raise TypeError(f"{name}: expected a bool tensor ({axes}), got {check.describe(padding)}")
    if padding.is_floating_point():
        ignored = padding == -torch.inf
        if check.readable(padding) and bool((padding.masked_fill(ignored, 0) != 0).any()):
            raise ValueError(f"{name}: expected a bool tensor, or floats that are 0 or -inf, got other numbers")
        padding = ignored
    if padding.dtype != torch.bool:
        raise TypeError(f"{name}: expected dtype torch.bool or a float dtype, got {padding.dtype}")
    check.check_shape(name, padding, axes, expected)
    check.check_same(name, padding, query, dtype=False)
    return ~padding


def check_attn_mask(attn_mask: object, is_causal: bool, num_queries: int, num_keys: int) -> bool:
    """Return whether the call is causal. If `is_causal` is set, the values of the mask are not read."""
    if attn_mask is None:
        return is_causal
    if not isinstance(attn_mask, Tensor):
        raise TypeError(f"attn_mask: expected a tensor (Nq,Nk) or None, got {check.describe(attn_mask)}")
    if attn_mask.dim() < 2 or attn_mask.shape[-2:] != (num_queries, num_keys):
        raise ValueError(f"attn_mask: expected (Nq,Nk) = {(num_queries, num_keys)}, got {check.describe(attn_mask)}")
    if attn_mask.dtype != torch.bool and not attn_mask.is_floating_point():
        raise TypeError(f"attn_mask: expected dtype torch.bool or a float dtype, got {attn_mask.dtype}")
    if is_causal:
        return True
    if torch.compiler.is_compiling():
        raise ValueError("attn_mask: expected is_causal=True with it where a model is compiled, got False")
    future = torch.ones(num_queries, num_keys, dtype=torch.bool, device=attn_mask.device)
    future = future.triu(1 + num_keys - num_queries)
    hidden = future if attn_mask.dtype == torch.bool else torch.zeros_like(attn_mask).masked_fill(future, -torch.inf)
    if not bool((attn_mask == hidden).all()):
        raise ValueError("attn_mask: expected None or the causal mask (True or -inf hides), got another mask")
    return True


def check_rotary(rotary_dim: object, head_dim: int, variant: str) -> int:
    """Check how many entries of a head are rotated."""
    rotary_dim = check_rotary_dim(rotary_dim, head_dim)
    if variant in SHIFTED and rotary_dim == head_dim:
        raise ValueError(
            f"rotary_dim: expected less than head_dim = {head_dim} for variant {variant!r}, whose shifts use the "
            f"entries that are not rotated, got {rotary_dim}"
        )
    return rotary_dim


def check_rotation(rotary: object, rotary_dim: int, shape: tuple[int, ...], head_dim: int, is_self: bool) -> None:
    """Check the rotation of queries of shape (B,Nq,...)."""
    if not rotary_dim:
        if rotary is not None:
            raise ValueError(f"rotary: expected None for a module without rotary_dim, got {type(rotary).__name__}")
        return
    if not isinstance(rotary, Rotation):
        raise TypeError(
            f"rotary: expected a Rotation for a module with rotary_dim = {rotary_dim}, got {type(rotary).__name__}"
        )
    if not is_self:
        raise ValueError("rotary: expected self-attention (key=None), got another key")
    batch = rotary.cos.shape[0] if rotary.cos.shape[0] == 1 else shape[0]
    for name, part in rotary._asdict().items():
        check.check_shape(f"rotary.{name}", part, "B,Nq,D", (batch, shape[1], head_dim))


def check_cache(
    cache: object, kind: type[KeyValueCache] | type[StateCache], batch_size: int, is_self: bool, need_weights: bool,
    masked: bool,
) -> None:  # fmt: skip
    """Check that a cache belongs to this kind of module and batch."""
    if not isinstance(cache, kind):
        raise TypeError(f"cache: expected a {kind.__name__} of new_cache, got {type(cache).__name__}")
    if cache.batch_size != batch_size:
        raise ValueError(f"cache: expected one for a batch of {batch_size}, got one for {cache.batch_size}")
    if not is_self:
        raise ValueError("cache: expected self-attention (key=None) with a cache, got another key")
    if isinstance(cache, PagedLayer) and (need_weights or masked):
        name, wanted = ("key_padding_mask", "None") if masked else ("need_weights", "False")
        raise ValueError(f"{name}: expected {wanted} with a cache in pages, whose rows have lengths of their own")
    if need_weights and kind is StateCache:
        raise ValueError("need_weights: expected False with a cache of linear attention, which keeps no keys, got True")
