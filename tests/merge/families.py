"""One table of the Transformers models whose heads can be merged, tiny and random, in float64."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor

from mgk.merge.layers import TransformersLayer, layers_of
from tests.hf.common import stirred

TEXT: dict[str, Any] = {"vocab_size": 30, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
DEEP: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
WIDE = TEXT | DEEP
GROUPED: dict[str, Any] = WIDE | {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 6}
LOCAL: dict[str, Any] = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 1e4}
GEMMA = GROUPED | LOCAL | {"query_pre_attn_scalar": 10, "attn_logit_softcapping": None, "final_logit_softcapping": 9.0}
IMAGE: dict[str, Any] = DEEP | {"image_size": 8, "patch_size": 2}
SOUND: dict[str, Any] = TEXT | {
    "d_model": 16, "encoder_layers": 2, "decoder_layers": 1, "encoder_attention_heads": 4, "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "num_mel_bins": 5, "max_source_positions": 10,
    "max_target_positions": 12, "decoder_start_token_id": 1,
}  # fmt: skip
# The model class and its configuration. Together they have every feature of docs/merging.md.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2LMHeadModel", TEXT | {"n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 32}),
    "llama": ("LlamaForCausalLM", WIDE),
    "llama-multi-query": ("LlamaForCausalLM", WIDE | {"num_key_value_heads": 1}),
    "mistral": ("MistralForCausalLM", GROUPED | {"sliding_window": 4}),
    "qwen2": ("Qwen2ForCausalLM", GROUPED | LOCAL | {"use_sliding_window": True}),
    "qwen3": ("Qwen3ForCausalLM", GROUPED),
    "gemma2": ("Gemma2ForCausalLM", GEMMA),
    "gemma3": ("Gemma3ForCausalLM", GEMMA),
    "gemma3-multi-query": ("Gemma3ForCausalLM", GEMMA | {"num_key_value_heads": 1}),
    "phi3": (
        "Phi3ForCausalLM",
        GROUPED | {"head_dim": 4, "hidden_size": 32, "sliding_window": 4,
                   "rope_parameters": ROPE | {"partial_rotary_factor": 0.5}},
    ),
    "gpt-neox": ("GPTNeoXForCausalLM", WIDE | {"rope_parameters": ROPE | {"partial_rotary_factor": 0.5}}),
    "opt": ("OPTForCausalLM", TEXT | {"hidden_size": 16, "ffn_dim": 24, "num_hidden_layers": 2,
                                      "num_attention_heads": 4, "max_position_embeddings": 32,
                                      "word_embed_proj_dim": 16}),
    "olmo2": ("Olmo2ForCausalLM", WIDE),
    "bert": ("BertForSequenceClassification", WIDE),
    "roberta": ("RobertaForMaskedLM", WIDE),
    "xlm-roberta": ("XLMRobertaForTokenClassification", WIDE),
    "distilbert": ("DistilBertForMaskedLM", TEXT | {"dim": 16, "hidden_dim": 24, "n_layers": 2, "n_heads": 4}),
    "modernbert": (
        "ModernBertForMaskedLM",
        WIDE | {"local_attention": 6, "global_attn_every_n_layers": 2, "cls_token_id": 1, "sep_token_id": 2},
    ),
    "vit": ("ViTForImageClassification", IMAGE),
    "deit": ("DeiTForImageClassification", IMAGE),
    "whisper": ("WhisperForConditionalGeneration", SOUND),
    "whisper-encoder": ("WhisperForAudioClassification", SOUND),
}  # fmt: skip
GENERATIVE = [name for name, (kind, _) in MODELS.items() if kind.endswith(("CausalLM", "LMHeadModel"))]


def family_model(name: str) -> tuple[Any, dict[str, Tensor]]:
    """A model without dropout, in evaluation mode, and a batch for it; texts are padded on the left."""
    kind, settings = MODELS[name]
    model_class: Any = getattr(transformers, kind)
    torch.manual_seed(sum(map(ord, name)))
    model = stirred(model_class(model_class.config_class(**settings))).double()
    if "pixel" in model.main_input_name:
        return model, {"pixel_values": torch.randn(3, 3, 8, 8, dtype=torch.float64)}
    tokens = torch.randint(3, 30, (3, 12))
    if name.startswith("whisper"):
        batch = {"input_features": torch.randn(3, 5, 20, dtype=torch.float64)}
        return model, batch | ({"decoder_input_ids": tokens[:, :4]} if name == "whisper" else {})
    mask = torch.ones_like(tokens)
    mask[0, :4] = 0
    return model, {"input_ids": tokens * mask, "attention_mask": mask}


@torch.no_grad()
def twin(model: Any) -> None:
    """Make the second half of the heads equal to the first, except for their outputs.

    A single key head stays, and the second half of its query heads is made equal to the first.
    """
    for layer in layers_of(model):
        rows = [x for pair in layer.weights()[:3] for x in pair if x is not None]
        if isinstance(layer, TransformersLayer) and layer.family.norm_together:
            rows += [norm.weight.view(-1, layer.head_dim) for norm in (layer.core.q_norm, layer.core.k_norm)]
        for row in rows:  # (in,H,D) or (H,D)
            heads = row.movedim(-2, 0)
            half = len(heads) // 2
            if half:
                heads[half:] = heads[:half].clone()


@torch.no_grad()
def logits(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """Logits at real positions."""
    found = model(**batch).logits
    return found[batch["attention_mask"].bool()] if found.dim() == 3 and "attention_mask" in batch else found  # type: ignore[no-any-return]


def other(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return inputs that the model was not calibrated on."""
    return {n: x.roll(1, -1) if n == "input_ids" else -x if x.is_floating_point() else x for n, x in batch.items()}
