"""Small models of every kind, in float64, and the classifier's and language model's formulas written out.

B batch, N positions, E width of the model.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, layer_norm

from mgk.models import ClassifierConfig, LanguageModelConfig, MatcherConfig, VisionConfig, build
from mgk.models.encoder import TokenEncoder
from tests.nn.common import dense, visible

KINDS: dict[str, dict[str, Any]] = {
    "softmax": {"attention": "softmax"},
    "linear": {"attention": "linear"},
    "mgk": {"attention": "mgk"},
    "mgk-hard": {"attention": "mgk", "e_step": "hard"},
    "mgk-variance": {"attention": "mgk", "learn_variance": True, "components": 3},
    "smgk": {"attention": "smgk"},
    "smgk-em": {"attention": "smgk", "prior": "em", "prior_momentum": 0.5},
    "smgk-positions": {"attention": "smgk", "prior": "em", "prior_positions": 32},
    "smgk-hard": {"attention": "smgk", "e_step": "hard"},
    "mlk": {"attention": "mlk", "prior": "uniform"},
    "smlk": {"attention": "smlk"},
    "smlk-favor": {"attention": "smlk", "feature_map": "favor"},
}
SMALL: dict[str, Any] = {
    "heads": 2, "head_dim": 4, "layers": 2, "width": 12, "hidden": 16, "dropout": 0.0, "attention_dropout": 0.0,
}  # fmt: skip
# A language model as they are built today, with everything that the paper's has not.
MODERN: dict[str, Any] = {
    "norm": "pre", "norm_type": "rms", "activation": "swiglu", "mlp_bias": False, "output_bias": False, "qk_norm": True,
    "positions": "rotary", "rope_theta": 5e5, "rope_type": "yarn", "rope_factor": 4.0, "rope_original_length": 8,
    "cutoffs": (), "vocabulary_multiple": 16, "tie_word_embeddings": False,
}  # fmt: skip
CONFIGS: dict[str, tuple[Any, dict[str, Any]]] = {
    "classifier": (ClassifierConfig, {"vocabulary": 20, "max_length": 24, "classes": 3, "classifier_hidden": 8}),
    "matcher": (MatcherConfig, {"vocabulary": 20, "max_length": 24, "classes": 3, "classifier_hidden": 8}),
    "language": (LanguageModelConfig, {"vocabulary": 20, "cutoffs": (5, 11), "max_length": 24}),
    "vision": (VisionConfig, {"image_size": 8, "patch_size": 2, "channels": 3, "classes": 3}),
}


def make(model: str, kind: str = "smgk", **options: Any) -> Any:
    """In evaluation mode, with parameters that are not the initial ones."""
    config, own = CONFIGS[model]
    torch.manual_seed(sum(map(ord, kind)))
    result = build(config(**(SMALL | own | KINDS[kind] | options))).double().eval()
    with torch.no_grad():
        for name, parameter in result.named_parameters():
            if "proj" not in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
            elif parameter.dim() == 2:  # projections of the language model begin small
                nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
    return result


def random_tokens(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(1, 20, shape, generator=torch.Generator().manual_seed(seed))


def batch(model: str, size: int = 2) -> dict[str, Tensor]:
    """A batch with padding, as the data gives it."""
    label = torch.arange(size) % 3
    if model == "vision":
        return {"pixels": torch.randn(size, 3, 8, 8, dtype=torch.float64), "label": label}
    if model == "language":
        return {"tokens": random_tokens(size, 9), "target": random_tokens(size, 9, seed=1)}
    tokens = random_tokens(size, *((2,) if model == "matcher" else ()), 9)
    mask = torch.ones(tokens.shape, dtype=torch.bool)
    mask[-1, ..., 5:] = False
    return {"tokens": tokens * mask, "mask": mask, "label": label}


def plain_encoder(encoder: TokenEncoder, tokens: Tensor, mask: Tensor | None, is_causal: bool) -> Tensor:
    """What the layers make of tokens (B,N), from the parameters by name, with learned or sinusoidal positions."""
    length, width = tokens.shape[1], encoder.tokens.weight.shape[1]
    x = encoder.tokens.weight[tokens]
    if isinstance(encoder.positions, nn.Embedding):
        x = x + encoder.positions.weight[:length]
    else:
        angle = torch.arange(length)[:, None] * 10_000.0 ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
        x = width**0.5 * x + torch.cat([angle.sin(), angle.cos()], -1)
    seen = visible(len(tokens), length, length, is_causal, None if mask is None else ~mask)
    for layer in encoder.stack.layers:
        assert not isinstance(layer, Tensor)
        pre, act = layer.norm == "pre", gelu if isinstance(layer.activation, nn.GELU) else torch.relu
        first, second = (_norm(norm) for norm in (layer.attention_norm, layer.feed_forward_norm))  # type: ignore[arg-type]
        inner = first(x) if pre else x
        x = x + dense(layer.attention, inner, inner, inner, seen)[0]  # type: ignore[arg-type]
        x = x if pre else first(x)
        inner = second(x) if pre else x
        x = x + layer.down(act(layer.up(inner)))  # type: ignore[operator]
        x = x if pre else second(x)
    final = encoder.stack.final_norm
    return _norm(final)(x) if isinstance(final, nn.LayerNorm) else x


def _norm(module: nn.LayerNorm) -> Any:
    return lambda x: layer_norm(x, x.shape[-1:], module.weight, module.bias)
