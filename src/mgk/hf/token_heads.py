"""Heads that read every token: classification of tokens, masked language models and question answering.

They are new layers on the encoder of a classifier or a language model, and load the folders of both.

B batch, N positions, E width of the model, C classes, V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor, nn
from transformers.modeling_outputs import MaskedLMOutput, QuestionAnsweringModelOutput, TokenClassifierOutput
from transformers.utils.generic import can_return_tuple

from mgk.hf.base import UNEXPECTED, MGKPreTrainedModel, without_head
from mgk.hf.config import MGKConfig
from mgk.hf.inputs import check_options, cross_entropy, read_texts
from mgk.hf.output import Vocabulary, as_output_layer
from mgk.nn import TiedSoftmax
from mgk.nn.arguments import weight_of
from mgk.nn.output import IGNORE

if TYPE_CHECKING:
    from jaxtyping import Float, Int


class TokenHead(MGKPreTrainedModel):
    """What they share: an encoder without its own head."""

    kinds: ClassVar[tuple[str, ...]] = ("classifier", "language")
    accepts_loss_kwargs = False
    _keys_to_ignore_on_load_unexpected = UNEXPECTED[:3]

    def _build(self, config: MGKConfig) -> nn.Module:
        return without_head(super()._build(config))

    def states(
        self, input_ids: Tensor | None, inputs_embeds: Tensor | None, attention_mask: Tensor | None,
        position_ids: Tensor | None, options: dict[str, Any],
    ) -> Any:  # fmt: skip
        """Return the output of the encoder; packed documents are kept apart."""
        hooked = self.wants_states(options)
        texts = read_texts(self, input_ids, inputs_embeds, attention_mask, position_ids, options)
        check_options(options)
        return self.encode(texts, output_hidden_states=hooked, return_dict=True)


class MGKForTokenClassification(TokenHead):
    """A classifier of every token, such as named-entity recognition."""

    auto, pipeline = "AutoModelForTokenClassification", "token-classification"

    def _add_head(self, config: MGKConfig) -> None:
        self.score = nn.Linear(config.hidden_size, config.num_labels or 2)

    @can_return_tuple
    def forward(
        self,
        input_ids: Int[Tensor, "b n"] | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Int[Tensor, "b n"] | None = None,
        inputs_embeds: Float[Tensor, "b n e"] | None = None,
        labels: Int[Tensor, "b n"] | None = None,
        **kwargs: Any,
    ) -> TokenClassifierOutput:
        """Return logits (B,N,C), and the mean cross-entropy of `labels` that are not -100."""
        found = self.states(input_ids, inputs_embeds, attention_mask, position_ids, kwargs)
        logits = self.score(found.last_hidden_state)
        loss: Any = None if labels is None else cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
        return TokenClassifierOutput(loss=loss, logits=logits, hidden_states=found.hidden_states)


class MGKForQuestionAnswering(TokenHead):
    """Where the answer to a question begins and ends in a text."""

    auto, pipeline = "AutoModelForQuestionAnswering", "question-answering"

    def _add_head(self, config: MGKConfig) -> None:
        self.qa_outputs = nn.Linear(config.hidden_size, 2)

    @can_return_tuple
    def forward(
        self,
        input_ids: Int[Tensor, "b n"] | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Int[Tensor, "b n"] | None = None,
        inputs_embeds: Float[Tensor, "b n e"] | None = None,
        start_positions: Int[Tensor, " b"] | None = None,
        end_positions: Int[Tensor, " b"] | None = None,
        **kwargs: Any,
    ) -> QuestionAnsweringModelOutput:
        """Return logits (B,N) of both ends, and their mean loss; a position outside of the text does not count."""
        found = self.states(input_ids, inputs_embeds, attention_mask, position_ids, kwargs)
        start, end = self.qa_outputs(found.last_hidden_state).float().unbind(-1)
        loss: Any = None
        if start_positions is not None and end_positions is not None:
            length = start.shape[1]
            ends = (x.view(-1).clamp(0, length) for x in (start_positions, end_positions))
            loss = sum(cross_entropy(logits, end, length) for logits, end in zip((start, end), ends, strict=True)) / 2
        return QuestionAnsweringModelOutput(
            loss=loss, start_logits=start, end_logits=end, hidden_states=found.hidden_states
        )


class MGKForMaskedLM(Vocabulary, TokenHead):
    """A model of masked tokens: the encoder of a classifier, and a softmax tied to its embedding."""

    kinds = ("classifier",)
    auto, pipeline = "AutoModelForMaskedLM", "fill-mask"

    def _add_head(self, config: MGKConfig) -> None:
        self.output = TiedSoftmax(config.vocab_size, config.hidden_size)
        as_output_layer(self.output, self)

    @can_return_tuple
    def forward(
        self,
        input_ids: Int[Tensor, "b n"] | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Int[Tensor, "b n"] | None = None,
        inputs_embeds: Float[Tensor, "b n e"] | None = None,
        labels: Int[Tensor, "b n"] | None = None,
        **kwargs: Any,
    ) -> MaskedLMOutput:
        """Return logits (B,N,V), and the mean cross-entropy of `labels` that are not -100."""
        found = self.states(input_ids, inputs_embeds, attention_mask, position_ids, kwargs)
        logits = self.output(found.last_hidden_state)
        loss: Any = None if labels is None else cross_entropy(logits.flatten(0, 1), labels.flatten(), IGNORE)
        return MaskedLMOutput(loss=loss, logits=logits, hidden_states=found.hidden_states)

    @property
    def softmax(self) -> Any:
        """The softmax over the vocabulary."""
        return self.output

    @property
    def output_weight(self) -> Tensor:
        """The weight of the output layer: that of the embedding."""
        return weight_of(self.mgk.encoder.tokens)

    def get_output_embeddings(self) -> nn.Module:
        """Return the output layer, whose weight is that of the embedding."""
        return self.output

    def set_output_embeddings(self, value: nn.Module) -> None:
        """Refuse another output layer: its weight is that of the embedding."""
        if value is not self.output:
            raise ValueError("value: expected the output layer of the model, which is tied; set_input_embeddings")


HEADS = (MGKForTokenClassification, MGKForQuestionAnswering, MGKForMaskedLM)
