"""Analytic cost of attention: FLOPs, exponentials, decode cache and parameters of every variant.

A multiply-add is 2 FLOPs. Only matrix products count, as in PyTorch's counter and in published tables. Elementwise
work and work per position (norms, maxima, rescaling, masks) is left out. Exponentials, which limit a modern GPU at
D <= 64, are counted separately.

B batch, H heads, M components, Nq queries, Nk keys, D width of a head, Dv width of a value, E width of the model,
F width of the features of the linear family, P pairs of a query and a key that it sees, C length of a chunk.
"""

from __future__ import annotations

from dataclasses import dataclass

from mgk.ops.arguments import E_STEPS, check_choice, check_count, check_flag
from mgk.ops.feature_maps import feature_width
from mgk.ops.linear_forms import CHUNK
from mgk.variants import FEATURE_MAPS, GAUSSIAN, LINEAR, MIXTURES, PRIORS, PROJECTED, SHIFTED, VARIANTS


@dataclass(frozen=True, kw_only=True)
class Dimensions:
    """The sizes of one attention call, or of its layer.

    `value_dim` is `head_dim` by default, `kv_heads` (of keys and values) `heads`, `embed_dim` heads * head_dim, and
    `features` the width of the feature map.
    `components` and `e_step` apply to the mixtures, `feature_map` and `features` to the linear family.
    """

    variant: str
    heads: int
    head_dim: int
    queries: int
    keys: int
    batch: int = 1
    components: int = 2
    value_dim: int | None = None
    embed_dim: int | None = None
    feature_map: str = "elu"
    features: int | None = None
    causal: bool = False
    window: int | None = None
    e_step: str = "soft"
    kv_heads: int | None = None

    def __post_init__(self) -> None:
        check_choice("variant", self.variant, VARIANTS)
        check_choice("e_step", self.e_step, E_STEPS)
        check_choice("feature_map", self.feature_map, FEATURE_MAPS)
        check_flag("causal", self.causal)
        for name in ("heads", "head_dim", "queries", "keys", "batch", "components"):
            check_count(name, getattr(self, name))
        for name in ("value_dim", "embed_dim", "features", "window", "kv_heads"):
            if getattr(self, name) is not None:
                check_count(name, getattr(self, name))

    @property
    def M(self) -> int:  # noqa: N802
        return self.components if self.variant in MIXTURES else 1

    @property
    def G(self) -> int:  # noqa: N802
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def Dv(self) -> int:  # noqa: N802
        return self.head_dim if self.value_dim is None else self.value_dim

    @property
    def E(self) -> int:  # noqa: N802
        return self.heads * self.head_dim if self.embed_dim is None else self.embed_dim

    @property
    def F(self) -> int:  # noqa: N802
        return feature_width(self.feature_map, self.head_dim) if self.features is None else self.features

    @property
    def P(self) -> int:  # noqa: N802
        """Visible pairs of one head: all, or with a causal mask those on and below the lower-right diagonal.

        A window leaves out the pairs below a second diagonal.
        """
        Nq, Nk = self.queries, self.keys
        if not self.causal:
            return Nq * Nk
        hidden = Nk if self.window is None else min(Nk, self.window)  # from here on, keys before the last query's own
        return below_diagonal(Nq, Nk) - below_diagonal(Nq, Nk - hidden)


def below_diagonal(queries: int, keys: int) -> int:
    """Pairs on and below the diagonal of a matrix that ends at its last corner."""
    seen = min(queries, keys)  # queries that see a key; the last one sees all of them
    return seen * keys - seen * (seen - 1) // 2


@dataclass(frozen=True)
class Flops:
    forward: int
    backward: int

    @property
    def total(self) -> int:
        return self.forward + self.backward


def attention_flops(d: Dimensions) -> Flops:
    """FLOPs between the projections, of the algorithm that is implemented. Per visible pair, forward and backward:

        softmax   2D + 2Dv            6D + 4Dv
        mgk       2DM + 2Dv           6DM + 4Dv           M score products, one product with V
        smgk      2D + 2M + 2Dv       6D + 6M + 4Dv       one score product; sum_r u[i,r] w[j,r] is a product of width M

    The backward recomputes the scores. Shifted keys add q.b and k.b for every position. The hard E-step costs the same
    as the soft one. For the linear family see `linear_flops`.
    """
    if d.variant in LINEAR:
        return linear_flops(d)
    pairs = pair_flops(d)
    shifts = d.batch * d.heads * 2 * d.head_dim * d.M * (d.queries + d.keys) if d.variant == "smgk" else 0
    return Flops(pairs.forward + shifts, pairs.backward + 2 * shifts)


def pair_flops(d: Dimensions) -> Flops:
    """The part of `attention_flops` that is spent on visible pairs."""
    scores = 2 * d.head_dim + 2 * d.M if d.variant == "smgk" else 2 * d.head_dim * d.M
    pairs = d.batch * d.heads * d.P
    return Flops(pairs * (scores + 2 * d.Dv), pairs * (3 * scores + 4 * d.Dv))


def linear_flops(d: Dimensions) -> Flops:
    """FLOPs of the linear family: 2F(Dv+1) per key to add it to the sums, and per query to read them.

    With a causal mask the pairs within each chunk are added, and the backward recomputes each chunk. The features are
    mixed elementwise, so M counts only for FAVOR+, whose features are a product with F random directions. One step of
    decoding is a call with queries = keys = 1.
    """
    width = d.Dv + 1
    drawn = 2 * d.head_dim * d.F * (d.queries + d.M * d.keys) if d.feature_map == "favor" else 0
    shared = min(d.queries, d.keys) if d.causal else 0  # positions with a query and a key
    before = 2 * d.F * width * (d.keys - shared)
    if not d.causal:
        sums = before + 2 * d.F * width * d.queries
        return Flops(d.batch * d.heads * (sums + drawn), d.batch * d.heads * (2 * sums + drawn))
    chunks = [min(CHUNK, shared - start) for start in range(0, shared, CHUNK)]
    scan = sum(4 * d.F * width * size + 2 * (d.F + width) * size**2 for size in chunks)
    forward, backward = before + scan + drawn, 2 * before + 3 * scan + drawn
    return Flops(d.batch * d.heads * forward, d.batch * d.heads * backward)


def reference_flops(d: Dimensions) -> Flops:
    """FLOPs of the dense formula (`impl="reference"`; for `softmax` PyTorch's own), as counted by `FlopCounterMode`.

    These are M score products and one product with V over all Nq x Nk pairs, hidden ones included, and in the backward
    two products for each.
    """
    if d.variant in LINEAR:
        raise ValueError(f"variant: expected softmax, mgk or smgk, which have a dense reference, got {d.variant!r}")
    forward = d.batch * d.heads * d.queries * d.keys * (2 * d.head_dim * d.M + 2 * d.Dv)
    return Flops(forward, 2 * forward)


def projection_flops(d: Dimensions) -> Flops:
    """FLOPs of the four projections. Backward has one product for the input and one for the weight."""
    key_width = d.head_dim * (d.M if d.variant in PROJECTED else 1)
    of_queries, of_keys = d.heads * (d.head_dim + d.Dv), d.G * (key_width + d.Dv)  # query and output; key and value
    forward = 2 * d.batch * d.E * (d.queries * of_queries + d.keys * of_keys)
    return Flops(forward, 2 * forward)


def exponentials(d: Dimensions) -> int:
    """Exponentials of a forward pass. The backward of softmax, mgk and smgk computes them again.

    Per visible pair: one for softmax, smgk and a hard E-step, M for mgk. Soft smgk adds M for every query and key.
    The linear family needs one for each feature of each query and component key, and none with DPFP.
    """
    positions = d.queries + d.keys
    if d.variant in LINEAR:
        per_head = 0 if d.feature_map == "dpfp" else d.F * (d.queries + d.M * d.keys)
    elif d.e_step == "hard" or d.variant == "softmax":
        per_head = d.P
    elif d.variant == "smgk":
        per_head = d.P + d.M * positions
    else:
        per_head = d.M * d.P
    return d.batch * d.heads * per_head


def cache_bytes(d: Dimensions, bytes_per_number: int) -> int:
    """Bytes of the decode cache after `keys` positions: keys and values of the window, or F x (Dv + 2) numbers."""
    check_count("bytes_per_number", bytes_per_number)
    if d.variant in LINEAR:  # a state for each query head, for any number of positions
        numbers = d.heads * d.F * (d.Dv + 2)
    else:
        held = d.keys if d.window is None else min(d.keys, d.window)
        numbers = d.G * held * (d.head_dim * (d.M if d.variant == "mgk" else 1) + d.Dv)
    return d.batch * numbers * bytes_per_number


def parameters(
    d: Dimensions,
    *,
    bias: bool = True,
    prior: str = "sgd",
    learn_variance: bool = False,
    kdim: int | None = None,
    vdim: int | None = None,
) -> int:
    """Parameters of `mgk.nn.MixtureAttention`, with values of width D. A prior updated by EM is a buffer."""
    check_choice("prior", prior, PRIORS)
    inner, value_width = d.heads * d.head_dim, d.G * d.head_dim
    key_width = value_width * (d.M if d.variant in PROJECTED else 1)
    weights = d.E * inner + (kdim or d.E) * key_width + (vdim or d.E) * value_width + inner * d.E
    biases = inner + key_width + value_width + d.E if bias else 0
    shift = inner * d.M if d.variant in SHIFTED else 0
    log_prior = d.heads * d.M if prior == "sgd" and d.e_step == "soft" and d.variant in MIXTURES else 0
    log_variance = d.heads * d.M if learn_variance and d.variant in GAUSSIAN else 0
    return weights + biases + shift + log_prior + log_variance
