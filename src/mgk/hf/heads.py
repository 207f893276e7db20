"""Classifiers of texts, of pairs of documents and of images.

B batch, N positions, E width of the model, C classes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor
from transformers.modeling_outputs import ImageClassifierOutput, SequenceClassifierOutput
from transformers.utils.generic import can_return_tuple

from mgk.hf.base import MGKPreTrainedModel
from mgk.hf.inputs import check_options, classification_loss, read_texts, require_one_text

if TYPE_CHECKING:
    from jaxtyping import Float, Int


class MGKForSequenceClassification(MGKPreTrainedModel):
    """A classifier of one sequence, as in the paper's Long Range Arena experiments."""

    kinds = ("classifier",)
    auto, pipeline = "AutoModelForSequenceClassification", "text-classification"
    accepts_loss_kwargs = False  # the loss is a mean, which `Trainer` divides by the number of accumulated steps

    @can_return_tuple
    def forward(
        self,
        input_ids: Int[Tensor, "b n"] | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Int[Tensor, "b n"] | None = None,
        inputs_embeds: Float[Tensor, "b n e"] | None = None,
        labels: Tensor | None = None,
        **kwargs: Any,
    ) -> SequenceClassifierOutput:
        """Return logits (B,C), and the loss of `config.problem_type` if there are labels.

        Without a `problem_type`, as in Transformers: one class is a regression, float labels are a multi-label problem,
        and anything else is cross-entropy.
        """
        hooked = kwargs.get("output_hidden_states")
        texts = read_texts(self, input_ids, inputs_embeds, attention_mask, position_ids, kwargs)
        require_one_text(texts)
        check_options(kwargs)
        found = self.encode(texts, output_hidden_states=hooked, return_dict=True)
        logits = self.mgk.head(self.mgk.mean(found.last_hidden_state, texts.mask))
        loss = classification_loss(self.config, logits, labels)
        return SequenceClassifierOutput(loss=loss, logits=logits, hidden_states=found.hidden_states)


class MGKForDocumentMatching(MGKForSequenceClassification):
    """A classifier of pairs of documents: `input_ids` and `attention_mask` are (B,2,N)."""

    kinds = ("matcher",)
    auto = "AutoModelForNextSentencePrediction"  # Transformers' Auto class for pairs of documents


class MGKForImageClassification(MGKPreTrainedModel):
    """A vision transformer."""

    kinds = ("vision",)
    auto, pipeline = "AutoModelForImageClassification", "image-classification"
    accepts_loss_kwargs = False
    main_input_name = "pixel_values"

    @can_return_tuple
    def forward(
        self, pixel_values: Float[Tensor, "b c s s"], labels: Tensor | None = None, **kwargs: Any
    ) -> ImageClassifierOutput:
        """Return logits (B,C), and the loss if there are labels."""
        hooked = kwargs.get("output_hidden_states")
        check_options(kwargs)
        found = self.encode(None, pixel_values, output_hidden_states=hooked, return_dict=True)
        logits = self.mgk.classifier(self.mgk.pooled(found.last_hidden_state))
        loss = classification_loss(self.config, logits, labels)
        return ImageClassifierOutput(loss=loss, logits=logits, hidden_states=found.hidden_states)
