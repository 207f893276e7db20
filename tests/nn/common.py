"""The module's formula written out, and the kinds of modules that tests run over.

B batch, H heads, M components, Nq queries, Nk keys, D width of a head; i query, j key, r component.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from mgk.nn import MixtureAttention
from mgk.ops.feature_maps import ScaledFeatures, dpfp

KINDS: dict[str, dict[str, Any]] = {
    "softmax": {"variant": "softmax"},
    "mgk": {"variant": "mgk"},
    "mgk-hard": {"variant": "mgk", "e_step": "hard"},
    "mgk-em": {"variant": "mgk", "prior": "em"},
    "smgk": {"variant": "smgk"},
    "smgk-hard": {"variant": "smgk", "e_step": "hard"},
    "smgk-positions": {"variant": "smgk", "prior": "em", "prior_positions": 16},
    "smgk-variance": {"variant": "smgk", "num_components": 3, "learn_variance": True, "prior": "uniform"},
    "smgk-means": {"variant": "smgk", "means": "em"},
    "linear": {"variant": "linear"},
    "mlk": {"variant": "mlk", "prior": "uniform"},
    "mlk-dpfp": {"variant": "mlk", "feature_map": "dpfp"},
    "smlk": {"variant": "smlk"},
    "smlk-favor": {"variant": "smlk", "feature_map": "favor"},
    "mlk-keys": {"variant": "mlk", "mixing": "keys"},
    "smlk-keys": {"variant": "smlk", "mixing": "keys"},
}

# Exponents stay below 1e3 in these tests, so in float64 a weight is right to 1e3 * 2e-16, and sums of at most 1e2
# numbers of the order of 1 to 1e-10.
EXACT: dict[str, Any] = {"rtol": 1e-10, "atol": 1e-10}


def make(kind: str, embed_dim: int = 12, num_heads: int = 3, **options: Any) -> MixtureAttention:
    """A module in float64 and evaluation mode, with a prior and variances that are not the initial ones."""
    torch.manual_seed(sum(map(ord, kind)))
    module = MixtureAttention(embed_dim, num_heads, dtype=torch.float64, **(KINDS[kind] | options)).eval()
    with torch.no_grad():
        for tensor in (module.log_prior, module.log_variance):
            if tensor is not None:
                tensor += 0.5 * torch.randn_like(tensor)
    return module


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def visible(batch: int, num_queries: int, num_keys: int, is_causal: bool, padding: Tensor | None = None) -> Tensor:
    """Which query sees which key, (B,1,Nq,Nk), for a lower-right aligned causal mask and padding (B,Nk)."""
    i, j = torch.arange(num_queries)[:, None], torch.arange(num_keys)
    seen = (j - num_keys <= i - num_queries) if is_causal else torch.ones(num_queries, num_keys, dtype=torch.bool)
    seen = seen.expand(batch, 1, -1, -1)
    return seen if padding is None else seen & ~padding[:, None, None]


def dense(module: MixtureAttention, query: Tensor, key: Tensor, value: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
    """Output (B,Nq,E) and weights (B,H,Nq,Nk) from the parameters by name, every tensor at full size."""
    H, M, D = module.num_heads, module.num_components, module.head_dim
    q = normalised(module.query_norm, module.query_proj(query).unflatten(-1, (H, D)).transpose(1, 2))
    v = module.value_proj(value).unflatten(-1, (H, D)).transpose(1, 2)
    if module.variant in ("mgk", "mlk"):
        k = module.key_proj(key).unflatten(-1, (H, M, D)).permute(0, 2, 3, 1, 4)  # (B,H,M,Nk,D)
    else:
        k = module.key_proj(key).unflatten(-1, (H, D)).transpose(1, 2)[:, :, None]
    k = normalised(module.key_norm, k)
    if module.shift is not None:
        k = k + module.shift[:, :, None]
    prior = torch.full((H, M, 1), 1 / M, dtype=q.dtype)
    if module.log_prior is not None:
        prior = module.log_prior.exp().reshape(H, M, -1)[..., : key.shape[1]]
    if module.variant == "softmax":
        scores = (q @ k[:, :, 0].mT / math.sqrt(D)).exp()
    elif module.variant in ("mgk", "smgk"):
        s2 = math.sqrt(D) if module.log_variance is None else module.log_variance.exp()[..., None, None]
        terms = (-(q[:, :, None, :, None] - k[:, :, :, None]).square().sum(-1) / (2 * s2)).exp()  # (B,H,M,Nq,Nk)
        scores = terms.amax(2) if module.e_step == "hard" else (prior[:, :, None] * terms).sum(2)
    elif module.mixing == "keys":
        scores = features(module, q) @ features(module, (prior[..., None] * k).sum(2)).mT
    else:
        phi_q, phi_k = features(module, q), features(module, k)
        scores = phi_q @ (prior[..., None] * phi_k).sum(2).mT
    scores = scores * seen
    total = scores.sum(-1, keepdim=True)
    weights = torch.where(total > 0, scores / total, 0)
    return module.out_proj((weights @ v).transpose(1, 2).flatten(2)), weights


def normalised(norm: nn.Module, x: Tensor) -> Tensor:
    """The vectors of length sqrt(D), but for the weight (and for 1e-5), where a module has qk_norm."""
    return x if isinstance(norm, nn.Identity) else norm.weight * x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()  # type: ignore[no-any-return, operator]


def features(module: MixtureAttention, x: Tensor) -> Tensor:
    if module.feature_map == "elu":
        return torch.nn.functional.elu(x) + 1
    phi = dpfp(x) if module.feature_map == "dpfp" else module.feature_map(x)  # type: ignore[operator]
    return phi.dense() if isinstance(phi, ScaledFeatures) else phi
