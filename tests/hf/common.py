"""Small models of every kind, and small Transformers models for head merging."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    ViTConfig,
    ViTForImageClassification,
)

from mgk.hf import (
    MGKConfig,
    MGKForCausalLM,
    MGKForDocumentMatching,
    MGKForImageClassification,
    MGKForSequenceClassification,
)
from tests.models.common import CONFIGS, KINDS, SMALL

CLASSES: dict[str, Any] = {
    "classifier": MGKForSequenceClassification,
    "matcher": MGKForDocumentMatching,
    "language": MGKForCausalLM,
    "vision": MGKForImageClassification,
}


def config(model: str, kind: str = "smgk", **options: Any) -> MGKConfig:
    fields = SMALL | CONFIGS[model][1] | KINDS[kind] | options
    if "max_length" in fields:
        fields["max_position_embeddings"] = fields.pop("max_length")
    return MGKConfig(kind=model, **fields)


def make(model: str, kind: str = "smgk", **options: Any) -> Any:
    """A model in evaluation mode with weights of the order of 1."""
    torch.manual_seed(sum(map(ord, model + kind)))
    return stirred(CLASSES[model](config(model, kind, **options)))


def same_weights(one: Any, two: Any) -> bool:
    """Whether weights are bit-identical. Outputs may differ by rounding: loaded weights have another alignment."""
    first, second = one.state_dict(), two.state_dict()
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@torch.no_grad()
def stirred(model: Any) -> Any:
    """Replace the initial weights, with which all tokens and all heads would be much alike."""
    for name, parameter in model.named_parameters():
        if parameter.dim() < 2:
            parameter.add_(0.2 * torch.randn_like(parameter))
        elif "emb" in name or "tokens" in name or "positions" in name:
            parameter.normal_()
        else:
            parameter.normal_(std=parameter.shape[-1] ** -0.5)
    return model.eval()


def inputs(model: str, size: int = 2) -> dict[str, Tensor]:
    """Inputs as from a tokenizer or an image processor, with some padding on the right."""
    label = torch.arange(size) % 3
    generator = torch.Generator().manual_seed(0)
    if model == "vision":
        return {"pixel_values": torch.randn(size, 3, 8, 8, generator=generator), "labels": label}
    pair = (2,) if model == "matcher" else ()
    tokens = torch.randint(1, 20, (size, *pair, 9), generator=generator)
    if model == "language":
        return {"input_ids": tokens, "labels": tokens}
    mask = torch.ones_like(tokens)
    mask[-1, ..., 5:] = 0
    return {"input_ids": tokens * mask, "attention_mask": mask, "labels": label}


TEXT: dict[str, Any] = {"vocab_size": 30, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
DEEP: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
FOREIGN: dict[str, tuple[Any, Any]] = {
    "gpt2": (GPT2LMHeadModel, GPT2Config(**TEXT, n_embd=16, n_layer=2, n_head=4, n_positions=32)),
    "llama": (LlamaForCausalLM, LlamaConfig(**TEXT, **DEEP, num_attention_heads=4, num_key_value_heads=4)),
    "llama-grouped": (LlamaForCausalLM, LlamaConfig(**TEXT, **DEEP, num_attention_heads=8, num_key_value_heads=4)),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config(**TEXT, **DEEP, num_attention_heads=4, num_key_value_heads=2)),
    "bert": (BertForSequenceClassification, BertConfig(**TEXT, **DEEP, num_attention_heads=4)),
    "vit": (ViTForImageClassification, ViTConfig(**DEEP, num_attention_heads=4, image_size=8, patch_size=2)),
}


def foreign(name: str) -> tuple[Any, dict[str, Tensor]]:
    """A Transformers model in float64 without dropout, and a batch for it, padded on the left."""
    kind, settings = FOREIGN[name]
    torch.manual_seed(sum(map(ord, name)))
    model = stirred(kind(settings)).double()
    if name == "vit":
        return model, {"pixel_values": torch.randn(3, 3, 8, 8, dtype=torch.float64)}
    tokens = torch.randint(3, 30, (3, 12))
    mask = torch.ones_like(tokens)
    mask[0, :4] = 0
    return model, {"input_ids": tokens * mask, "attention_mask": mask}
