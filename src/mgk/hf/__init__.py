"""Transformers integration. Importing it registers the models of mgk with Transformers' Auto classes.

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
    TASKS,
    MGKForCausalLM,
    MGKForDocumentMatching,
    MGKForImageClassification,
    MGKForSequenceClassification,
    MGKModel,
)
from mgk.hf.token_heads import HEADS, MGKForMaskedLM, MGKForQuestionAnswering, MGKForTokenClassification
from mgk.merge import MergeReport, finetune, mean_loss, merge_heads

__all__ = [
    "MGKCache",
    "MGKConfig",
    "MGKForCausalLM",
    "MGKForDocumentMatching",
    "MGKForImageClassification",
    "MGKForMaskedLM",
    "MGKForQuestionAnswering",
    "MGKForSequenceClassification",
    "MGKForTokenClassification",
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
for _model in (MGKModel, *TASKS, *HEADS):
    getattr(transformers, _model.auto).register(MGKConfig, _model, exist_ok=True)
# `Trainer` shifts the labels that it smooths only for the models of this list.
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES["mgk"] = MGKForCausalLM.__name__
