"""Multi-head attention with mixture keys, called as `torch.nn.MultiheadAttention` is called with `batch_first=True`.

B batch, H heads, M components, N positions (Nq queries, Nk keys), E width of the model, D width of a head.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mgk.nn.arguments import (
    MEANS,
    MIXINGS,
    check_attn_mask,
    check_cache,
    check_combination,
    check_rotary,
    check_rotation,
    key_mask,
    make_feature_map,
)  # fmt: skip
from mgk.nn.cache import KeyValueCache, StateCache
from mgk.nn.embeddings import Rotation, rotate, still_part
from mgk.nn.linear import linear, plain_linear, through
from mgk.nn.means import update_means
from mgk.nn.packing import Packing
from mgk.nn.prior import mean_key, prior_statistics, update_log_prior
from mgk.nn.softmax import packed_softmax_attention, softmax_attention, softmax_weights
from mgk.ops import api
from mgk.ops import arguments as check
from mgk.ops.common import autocasts
from mgk.ops.feature_maps import FeatureMap
from mgk.ops.linear import linear_step, mlk_attention, rows_attention, smlk_attention, takes_rows
from mgk.variants import GAUSSIAN, LINEAR, MIXTURES, PRIORS, PROJECTED, SHIFTED, VARIANTS

if TYPE_CHECKING:
    from jaxtyping import Bool, Float

Options = dict[str, Any]  # arguments of mgk.ops by name


class MixtureAttention(nn.Module):
    """h_i = sum_j A[i,j] v_j with keys that are mixtures: the attention of Transformer-MGK, -sMGK, -MLK and -sMLK.

    | variant   | A[i,j] is proportional to                  | keys                |
    | --------- | ------------------------------------------ | ------------------- |
    | `softmax` | exp(q_i.k_j / sqrt(D))                     | k_j = x_j W         |
    | `mgk`     | sum_r prior_r exp(-|q_i - k_jr|^2 / 2 s2)  | k_jr = x_j W_r      |
    | `smgk`    | the same                                   | k_jr = x_j W + b_r  |
    | `linear`  | phi(q_i).phi(k_j)                          | k_j = x_j W         |
    | `mlk`     | sum_r prior_r phi(q_i).phi(k_jr)           | k_jr = x_j W_r      |
    | `smlk`    | the same                                   | k_jr = x_j W + b_r  |

    Parameters: `query_proj`, `key_proj`, `value_proj`, `out_proj` (`nn.Linear` with its own initial values, as in the
    paper's baselines), `shift` (H,M,D) from a standard normal, `log_prior` (H,M) from log(1/M), `log_variance` (H,M)
    from log sqrt(D).

    Args:
        embed_dim: E, the width of queries and outputs.
        num_heads: H.
        variant: see the table.
        head_dim: D; None is E / H. The inner width is H*D whatever E is.
        num_components: M, for the mixtures.
        e_step: "soft" (Eqn 9) or, for `mgk` and `smgk`, "hard" (Eqn 12). A hard E-step uses no prior and owns none.
        prior: "sgd", learned with the rest; "em", a buffer that every forward in training mode moves by an M-step over
            the real queries of all processes (`mgk` and `smgk`, soft; processes must run in step); "uniform", none.
        causal: every call is causal, as if with `is_causal=True`.
        dropout: of attention weights, in training; the linear family has no weights to drop.
        bias: of the four projections.
        feature_map: phi of the linear family: "elu", "dpfp", "favor" (Performer; `self.feature_map.redraw()` draws
            anew), or a callable on (...,D), which may be a module.
        learn_variance: s2 becomes a parameter per head and component (`mgk` and `smgk`); else it is sqrt(D).
        prior_positions: with prior="em", one prior for each of the first so many key positions, (H,M,prior_positions).
        prior_momentum: with prior="em", the share of the old prior that an M-step keeps.
        means: "sgd", shifts learned with the rest; "em" (`smgk`, soft), shifts and variances are buffers that every
            forward in training mode moves by the M-step of Eqn 13 (`mgk.nn.means`), after it was computed with the old.
        mixing: of `mlk` and `smlk`: "features", Eqn 14; "keys", phi(sum_r prior_r k_jr), as in the authors' LRA code,
            which is linear attention with its key projection written as a sum.
        rotary_dim: so much of a head turns with the position (`mgk.nn.embeddings`); `forward` then wants `rotary`. A
            shift lives in the rest of the head, (H,M,D - rotary_dim), so shifted keys cannot turn whole.
        kdim, vdim: widths of `key` and `value` in cross-attention; None is E.
        impl: implementation of `mgk.ops`: "auto" or one by name.
    """

    # What nn.TransformerEncoderLayer reads of its self_attn: this keeps it off a fused path that knows softmax alone.
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
        head_dim: int | None = None,
        num_components: int = 2,
        e_step: str = "soft",
        prior: str = "sgd",
        causal: bool = False,
        dropout: float = 0.0,
        bias: bool = True,
        feature_map: str | FeatureMap = "elu",
        learn_variance: bool = False,
        prior_positions: int | None = None,
        prior_momentum: float = 0.0,
        means: str = "sgd",
        mixing: str = "features",
        rotary_dim: int = 0,
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
        self.dropout = check.check_probability("dropout", dropout)
        self.prior_momentum = check.check_probability("prior_momentum", prior_momentum)
        self.impl = check.check_choice("impl", impl, api.IMPLEMENTATIONS)
        if head_dim is None and embed_dim % num_heads:
            raise ValueError(
                f"embed_dim: expected a multiple of num_heads = {num_heads} unless head_dim is given, got {embed_dim}"
            )
        self.rotary_dim = check_rotary(rotary_dim, self.head_dim, variant)
        self.means_kind = check.check_choice("means", means, MEANS)
        self.mixing = check.check_choice("mixing", mixing, MIXINGS)
        self.moves = True  # what an M-step moves; False for a forward that only repeats one
        check.check_flag("learn_variance", learn_variance)
        check_combination(
            variant, e_step, prior, dropout, feature_map, learn_variance, prior_positions, prior_momentum, means,
            mixing, rotary_dim,
        )  # fmt: skip

        place: Options = {"device": device, "dtype": dtype}
        inner, heads, components = self.num_heads * self.head_dim, self.num_heads, self.num_components
        key_width = inner * components if variant in PROJECTED else inner
        self.query_proj = nn.Linear(embed_dim, inner, check.check_flag("bias", bias), **place)
        self.key_proj = nn.Linear(self.kdim, key_width, bias, **place)
        self.value_proj = nn.Linear(self.vdim, inner, bias, **place)
        self.out_proj = nn.Linear(inner, embed_dim, bias, **place)
        used = prior == "em" or (prior == "sgd" and e_step == "soft" and variant in MIXTURES)
        positions = () if prior_positions is None else (prior_positions,)
        for name, exists, shape in (
            ("shift", variant in SHIFTED, (self.head_dim - rotary_dim,)),
            ("log_variance", learn_variance or means == "em", ()),
            ("log_prior", used, positions),
        ):
            value = torch.empty(heads, components, *shape, **place) if exists else None
            if name in self.moving:
                self.register_buffer(name, value)
            else:
                self.register_parameter(name, None if value is None else nn.Parameter(value))
        self.feature_map = make_feature_map(feature_map, self.head_dim, device) if variant in LINEAR else "elu"
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initial values of what this module itself owns; the projections have a method of their own."""
        if self.shift is not None:
            nn.init.normal_(self.shift)
        if self.log_variance is not None:
            nn.init.constant_(self.log_variance, 0.5 * math.log(self.head_dim))
        if self.log_prior is not None:
            nn.init.constant_(self.log_prior, -math.log(self.num_components))

    @property
    def moving(self) -> tuple[str, ...]:
        """The buffers that M-steps move."""
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
        """b_r of the whole head."""
        if self.shift is None or not self.rotary_dim:
            return self.shift
        return still_part(self.shift, self.head_dim)

    def new_cache(self, batch_size: int, capacity: int = 0) -> KeyValueCache | StateCache:
        """An empty cache for `forward`. `capacity` reserves room for so many positions at once."""
        check.check_count("batch_size", batch_size)
        check.check_count("capacity", capacity, 0)
        return StateCache(batch_size) if self.variant in LINEAR else KeyValueCache(batch_size, capacity)

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
        packing: Packing | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Self-attention of `query`, or cross-attention to `key` and `value`.

        Args:
            query: (B,Nq,E), or (Nq,E) without a batch, then everywhere.
            key: (B,Nk,kdim); None is `query`.
            value: (B,Nk,vdim); None is `key`.
            key_padding_mask: (B,Nk), True (or -inf) where a key is to be ignored. With a cache it covers the keys in
                the cache and the new ones. In self-attention its positions are not counted as queries of an M-step.
            query_padding_mask: (B,Nq), True where a query is padding: its heads give zero, so its output is the bias of
                `out_proj`; it costs nothing where the operator can skip it, and does not count in an M-step.
            rotary: the rotation of the positions of `query`, (B,Nq,D) or (1,Nq,D), if the module has a `rotary_dim`.
            need_weights: return A too, which needs Nq x Nk memory; without dropout.
            attn_mask: (Nq,Nk), the causal mask and no other, which stands for `is_causal=True` and may come beside it.
            average_attn_weights: average A over the heads.
            is_causal: a query sees the keys up to its own position; the last query sees every key.
            cache: of `new_cache`. `query` then holds the positions after those in the cache and is added to it. Such a
                call is causal, is not differentiated, and moves no prior.
            packing: of the batch, instead of its padding: `query` and the output are then packed, (T,E).

        Returns:
            The output (B,Nq,E), and A as (B,Nq,Nk) or (B,H,Nq,Nk) if asked for, else None.
        """
        check.check_flag("is_causal", is_causal)
        if packing is not None:
            others = (key, value, key_padding_mask, attn_mask, cache, query_padding_mask)
            if need_weights or any(other is not None for other in others):
                raise ValueError("packing: expected at most is_causal and rotary beside query and packing, got more")
            return self._packed(query, packing, is_causal, rotary), None
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
        self._check_inputs(query, key, value)
        if cache is not None:
            check_cache(
                cache, StateCache if self.variant in LINEAR else KeyValueCache, len(query), is_self, need_weights
            )
        num_keys = key.shape[1] + (0 if cache is None else cache.length)
        self._check_positions(num_keys)
        is_causal = check_attn_mask(attn_mask, is_causal, query.shape[1], num_keys)
        check_rotation(rotary, self.rotary_dim, query.shape, self.head_dim, is_self)
        mask = key_mask("key_padding_mask", key_padding_mask, "B,Nk", (len(query), num_keys), query)
        if query_padding_mask is key_padding_mask and num_keys == query.shape[1]:
            query_mask = mask
        else:
            query_mask = key_mask("query_padding_mask", query_padding_mask, "B,Nq", (len(query), query.shape[1]), query)
        seen: Options = {"is_causal": is_causal or self.causal or cache is not None, "key_mask": mask}
        if is_self and value is query and cache is None and rotary is None and not need_weights:
            whole = self._whole(query, seen["is_causal"], mask, query_mask)
            if whole is not None:
                return (whole if batched else whole[0]), None

        with torch.set_grad_enabled(torch.is_grad_enabled() and cache is None):
            q, k, v = self._project(query, key, value)
            if rotary is not None:
                q, k = rotate(q, rotary), rotate(k, rotary)
            if isinstance(cache, KeyValueCache):
                k, v = cache.append(k, v)
            if isinstance(cache, StateCache):
                heads, weights = self._linear_step(q, k, v, seen, cache), None
            else:
                heads, weights = self._attend(q, k, v, seen, query_mask, need_weights)
            if query_mask is not None and self.variant not in GAUSSIAN:  # whose operators take it
                heads = heads.masked_fill(~query_mask[:, None, :, None], 0)
            if query_mask is not None and weights is not None:
                weights = weights.masked_fill(~query_mask[:, None, :, None], 0)
            output = through(self.out_proj, heads.transpose(1, 2).flatten(2))
        if self._steps and cache is None:
            self._m_step(q, k, seen, mask if query_mask is None and is_self else query_mask)
        if weights is not None:
            weights = weights.mean(1) if average_attn_weights else weights
            weights = weights if batched else weights[0]
        return (output if batched else output[0]), weights

    def extra_repr(self) -> str:
        text = f"variant={self.variant}, num_heads={self.num_heads}, head_dim={self.head_dim}"
        if self.variant in MIXTURES:
            text += f", num_components={self.num_components}, e_step={self.e_step}, prior={self.prior_kind}"
        return text + f", causal={self.causal}, dropout={self.dropout}"

    def _packed(
        self, x: Float[Tensor, "t e"], packing: Packing, is_causal: bool, rotary: Rotation | None
    ) -> Float[Tensor, "t e"]:
        """Self-attention of a packed batch: it is spread out for the operators that need that, and no longer."""
        x = check.check_tensor("query", x, "T,E")[None]
        self._check_inputs(x, x, x)
        self._check_positions(packing.shape[1])
        check_rotation(rotary, self.rotary_dim, packing.shape, self.head_dim, True)
        is_causal = is_causal or self.causal
        whole = self._whole(x, is_causal, None, None, packing) if rotary is None else None
        if whole is not None:
            return whole.squeeze(0)
        heads = self._rows(x, packing, is_causal) if rotary is None else None
        if heads is not None:
            return through(self.out_proj, heads.transpose(1, 2).flatten(2).squeeze(0))
        q, k, v = self._project(x, x, x, packing)
        if rotary is not None:
            q, k = rotate(q, rotary), rotate(k, rotary)
        seen: Options = {"is_causal": is_causal, "key_mask": packing.mask}
        heads, _ = self._attend(q, k, v, seen, packing.mask, False)
        if self._steps:
            self._m_step(q, k, seen, packing.mask)
        return through(self.out_proj, packing.pack(heads.transpose(1, 2).flatten(2)))

    def _whole(
        self,
        x: Float[Tensor, "b n e"],
        is_causal: bool,
        mask: Tensor | None,
        query_mask: Tensor | None,
        packing: Packing | None = None,
    ) -> Float[Tensor, "b n e"] | None:
        """Projections and attention as one operator, where there is one; of (1,T,E) with `packing`."""
        projections = (*self._inputs, self.out_proj)
        if self.variant not in GAUSSIAN or self.moving or self.log_variance is not None or self.rotary_dim:
            return None
        if torch.compiler.is_compiling() or not all(map(plain_linear, projections)):
            return None
        weights, biases = ([getattr(each, name) for each in projections] for name in ("weight", "bias"))
        autocast = autocasts(x)
        dtype = torch.get_autocast_dtype(x.device.type) if autocast else x.dtype
        parameters = [each for each in (*weights, *biases, self.shift, self.log_prior) if each is not None]
        same = len({each.dtype for each in weights} | (set() if autocast else {x.dtype})) == 1
        if not same or not api.takes_layer(x, parameters, dtype, self.head_dim, self.impl):
            return None
        from mgk.ops.triton.layer import attention_layer  # not loaded before it is needed

        ends, longest = (None, 0) if packing is None else (packing.ends, packing.shape[1])
        return attention_layer(
            x, weights, biases, self.shift, self.log_prior, mask, query_mask, ends, longest, self.head_dim,
            self.e_step, is_causal, self._dropout_p, dtype,
        )  # fmt: skip

    def _rows(self, x: Float[Tensor, "1 t e"], packing: Packing, is_causal: bool) -> Float[Tensor, "1 h t d"] | None:
        """The heads, where kernels read packed rows as they lie; None where they do not."""
        if self.variant == "softmax":
            options: Options = {"is_causal": is_causal, "dropout_p": self._dropout_p, "impl": self.impl}
            return packed_softmax_attention(*self._project(x, x, x), packing, **options)
        if self.variant in LINEAR:
            fits = not is_causal and takes_rows(x, self.head_dim, self.feature_map, self.impl)
        else:
            # A prior per position is one of the padded batch, which says where a token stands in its row.
            by_position = self.log_prior is not None and self.log_prior.dim() == 3
            fits = not (self._steps or by_position) and api.takes_rows(x, self.head_dim, self.impl)
        if not fits:
            return None
        (q, k, v), ends, longest = self._project(x, x, x), packing.ends, packing.shape[1]
        mixture = self._mixture(longest)
        shift, log_prior, variance = mixture["shift"], mixture["log_prior"], mixture["variance"]
        if self.variant in LINEAR:
            k = k if k.dim() == 5 or shift is not None else k[:, :, None]
            return rows_attention(q, k, shift, v, log_prior, ends, longest)
        how = self.e_step, is_causal, self._dropout_p
        return api.rows_attention(q, k, shift, v, log_prior, variance, *how, ends, longest)

    def _project(
        self, query: Tensor, key: Tensor, value: Tensor, packing: Packing | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries (B,H,Nq,D), keys (B,H,Nk,D) or (B,H,M,Nk,D), values (B,H,Nk,D); with `packing` of (1,T,E)."""

        def spread(x: Tensor) -> Tensor:
            return x if packing is None else packing.unpack(x.squeeze(0))

        if key is query and value is query and all(map(plain_linear, self._inputs)):
            # One product reads x once, forward and backward: on a GPU 4% to 6% of a training step at width 64.
            weight = torch.cat([projection.weight for projection in self._inputs])
            bias = None if self.query_proj.bias is None else torch.cat([part.bias for part in self._inputs])
            sizes = [projection.out_features for projection in self._inputs]
            q, k, v = torch.split(spread(linear(query, weight, bias)), sizes, -1)
        else:
            q, k, v = spread(self.query_proj(query)), spread(self.key_proj(key)), spread(self.value_proj(value))
        heads = (self.num_heads, self.head_dim)
        q, v = (x.view(*x.shape[:2], *heads).transpose(1, 2) for x in (q, v))
        if self.variant not in PROJECTED:
            k = k.view(*k.shape[:2], *heads).transpose(1, 2)
        else:
            k = k.view(*k.shape[:2], self.num_heads, self.num_components, self.head_dim).permute(0, 2, 3, 1, 4)
        if self.mixing == "keys":
            k = mean_key(k, self.key_shift, self.prior if self.log_prior is None else self.log_prior.exp())
        return q, k, v

    @property
    def _inputs(self) -> tuple[nn.Linear, nn.Linear, nn.Linear]:
        return self.query_proj, self.key_proj, self.value_proj

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        seen: Options,
        query_mask: Tensor | None,
        need_weights: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """The heads (B,H,Nq,D), and A if it is asked for."""
        if self.variant == "softmax":
            return self._softmax(query, key, value, seen, query_mask, need_weights)
        if self.variant in GAUSSIAN:
            return self._gaussian(query, key, value, seen, query_mask, need_weights)
        return self._linear(query, key, value, seen, need_weights)

    def _softmax(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        seen: Options,
        query_mask: Tensor | None,
        need_weights: bool,
    ) -> tuple[Tensor, Tensor | None]:
        options: Options = {"dropout_p": self._dropout_p, "query_mask": query_mask, "impl": self.impl}
        output = softmax_attention(query, key, value, **options, **seen)
        return output, softmax_weights(query, key, **seen) if need_weights else None

    def _gaussian(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        seen: Options,
        query_mask: Tensor | None,
        need_weights: bool,
    ) -> tuple[Tensor, Tensor | None]:
        mixture = self._mixture(key.shape[-2]) | seen
        weights = api.attention_weights(query, key, e_step=self.e_step, **mixture) if need_weights else None
        options: Options = {
            "e_step": self.e_step, "dropout_p": self._dropout_p, "query_mask": query_mask, "impl": self.impl,
        }  # fmt: skip
        shift = mixture.pop("shift")
        if shift is None:
            return api.mgk_attention(query, key, value, **mixture, **options), weights
        return api.smgk_attention(query, key, shift, value, **mixture, **options), weights

    def _linear(
        self, query: Tensor, key: Tensor, value: Tensor, seen: Options, need_weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        mixture = self._mixture(key.shape[-2])
        shift = mixture["shift"]
        options: Options = {
            "log_prior": mixture["log_prior"], "feature_map": self.feature_map, "impl": self.impl, **seen,
        }  # fmt: skip
        attend: Callable[[Tensor], Tensor]
        if shift is not None:
            attend = partial(smlk_attention, query, key, shift, **options)
        else:
            attend = partial(mlk_attention, query, key if key.dim() == 5 else key[:, :, None], **options)
        if not need_weights:
            return attend(value), None
        every_key = torch.eye(key.shape[-2], dtype=value.dtype, device=value.device)  # sum_j A[i,j] e_j is a row of A
        return attend(value), attend(every_key.expand(*value.shape[:2], -1, -1))

    def _linear_step(self, query: Tensor, key: Tensor, value: Tensor, seen: Options, cache: StateCache) -> Tensor:
        mask = None if seen["key_mask"] is None else seen["key_mask"][:, cache.length :]  # of the new keys alone
        mixture = self._mixture(key.shape[-2])
        output, state = linear_step(
            cache.state,
            query,
            key,
            value,
            mixture["log_prior"],
            shift=mixture["shift"],
            feature_map=self.feature_map,
            key_mask=mask,
        )
        cache.advance(state, query.shape[2])
        return output

    def _mixture(self, num_keys: int) -> Options:
        """What makes a mixture of so many keys, by the names of `mgk.ops`."""
        log_prior, shift = self.log_prior, self.key_shift
        if self.mixing == "keys":  # it is made
            log_prior = shift = None
        if log_prior is not None and log_prior.dim() == 3:
            log_prior = log_prior[..., :num_keys]
        # A backend may keep them for backward, and the M-step writes into the buffers.
        if log_prior is not None and "log_prior" in self.moving:
            log_prior = log_prior.clone()
        if shift is not None and "shift" in self.moving:
            shift = shift.clone()
        variance = None if self.log_variance is None else self.log_variance.exp()
        return {"log_prior": log_prior, "variance": variance, "shift": shift}

    @torch.no_grad()
    def _m_step(self, query: Tensor, key: Tensor, seen: Options, query_mask: Tensor | None) -> None:
        mixture = self._mixture(key.shape[-2])  # before any of it moves
        if self.prior_kind == "em":
            assert self.log_prior is not None  # the buffer
            total, count = prior_statistics(query, key, **mixture, **seen, query_mask=query_mask, impl=self.impl)
            update_log_prior(self.log_prior, total, count, self.prior_momentum)
        if self.means_kind == "em":
            assert self.shift is not None  # the buffers
            assert self.log_variance is not None
            update_means(self.shift, self.log_variance, mixture["log_prior"], query, key, **seen, query_mask=query_mask)

    @property
    def _steps(self) -> bool:
        """Whether a forward pass is an M-step too."""
        return bool(self.moving) and self.training and self.moves

    @property
    def _dropout_p(self) -> float:
        return self.dropout if self.training else 0.0

    def _check_positions(self, num_keys: int) -> None:
        if self.log_prior is not None and self.log_prior.dim() == 3 and num_keys > self.log_prior.shape[2]:
            raise ValueError(
                f"key: expected at most {self.log_prior.shape[2]} positions (prior_positions), got {num_keys}"
            )

    def _check_inputs(self, query: object, key: object, value: object) -> None:
        query = check.check_tensor("query", query, "B,Nq,E")
        check.check_shape("query", query, "B,Nq,E", (*query.shape[:2], self.embed_dim))
        key = check.check_tensor("key", key, "B,Nk,kdim")
        check.check_shape("key", key, "B,Nk,kdim", (len(query), key.shape[1], self.kdim), " to go with query")
        value = check.check_tensor("value", value, "B,Nk,vdim")
        check.check_shape("value", value, "B,Nk,vdim", (*key.shape[:2], self.vdim), " to go with key")
        self._check_place("query", query)
        if key is not query:
            self._check_place("key", key)
        if value is not query and value is not key:
            self._check_place("value", value)

    def _check_place(self, name: str, x: Tensor) -> None:
        """An input is of the dtype and on the device of its projection, unless that is one that sees to it itself."""
        projection = getattr(self, f"{name}_proj")
        weight = getattr(projection, "weight", x)
        if (x.dtype != weight.dtype or x.device != weight.device) and plain_linear(projection):
            cast = autocasts(x) and torch.float64 not in (x.dtype, weight.dtype)
            check.check_same(name, x, weight, dtype=not cast, whose=f"{name}_proj.weight")
