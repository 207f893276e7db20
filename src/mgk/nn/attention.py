"""Multi-head attention with mixture keys, called as `torch.nn.MultiheadAttention` is called with `batch_first=True`.

B batch, H query heads, G heads of keys and values, M components, Nq queries, Nk keys, T rows of a packed batch, E width
of the model, D width of a head.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from mgk.nn import arguments, context_parallel, operators, packed
from mgk.nn.cache import KeyValueCache, StateCache, WindowCache
from mgk.nn.documents import Documents
from mgk.nn.embeddings import Rotation, pad_shift, rotate
from mgk.nn.m_step import m_step
from mgk.nn.norm import RMSNorm
from mgk.nn.operators import AttentionInputs
from mgk.nn.packing import Packing
from mgk.nn.pages import PagedLayer
from mgk.nn.projections import project
from mgk.ops import arguments as check
from mgk.ops.dispatch import IMPLEMENTATIONS
from mgk.ops.dtensor import local_part
from mgk.ops.feature_maps import FeatureMap, PositiveOrthogonalFeatures
from mgk.ops.ring import Ring
from mgk.variants import LINEAR, MIXTURES, PRIORS, PROJECTED, SHIFTED, VARIANTS

if TYPE_CHECKING:
    from jaxtyping import Bool, Float

AttentionHook = Callable[["MixtureAttention", AttentionInputs], None]


class MixtureAttention(nn.Module):
    """h_i = sum_j A[i,j] v_j with keys that are mixtures: the attention of Transformer-MGK, -sMGK, -MLK and -sMLK.

    | variant   | A[i,j] is proportional to                  | keys                |
    | --------- | ------------------------------------------ | ------------------- |
    | `softmax` | exp(q_i.k_j / sqrt(D))                     | k_j = x_j W         |
    | `mgk`     | `sum_r prior_r exp(-|q_i - k_jr|^2 / 2 s2)`| k_jr = x_j W_r      |
    | `smgk`    | the same                                   | k_jr = x_j W + b_r  |
    | `linear`  | phi(q_i).phi(k_j)                          | k_j = x_j W         |
    | `mlk`     | sum_r prior_r phi(q_i).phi(k_jr)           | k_jr = x_j W_r      |
    | `smlk`    | the same                                   | k_jr = x_j W + b_r  |

    Parameters: `query_proj`, `key_proj`, `value_proj`, `out_proj` (`nn.Linear` with its default initialisation, as in
    the paper's baselines), `shift` (H,M,D), initialised from a standard normal, `log_prior` (H,M), initialised to
    log(1/M), and `log_variance` (H,M), initialised to log sqrt(D).

    Args:
        embed_dim: E, the width of queries and outputs.
        num_heads: H.
        variant: one of the table above.
        num_kv_heads: G, which divides H: query head h reads keys and values of head h // (H/G). None is H.
        head_dim: D; None is E / H, as in `nn.MultiheadAttention`: fewer heads are then wider. To halve the heads of a
            softmax layer, keep their width: MixtureAttention(256, 4, head_dim=32) for MultiheadAttention(256, 8).
        num_components: M, for the mixtures.
        e_step: "soft" (Eqn 9) or, for `mgk` and `smgk`, "hard" (Eqn 12). A hard E-step uses no prior, and the module
            then has none.
        prior: "sgd" learns it with the other parameters. "em" keeps it in a buffer that every forward pass in training
            mode updates by an M-step over the real queries of all processes (`mgk` and `smgk`, soft; all processes
            must make the same calls). "uniform" has none.
        causal: make every call causal, as `is_causal=True` does.
        window: with causal=True, a query sees only the last `window` keys up to its own position (not in the linear
            family). A cache then keeps no more than these.
        dropout: probability of dropping an attention weight in training; the linear family has no weights to drop.
        bias: whether the four projections have a bias.
        feature_map: phi of the linear family: "elu", "dpfp", "favor" (Performer; `self.feature_map.redraw()` draws new
            features), or a callable on (...,D), which may be a module.
        learn_variance: learn s2 per head and component (`mgk` and `smgk`); otherwise it is sqrt(D).
        prior_positions: with prior="em", keep a prior for each of the first `prior_positions` key positions,
            (H,M,prior_positions).
        prior_momentum: with prior="em", the weight of the old prior in an update.
        means: "sgd" learns the shifts. "em" (`smgk`, soft) keeps shifts and variances in buffers that every forward
            pass in training mode updates by the M-step of Eqn 13 (`mgk.nn.m_step`) after it has used them.
        mixing: for `mlk` and `smlk`: "features" is Eqn 14; "keys" is phi(sum_r prior_r k_jr), as in the authors' LRA
            code, which equals linear attention with its key projection written as a sum.
        rotary_dim: how many entries of a head are rotated by the position (`mgk.nn.embeddings`); `forward` then needs
            `rotary`. A shift uses the other entries, (H,M,D - rotary_dim), so shifted keys need rotary_dim < D.
        qk_norm: apply RMSNorm with a learned weight (D,) to every query and key of a head, before rotation and shift.
            All |k_j| are then about sqrt(D), so the Gaussians become softmax with one temperature (docs/math.md).
        kdim, vdim: widths of `key` and `value` in cross-attention; None is E.
        impl: implementation of `mgk.ops`: "auto" or a name.
    """

    # With these values nn.TransformerEncoderLayer never takes its fused path, which computes softmax attention only.
    batch_first = True
    in_proj_bias = None
    _qkv_same_embed_dim = False

    shift: Tensor | None
    log_variance: Tensor | None
    log_prior: Tensor | None

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        variant: str = "smgk",
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        num_components: int = 2,
        e_step: str = "soft",
        prior: str = "sgd",
        causal: bool = False,
        window: int | None = None,
        dropout: float = 0.0,
        bias: bool = True,
        feature_map: str | FeatureMap = "elu",
        learn_variance: bool = False,
        prior_positions: int | None = None,
        prior_momentum: float = 0.0,
        means: str = "sgd",
        mixing: str = "features",
        rotary_dim: int = 0,
        qk_norm: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        impl: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.embed_dim = check.check_count("embed_dim", embed_dim)
        self.num_heads = check.check_count("num_heads", num_heads)
        self.head_dim = embed_dim // num_heads if head_dim is None else check.check_count("head_dim", head_dim)
        self.kdim = embed_dim if kdim is None else check.check_count("kdim", kdim)
        self.vdim = embed_dim if vdim is None else check.check_count("vdim", vdim)
        self.variant = check.check_choice("variant", variant, VARIANTS)
        self.num_components = check.check_count("num_components", num_components) if variant in MIXTURES else 1
        self.e_step = check.check_choice("e_step", e_step, check.E_STEPS)
        self.prior_kind = check.check_choice("prior", prior, PRIORS)
        self.causal = check.check_flag("causal", causal)
        self.window = arguments.check_window(window, causal, variant)
        self.dropout = check.check_probability("dropout", dropout)
        self.prior_momentum = check.check_probability("prior_momentum", prior_momentum)
        self.impl = check.check_choice("impl", impl, IMPLEMENTATIONS)
        if head_dim is None and embed_dim % num_heads:
            raise ValueError(
                f"embed_dim: expected a multiple of num_heads = {num_heads} unless head_dim is given, got {embed_dim}"
            )
        self.rotary_dim = arguments.check_rotary(rotary_dim, self.head_dim, variant)
        self.means_kind = check.check_choice("means", means, arguments.MEANS)
        self.mixing = check.check_choice("mixing", mixing, arguments.MIXINGS)
        check.check_flag("learn_variance", learn_variance)
        arguments.check_combination(
            variant, e_step, prior, dropout, feature_map, learn_variance, prior_positions, prior_momentum, means,
            mixing, rotary_dim,
        )  # fmt: skip
        self.num_kv_heads = arguments.check_kv_heads(num_kv_heads, self.num_heads, means, mixing)
        self.m_step_enabled = True  # False while activation checkpointing repeats a forward pass
        self.ring: Ring | None = None  # see mgk.models.context_parallel
        self.m_step_groups: tuple[Any, ...] = (None,)  # of the statistics of an M-step; None is all
        self._attention_hooks: OrderedDict[int, AttentionHook] = OrderedDict()

        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        heads, components = self.num_heads, self.num_components
        inner, width = heads * self.head_dim, self.num_kv_heads * self.head_dim
        self.query_proj = nn.Linear(embed_dim, inner, check.check_flag("bias", bias), **factory)
        self.key_proj = nn.Linear(self.kdim, width * (components if variant in PROJECTED else 1), bias, **factory)
        self.value_proj = nn.Linear(self.vdim, width, bias, **factory)
        self.out_proj = nn.Linear(inner, embed_dim, bias, **factory)
        self.qk_norm = check.check_flag("qk_norm", qk_norm)
        head_norm: Any = RMSNorm if qk_norm else nn.Identity
        self.query_norm, self.key_norm = (head_norm(self.head_dim, **factory) for _ in range(2))
        has_prior = prior == "em" or (prior == "sgd" and e_step == "soft" and variant in MIXTURES)
        positions = () if prior_positions is None else (prior_positions,)
        for name, exists, shape in (
            ("shift", variant in SHIFTED, (self.head_dim - rotary_dim,)),
            ("log_variance", learn_variance or means == "em", ()),
            ("log_prior", has_prior, positions),
        ):
            value = torch.empty(heads, components, *shape, **factory) if exists else None
            if name in self.em_buffers:
                self.register_buffer(name, value)
            else:
                self.register_parameter(name, None if value is None else nn.Parameter(value))
        self.feature_map: str | FeatureMap = feature_map
        if feature_map == "favor":
            self.feature_map = PositiveOrthogonalFeatures(self.head_dim).to(device)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise `shift`, `log_variance` and `log_prior`. The projections have a method of their own."""
        if self.shift is not None:
            nn.init.normal_(self.shift)
        if self.log_variance is not None:
            nn.init.constant_(self.log_variance, 0.5 * math.log(self.head_dim))
        if self.log_prior is not None:
            nn.init.constant_(self.log_prior, -math.log(self.num_components))

    @property
    def em_buffers(self) -> tuple[str, ...]:
        """Names of the buffers that M-steps update."""
        prior = ("log_prior",) if self.prior_kind == "em" else ()
        return prior + (("shift", "log_variance") if self.means_kind == "em" else ())

    @property
    def prior(self) -> Float[Tensor, "h m"] | Float[Tensor, "h m n"]:
        """The prior of each component, as probabilities."""
        if self.log_prior is None:
            weight = self.query_proj.weight
            return weight.new_full((self.num_heads, self.num_components), 1 / self.num_components)
        return self.log_prior.detach().softmax(1)

    @property
    def key_shift(self) -> Float[Tensor, "h m d"] | None:
        """The shifts b_r of the heads of this process, padded with zeros to the width of a head."""
        shift = local_part(self.shift)
        return shift if shift is None or not self.rotary_dim else pad_shift(shift, self.head_dim)

    def new_cache(self, batch_size: int, capacity: int = 0) -> KeyValueCache | StateCache:
        """Return an empty cache for `forward`, with memory reserved for `capacity` positions."""
        check.check_count("batch_size", batch_size)
        check.check_count("capacity", capacity, 0)
        if self.variant in LINEAR:
            return StateCache(batch_size)
        return KeyValueCache(batch_size, capacity) if self.window is None else WindowCache(batch_size, self.window)

    def register_attention_hook(self, hook: AttentionHook) -> RemovableHandle:
        """Call `hook(module, inputs)` before each attention operator, with its `AttentionInputs`.

        For a packed batch the hook gets padded tensors (B,H,N,D) with their masks. It is not called while
        torch.compile traces the module, nor in a call of the linear family with a cache, which keeps no keys.

        Returns:
            A handle; `handle.remove()` removes the hook.
        """
        handle = RemovableHandle(self._attention_hooks)
        self._attention_hooks[handle.id] = hook
        return handle

    def forward(
        self,
        query: Float[Tensor, "b nq e"] | Float[Tensor, "nq e"],
        key: Float[Tensor, "b nk ek"] | Float[Tensor, "nk ek"] | None = None,
        value: Float[Tensor, "b nk ev"] | Float[Tensor, "nk ev"] | None = None,
        key_padding_mask: Bool[Tensor, "b nk"] | Bool[Tensor, " nk"] | None = None,
        need_weights: bool = False,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
        cache: KeyValueCache | StateCache | None = None,
        query_padding_mask: Bool[Tensor, "b nq"] | Bool[Tensor, " nq"] | None = None,
        rotary: Rotation | None = None,
        packing: Packing | Documents | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Self-attention of `query`, or cross-attention to `key` and `value`.

        Args:
            query: (B,Nq,E), or (Nq,E) if no argument has a batch dimension.
            key: (B,Nk,kdim); None is `query`.
            value: (B,Nk,vdim); None is `key`.
            key_padding_mask: (B,Nk), True (or -inf) where a key is ignored. With a cache it covers the cached keys and
                the new ones. In self-attention the masked positions do not count as queries in an M-step either.
            query_padding_mask: (B,Nq), True where a query is padding. Its heads are zero, so its output is the bias of
                `out_proj`. Operators skip it where they can, and an M-step does not count it.
            rotary: the rotation of the positions of `query`, (B,Nq,D) or (1,Nq,D), if the module has a `rotary_dim`.
            need_weights: also return A, which needs Nq x Nk memory; without dropout.
            attn_mask: (Nq,Nk), the causal mask; it has the effect of `is_causal=True`. Other masks are an error.
            average_attn_weights: average A over the heads.
            is_causal: a query sees the keys up to its own position; the last query sees every key.
            cache: from `new_cache`. `query` holds the positions after the cached ones and is added to the cache. Such
                a call is causal, has no gradient, and makes no M-step.
            packing: describes a packed batch: `query` and the output are (T,E), or (B,N,E) for `Documents`. Only
                `is_causal` and `rotary` can be used with it.

        Returns:
            The output (B,Nq,E), and A as (B,Nq,Nk) or (B,H,Nq,Nk) if `need_weights`, else None.
        """
        check.check_flag("is_causal", is_causal)
        if self.ring is not None:
            context_parallel.check_call(self, key is None or key is query, need_weights, cache, packing)
        if packing is not None:
            others = (key, value, key_padding_mask, attn_mask, cache, query_padding_mask)
            if need_weights or any(other is not None for other in others):
                raise ValueError("packing: expected at most is_causal and rotary beside query and packing, got more")
            return packed.forward(self, query, packing, is_causal or self.causal, rotary), None
        if key is None and value is not None:
            raise ValueError("value: expected None where key is None, got a tensor")
        is_self = key is None or key is query
        key = query if key is None else key
        value = key if value is None else value
        batched = not (isinstance(query, Tensor) and query.dim() == 2)
        if not batched:
            query, key, value = (x[None] if isinstance(x, Tensor) else x for x in (query, key, value))
            key_padding_mask, query_padding_mask = (
                x[None] if isinstance(x, Tensor) else x for x in (key_padding_mask, query_padding_mask)
            )
        arguments.check_inputs(self, query, key, value)
        if cache is not None:
            kind = StateCache if self.variant in LINEAR else KeyValueCache
            masked = key_padding_mask is not None or query_padding_mask is not None
            arguments.check_cache(cache, kind, query.shape[0], is_self, need_weights, masked)
        num_keys = key.shape[1] + (0 if cache is None else cache.length)
        arguments.check_positions(self.log_prior, num_keys)
        is_causal = arguments.check_attn_mask(attn_mask, is_causal, query.shape[1], num_keys)
        arguments.check_rotation(rotary, self.rotary_dim, query.shape, self.head_dim, is_self)
        mask = arguments.check_padding("key_padding_mask", key_padding_mask, "B,Nk", (query.shape[0], num_keys), query)
        query_mask = mask  # the same object if it is the same mask: softmax attention can then skip the padding
        if query_padding_mask is not key_padding_mask or num_keys != query.shape[1]:
            shape = (query.shape[0], query.shape[1])
            query_mask = arguments.check_padding("query_padding_mask", query_padding_mask, "B,Nq", shape, query)

        with torch.set_grad_enabled(torch.is_grad_enabled() and cache is None):
            q, k, v = project(self, query, key, value)
            if rotary is not None:
                q, k = rotate(q, rotary), rotate(k, rotary)
            window = self.window
            if isinstance(cache, PagedLayer):
                heads = operators.attend_paged(self._inputs(q, k, v, True, None, None, window), cache, self.log_prior)
                return self.out_proj(heads.transpose(1, 2).flatten(2)), None
            if isinstance(cache, KeyValueCache):
                k, v = cache.append(k, v)
                mask, window = cache.visible(mask, window)
            is_causal = is_causal or self.causal or cache is not None
            inputs = self._inputs(q, k, v, is_causal, mask, query_mask, window, num_keys)
            if isinstance(cache, StateCache):
                heads = operators.attend_with_state(inputs, cache)
            else:
                heads = self._attend(inputs)
            weights = operators.attention_weights(inputs) if need_weights else None
            output = self.out_proj(heads.transpose(1, 2).flatten(2))
        if self._makes_m_step and cache is None:
            m_step(self, inputs, mask if query_mask is None and is_self else query_mask)
        if weights is not None and average_attn_weights:
            weights = weights.mean(1)
        if not batched:
            output, weights = output[0], None if weights is None else weights[0]
        return output, weights

    def extra_repr(self) -> str:
        text = f"variant={self.variant}, num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}, "
        text += f"head_dim={self.head_dim}"
        if self.variant in MIXTURES:
            text += f", num_components={self.num_components}, e_step={self.e_step}, prior={self.prior_kind}"
        window = "" if self.window is None else f", window={self.window}"
        return text + f", causal={self.causal}{window}, dropout={self.dropout}"

    def _inputs(
        self, query: Tensor, key: Tensor, value: Tensor, is_causal: bool, key_mask: Tensor | None,
        query_mask: Tensor | None, window: int | None, num_keys: int = 0,
    ) -> AttentionInputs:  # fmt: skip
        """`num_keys`: the positions so far, of which `key` may be only the last ones."""
        log_prior, shift, log_variance = local_part(self.log_prior), self.key_shift, local_part(self.log_variance)
        if self.mixing == "keys":  # `project` has mixed the keys
            log_prior = shift = None
        if log_prior is not None and log_prior.dim() == 3:
            last = max(num_keys, key.shape[-2])
            log_prior = log_prior[..., last - key.shape[-2] : last]
        # Operators may save them for backward, and the M-step writes into the buffers.
        if log_prior is not None and self.prior_kind == "em":
            log_prior = log_prior.clone()
        if shift is not None and self.means_kind == "em":
            shift = shift.clone()
        variance = None if log_variance is None else log_variance.exp()
        return AttentionInputs(
            query, key, value, shift, log_prior, variance, is_causal, window, key_mask, query_mask, self.variant,
            self.e_step, self.feature_map, self.dropout if self.training else 0.0, self.impl,
        )  # fmt: skip

    def _attend(self, inputs: AttentionInputs) -> Float[Tensor, "b h nq d"]:
        if not torch.compiler.is_compiling():
            for hook in self._attention_hooks.values():
                hook(self, inputs)
        return operators.attend(inputs) if self.ring is None else context_parallel.attend(inputs, self.ring)

    @property
    def _makes_m_step(self) -> bool:
        return bool(self.em_buffers) and self.training and self.m_step_enabled
