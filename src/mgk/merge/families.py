"""The families of Transformers models whose heads can be merged: where their attention keeps its parts.

docs/merging.md has the same table for users, and says what cannot be merged and why.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

LANGUAGE = ("Model", "ForCausalLM", "ForSequenceClassification")
ENCODER = ("Model", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")
IMAGE = ("Model", "ForImageClassification")


@dataclass(frozen=True)
class Family:
    """Classes and names of a family. Names of modules and attributes are those in its self-attention module."""

    prefix: str
    """Of the names of its classes, such as "Llama" of LlamaForCausalLM."""
    tasks: tuple[str, ...]
    """The rest of the names of its model classes."""
    attention: str
    """Class of the self-attention module."""
    names: tuple[str, str, str, str] = ("q_proj", "k_proj", "v_proj", "o_proj")
    """Projections of query, key, value and output. One name for the first three: one matrix holds them."""
    interleaved: bool = False
    """Whether that matrix has query, key and value of the first head, then those of the second head, and so on."""
    core: str = ""
    """The submodule that calls the attention function; "" for the module itself."""
    width: str = "head_dim"
    """Attribute with the width of a head."""
    rebuilt: bool = False
    """Whether the family's own code needs as many heads of queries as of keys; it is replaced by `SplitAttention`."""
    norm_offset: float = 0.0
    """Added to the weights of `q_norm` and `k_norm`."""
    norm_together: bool = False
    """Whether `q_norm` and `k_norm` normalise all heads together."""
    within: str = ""
    """Part of the name of the modules to merge, where only some of the model's are."""
    config_name: str = ""

    @property
    def config(self) -> str:
        return self.config_name or f"{self.prefix}Config"

    @cached_property
    def classes(self) -> tuple[str, ...]:
        return tuple(self.prefix + task for task in self.tasks)


BERT = ("self.query", "self.key", "self.value", "output.dense")
FAMILIES = (
    Family("GPT2", ("Model", "LMHeadModel", "ForSequenceClassification"), "GPT2Attention",
           names=("c_attn", "c_attn", "c_attn", "c_proj")),
    Family("Llama", LANGUAGE, "LlamaAttention"),
    Family("Mistral", LANGUAGE, "MistralAttention"),
    Family("Qwen2", LANGUAGE, "Qwen2Attention"),
    Family("Qwen3", LANGUAGE, "Qwen3Attention"),
    Family("Gemma2", LANGUAGE, "Gemma2Attention"),
    Family("Gemma3", ("TextModel", "ForCausalLM"), "Gemma3Attention", norm_offset=1.0,
           config_name="Gemma3TextConfig"),
    Family("Phi3", LANGUAGE, "Phi3Attention", names=("qkv_proj", "qkv_proj", "qkv_proj", "o_proj"), rebuilt=True),
    Family("GPTNeoX", LANGUAGE, "GPTNeoXAttention", names=("query_key_value",) * 3 + ("dense",), interleaved=True,
           width="head_size", rebuilt=True),
    Family("OPT", LANGUAGE, "OPTAttention", names=("q_proj", "k_proj", "v_proj", "out_proj"), rebuilt=True),
    Family("Olmo2", LANGUAGE, "Olmo2Attention", norm_together=True),
    Family("Bert", ENCODER, "BertAttention", names=BERT, core="self", width="self.attention_head_size"),
    Family("Roberta", ENCODER, "RobertaAttention", names=BERT, core="self", width="self.attention_head_size"),
    Family("XLMRoberta", ENCODER, "XLMRobertaAttention", names=BERT, core="self", width="self.attention_head_size"),
    Family("DistilBert", ENCODER, "DistilBertSelfAttention", names=("q_lin", "k_lin", "v_lin", "out_lin"),
           width="attention_head_size"),
    Family("ModernBert", ENCODER, "ModernBertAttention", names=("Wqkv", "Wqkv", "Wqkv", "Wo"), rebuilt=True),
    Family("ViT", IMAGE, "ViTAttention"),
    Family("DeiT", IMAGE, "DeiTAttention"),
    Family("Whisper", ("Model", "ForConditionalGeneration", "ForAudioClassification"), "WhisperAttention",
           names=("q_proj", "k_proj", "v_proj", "out_proj"), rebuilt=True, within="encoder."),
)  # fmt: skip
BY_ATTENTION = {family.attention: family for family in FAMILIES}
REFUSED = {
    "attn_logit_softcapping": "soft-capped scores, as the kernels have no tanh (load the model with "
    "attn_logit_softcapping=None to merge it without)",
    "sinks": "attention sinks",
    "relative_attention_bias": "a bias for each pair of positions, as it would need memory for N x N numbers",
}
"""Attributes of attention modules that cannot be merged, and what they mean."""
