"""The classes that `tests.hf.transformers_tests` hands to Transformers' own tests. Not collected by pytest itself.

It needs the folder of these tests on the path, under the name `tests_of_transformers`.
"""

from __future__ import annotations

import unittest
from typing import Any

import torch
from tests_of_transformers.test_modeling_common import ModelTesterMixin, ids_tensor  # type: ignore[import-not-found]
from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

import mgk.hf as hf
from mgk.variants import VARIANTS

MODEL_MAPPING_NAMES["mgk"] = "MGKModel"  # the models that have no loss

SIZES: dict[str, Any] = {
    "hidden_size": 32, "num_attention_heads": 2, "head_dim": 16, "num_hidden_layers": 2, "intermediate_size": 37,
    "dropout": 0.1, "attention_dropout": 0.0,
}  # fmt: skip
LABELS, LENGTH, BATCH = 3, 7, 3


class Inputs:
    """What the tests ask of a model tester: a configuration, and a batch for it."""

    is_training = True
    num_hidden_layers, hidden_size, num_attention_heads = 2, 32, 2
    seq_length = encoder_seq_length = key_length = LENGTH
    batch_size = BATCH

    def __init__(self, parent: Any, kind: str, options: dict[str, Any]) -> None:
        self.parent, self.kind, self.options = parent, kind, options
        if kind == "vision":
            self.seq_length = self.encoder_seq_length = 16

    def get_config(self) -> Any:
        own: dict[str, Any] = {"image_size": 8, "patch_size": 2, "num_labels": LABELS}
        if self.kind != "vision":
            own = {"vocab_size": 99, "max_position_embeddings": 64, "pad_token_id": 98, "num_labels": LABELS}
        if self.kind == "language":
            own |= {"cutoffs": (), "norm": "pre", "bos_token_id": 96, "eos_token_id": 97}
        return hf.MGKConfig(kind=self.kind, **SIZES, **(own | self.options))

    def prepare_config_and_inputs_for_common(self) -> tuple[Any, dict[str, Any]]:
        if self.kind == "vision":
            return self.get_config(), {"pixel_values": torch.randn(BATCH, 3, 8, 8)}
        shape = [BATCH, 2, LENGTH] if self.kind == "matcher" else [BATCH, LENGTH]
        return self.get_config(), {"input_ids": ids_tensor(shape, 95), "attention_mask": torch.ones(shape).long()}


class Cases(ModelTesterMixin):  # type: ignore[misc]
    """The common tests of one kind of model with one attention."""

    kind = "language"
    options: dict[str, Any] = {}  # noqa: RUF012
    has_attentions = False
    test_torch_exportable = True
    is_encoder_decoder = False

    def setUp(self) -> None:
        self.model_tester = Inputs(self, self.kind, self.options)

    def test_model_get_set_embeddings(self) -> None:
        """As in the tests of ViT, whose patches are no table of embeddings either."""
        if self.kind != "vision":
            return super().test_model_get_set_embeddings()  # type: ignore[no-any-return]
        for model_class in self.all_model_classes:
            assert isinstance(model_class(self.model_tester.get_config()).get_input_embeddings(), torch.nn.Module)
        return None

    @property
    def test_resize_embeddings(self) -> bool:
        """Whether there is a vocabulary."""
        return self.kind != "vision"

    def test_inputs_embeds(self) -> None:
        """Skipped as in the tests of ViT, which has no embeddings of tokens."""
        if self.kind == "vision":
            self.skipTest("images are no tokens")  # type: ignore[attr-defined]
        super().test_inputs_embeds()

    def test_inputs_embeds_matches_input_ids(self) -> None:
        """Skipped as above."""
        if self.kind == "vision":
            self.skipTest("images are no tokens")  # type: ignore[attr-defined]
        super().test_inputs_embeds_matches_input_ids()

    def _prepare_for_class(
        self, inputs: dict[str, Any], model_class: Any, return_labels: bool = False
    ) -> dict[str, Any]:
        inputs = dict(inputs)
        name = model_class.__name__
        if model_class is hf.MGKModel and self.kind == "matcher":
            inputs = {key: value[:, 0] if value.dim() == 3 else value for key, value in inputs.items()}
        if not return_labels:
            return inputs
        if name.endswith(("CausalLM", "MaskedLM", "TokenClassification")):
            inputs["labels"] = torch.zeros(BATCH, LENGTH, dtype=torch.long)
        elif name.endswith("QuestionAnswering"):
            inputs["start_positions"] = inputs["end_positions"] = torch.zeros(BATCH, dtype=torch.long)
        elif name != "MGKModel":
            inputs["labels"] = torch.zeros(BATCH, dtype=torch.long)
        return inputs


CLASSES = {
    "language": (hf.MGKModel, hf.MGKForCausalLM, hf.MGKForSequenceClassification, hf.MGKForTokenClassification,
                 hf.MGKForQuestionAnswering),
    "classifier": (hf.MGKModel, hf.MGKForSequenceClassification, hf.MGKForTokenClassification,
                   hf.MGKForQuestionAnswering, hf.MGKForMaskedLM),
    "matcher": (hf.MGKForDocumentMatching,),
    "vision": (hf.MGKModel, hf.MGKForImageClassification),
}  # fmt: skip
SETTINGS: dict[str, dict[str, Any]] = {attention: {"attention": attention} for attention in VARIANTS} | {
    "smgk-rotary": {"attention": "smgk", "positions": "rotary"},
    "smgk-em": {"attention": "smgk", "prior": "em"},
    "mgk-hard": {"attention": "mgk", "e_step": "hard"},
}

for kind, classes in CLASSES.items():
    for name, options in SETTINGS.items():
        if kind == "vision" and "positions" in options:
            continue
        title = f"Test_{kind}_{name.replace('-', '_')}"
        generative = classes[1:2] if kind == "language" else ()
        members = {
            "kind": kind, "options": options, "all_model_classes": classes, "all_generative_model_classes": generative,
            "__module__": __name__,
        }  # fmt: skip
        globals()[title] = type(title, (Cases, unittest.TestCase), members)
del Cases
