"""Classifiers of texts, of pairs of documents and of images.

B batch, N positions, E width of the model, C classes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import ImageClassifierOutput, SequenceClassifierOutput
from transformers.utils.generic import can_return_tuple

from mgk.hf.base import UNEXPECTED, MGKPreTrainedModel, without_head
from mgk.hf.config import MGKConfig
from mgk.hf.inputs import check_options, classification_loss, read_texts, require_one_text

if TYPE_CHECKING:
    from jaxtyping import Float, Int


class MGKForSequenceClassification(MGKPreTrainedModel):
    """A classifier of one sequence: of its mean encoding, as in the paper's Long Range Arena experiments, or, for a
    language model, of its last real token, with a new linear layer `score`.
    """

    kinds: ClassVar[tuple[str, ...]] = ("classifier", "language")
    auto, pipeline = "AutoModelForSequenceClassification", "text-classification"
    accepts_loss_kwargs = False  # the loss is a mean, which `Trainer` divides by the number of accumulated steps
    _keys_to_ignore_on_load_unexpected: list[str] | None = [  # noqa: RUF012
        name for name in UNEXPECTED if "classifier" not in name and "score" not in name
    ]

    def _build(self, config: MGKConfig) -> nn.Module:
        model = super()._build(config)
        return without_head(model) if config.kind == "language" else model

    def _add_head(self, config: MGKConfig) -> None:
        if config.kind == "language":
            self.score = nn.Linear(config.hidden_size, config.num_labels or 2, bias=False)

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
        hooked = self.wants_states(kwargs)
        texts = read_texts(self, input_ids, inputs_embeds, attention_mask, position_ids, kwargs)
        require_one_text(texts)
        check_options(kwargs)
        found = self.encode(texts, output_hidden_states=hooked, return_dict=True)
        if self.config.kind == "language":
            logits = self.score(last_real(found.last_hidden_state, texts.mask, input_ids, self.config.pad_token_id))
        else:
            logits = self.mgk.head(self.mgk.mean(found.last_hidden_state, texts.mask))
        loss = classification_loss(self.config, logits, labels)
        return SequenceClassifierOutput(loss=loss, logits=logits, hidden_states=found.hidden_states)


def last_real(
    hidden: Float[Tensor, "b n e"], mask: Tensor | None, tokens: Int[Tensor, "b n"] | None, padding: int | None
) -> Float[Tensor, "b e"]:
    """Return the state of the last real token of each row. Without a mask, `padding` tokens at the end do not count."""
    if mask is None and (tokens is None or padding is None):
        return hidden[:, -1]
    real = tokens != padding if mask is None else mask  # type: ignore[operator]
    place = (torch.arange(hidden.shape[1], device=hidden.device) * real).argmax(1)
    return hidden[torch.arange(len(hidden), device=hidden.device), place]


class MGKForDocumentMatching(MGKForSequenceClassification):
    """A classifier of pairs of documents: `input_ids` and `attention_mask` are (B,2,N)."""

    kinds = ("matcher",)
    _keys_to_ignore_on_load_unexpected = None
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
        hooked = self.wants_states(kwargs)
        check_options(kwargs)
        found = self.encode(None, pixel_values, output_hidden_states=hooked, return_dict=True)
        logits = self.mgk.classifier(self.mgk.pooled(found.last_hidden_state))
        loss = classification_loss(self.config, logits, labels)
        return ImageClassifierOutput(loss=loss, logits=logits, hidden_states=found.hidden_states)
