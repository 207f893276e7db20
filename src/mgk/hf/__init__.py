"""The Hugging Face face of mgk: importing it registers the models with Transformers' Auto classes.

>>> import mgk.hf
>>> model = transformers.AutoModelForCausalLM.from_pretrained("my/model")
>>> model.generate(**tokenizer("Once", return_tensors="pt"))
"""

from __future__ import annotations

try:
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
except ImportError:
    raise ImportError("mgk.hf needs Transformers 5: pip install 'mgk[hf]'") from None

from mgk.hf.cache import MGKCache
from mgk.hf.config import MGKConfig
from mgk.hf.convert import from_run, hf_to_run, run_to_hf
from mgk.hf.models import (
    MGKForCausalLM,
    MGKForDocumentMatching,
    MGKForImageClassification,
    MGKForSequenceClassification,
    MGKModel,
)
from mgk.merge.finetune import finetune, mean_loss
from mgk.merge.merge import MergeReport, merge_heads

__all__ = [
    "MGKCache",
    "MGKConfig",
    "MGKForCausalLM",
    "MGKForDocumentMatching",
    "MGKForImageClassification",
    "MGKForSequenceClassification",
    "MGKModel",
    "MergeReport",
    "finetune",
    "from_run",
    "hf_to_run",
    "mean_loss",
    "merge_heads",
    "run_to_hf",
]

transformers.AutoConfig.register("mgk", MGKConfig, exist_ok=True)
for _auto, _model in (
    (transformers.AutoModel, MGKModel),
    (transformers.AutoModelForCausalLM, MGKForCausalLM),
    (transformers.AutoModelForSequenceClassification, MGKForSequenceClassification),
    (transformers.AutoModelForNextSentencePrediction, MGKForDocumentMatching),  # do these two go together?
    (transformers.AutoModelForImageClassification, MGKForImageClassification),
):
    _auto.register(MGKConfig, _model, exist_ok=True)
# For models of this list alone `Trainer` shifts the labels that it smooths.
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES["mgk"] = MGKForCausalLM.__name__
